"""The server's process with a guarded listener: strangers are named in the log, and a silent one does not block the others.

FLARE completes the TLS handshake with one peer before it accepts the next, and does not log the peers it refuses. Here
each handshake has its own thread and a time limit, and a refusal is a line in the log.

    python -m fedbilevel.federation.listener ARGUMENTS      like FLARE's own `server_train`
"""

from __future__ import annotations

import logging
import runpy
import ssl
from typing import Any

from nvflare.fuel.f3.drivers import tcp_driver

HANDSHAKE_SECONDS = 10.0
logger = logging.getLogger(__name__)


class GuardedServer(tcp_driver.TcpStreamServer):
    """Accepts connections at once, and does their TLS handshakes later."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        if isinstance(self.socket, ssl.SSLSocket):
            setattr(self.socket, "do_handshake_on_connect", False)  # noqa: B010 (its type stub does not know it)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the handshake, then hand over to FLARE."""
        if isinstance(request, ssl.SSLSocket):
            try:
                request.settimeout(HANDSHAKE_SECONDS)
                request.do_handshake()
                request.settimeout(None)
            except OSError as error:
                reason = getattr(error, "reason", None) or error
                logger.warning(
                    "refused a connection from %s:%d: %s", *client_address[:2], str(reason).lower().replace("_", " ")
                )
                return
        super().finish_request(request, client_address)


if __name__ == "__main__":
    tcp_driver.TcpStreamServer = GuardedServer
    runpy.run_module("nvflare.private.fed.app.server.server_train", run_name="__main__", alter_sys=True)
