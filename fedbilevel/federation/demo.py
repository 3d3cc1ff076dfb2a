"""A federation on this machine that cleans the digits' labels, and the same run simulated for comparison."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbilevel.errors import InputError
from fedbilevel.federation.provision import Federation, found
from fedbilevel.federation.waiting import wait_until
from fedbilevel.runs.experiment import COUNTERS
from fedbilevel.runs.folder import RunFolder

SITES = [f"hospital-{m}" for m in range(1, 5)]
RUN = ["data-cleaning", "fedpace", "--rounds", "101", "--every", "20"]
DOUBLE = {"JAX_ENABLE_X64": "1"}  # in single precision rounding separates the two runs after about fifty rounds
TOLERANCE = 1e-5
CONNECTING = 60.0  # seconds


def demonstrate(folder: Path, say: Callable[[str], None]) -> None:
    """Create and start a federation, run on it and in simulation, and compare; `InputError` if the numbers differ."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if (folder / "federation").exists():
        if Federation.read(folder / "federation").sites != tuple(SITES):
            raise InputError(f"{folder / 'federation'} is not the federation of an earlier demo: choose another --out")
        shutil.rmtree(folder / "federation")
    federation = found(folder / "federation", SITES, "localhost", port)
    say(f"A server and {len(SITES)} sites, each in its own process, over mutual TLS on 127.0.0.1:{port}.")
    say("Both runs use double precision, so that rounding does not hide whether they agree.\n")
    with _started(federation):
        _command("run", *RUN, "--federation", federation.folder, "--out", folder / "deployed", "--force")
    say("\nThe same run, simulated in one process:")
    _command("run", *RUN, "--knob", f"clients={len(SITES)}", "--out", folder / "simulated", "--force")
    deployed, simulated = (RunFolder(folder / kind / "fedpace").rows() for kind in ("deployed", "simulated"))
    counted, difference = _compared(deployed, simulated)
    say(f"\nRounds and traffic are equal in all {len(deployed)} rows of metrics; the other {counted} numbers differ by at most")
    say(f"{difference:.1e} of their size.")
    if difference > TOLERANCE:
        raise InputError(f"that is more than {TOLERANCE:g}: the federation's numbers are not the simulated run's")
    say("The federation's numbers are the simulated run's.")


@contextmanager
def _started(federation: Federation) -> Iterator[None]:
    """Run the federation's processes during the block."""
    with (federation.folder / "start.txt").open("wb") as out:
        process = subprocess.Popen([*COMMAND, "federation", "start", federation.folder], stdout=out, stderr=out)
    try:
        _await_sites(federation)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _await_sites(federation: Federation) -> None:
    def connected() -> bool:
        done = subprocess.run([*COMMAND, "federation", "status", federation.folder], capture_output=True, text=True)
        return done.returncode == 0 and "not connected" not in done.stdout

    if not wait_until(connected, CONNECTING):
        raise InputError(f"not all sites connected within {CONNECTING:.0f} s: read {federation.folder / 'start.txt'}")


COMMAND: list[str | Path] = [sys.executable, "-m", "fedbilevel"]


def _command(*arguments: str | Path) -> None:
    if subprocess.run([*COMMAND, *arguments], env={**os.environ, **DOUBLE}).returncode != 0:
        raise InputError(f"'fedbilevel {' '.join(map(str, arguments))}' failed: see above")


def _compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[int, float]:
    """How many numbers were compared, and their largest relative difference; the counters must be equal."""
    differences = []
    for a, b in zip(ours, theirs, strict=True):
        for name in b:
            if name in set(COUNTERS) - {"seconds"}:
                if a[name] != b[name]:
                    raise InputError(f"{name} is {a[name]} on the federation and {b[name]} in the simulation")
            elif name != "seconds":
                differences.append(abs(a[name] - b[name]) / max(abs(b[name]), 1e-12))
    return len(differences), max(differences)
