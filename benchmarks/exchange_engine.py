"""Guarded processes that let pass how FLARE itself sends arrays, for the bare calls that `federation_exchange.py` measures."""

from __future__ import annotations

from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL

from fedbilevel.federation import provision

provision.ENGINE = "exchange_engine"  # before the modules are imported that start processes

from fedbilevel.command.main import main  # noqa: E402, F401
from fedbilevel.federation import guarded_engine, message_gate  # noqa: E402

for allowed in (message_gate.FROM_SITES, message_gate.FROM_SERVER):
    allowed.add((OBJ_DOWNLOADER_CHANNEL, message_gate.ANY))

if __name__ == "__main__":
    guarded_engine.main()
