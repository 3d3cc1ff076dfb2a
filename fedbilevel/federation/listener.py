"""The guarded listener of a kit's processes: strangers are named in the log, and a silent one does not block the others.

FLARE completes the TLS handshake with one peer before it accepts the next, does not log the peers it refuses, and talks to
sites whose certificates are revoked. Here each handshake has its own thread and a time limit, a refusal is a line in the log,
and a revoked site gets no further than the handshake; connections that it has open are closed.
"""

from __future__ import annotations

import json
import logging
import ssl
import sys
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.drivers import tcp_driver
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.hci.security import get_certificate_common_name

from fedbilevel.errors import in_words
from fedbilevel.federation.sparse_log import SparseLog

HANDSHAKE_SECONDS = 10.0
REVOKED = "disabled_clients.json"  # in which FLARE's server keeps them, in its kit
logger = logging.getLogger(__name__)
refusals, second_processes = SparseLog(logger), SparseLog(logger)  # apart: strangers cause those, and cannot hide these


class GuardedServer(tcp_driver.TcpStreamServer):
    """Accepts connections at once, and does their TLS handshakes later."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._revoked = Revoked(Path.cwd() / REVOKED)
        if isinstance(self.socket, ssl.SSLSocket):
            setattr(self.socket, "do_handshake_on_connect", False)  # noqa: B010 (its type stub does not know it)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the handshake, then hand over to FLARE."""
        if isinstance(request, ssl.SSLSocket):
            refused = self._refused(request)
            if refused:
                refusals.warning(f"refused a connection from {client_address[0]}:{client_address[1]}: {refused}")
                return
            name, host = get_certificate_common_name(request.getpeercert()), client_address[0]
            if others := {h for h in self._hosts(name) if h != host}:
                second_processes.warning(
                    f"{name} connects from {host} and from {', '.join(others)}: does a second process use its kit?"
                )
        super().finish_request(request, client_address)

    def _refused(self, request: ssl.SSLSocket) -> str:
        """Do the handshake; why it was refused, or nothing."""
        try:
            request.settimeout(HANDSHAKE_SECONDS)
            request.do_handshake()
            request.settimeout(None)
        except OSError as error:
            return str(getattr(error, "reason", None) or error).lower().replace("_", " ")
        name = get_certificate_common_name(request.getpeercert())
        return f"the certificate of {name} is revoked" if name in self._revoked.names() else ""

    def service_actions(self) -> None:
        """Close what revoked sites have open; the server's loop calls this about twice a second."""
        if not self._revoked.names():
            return
        for name, connection in self._open():
            if name in self._revoked.names():
                connection.close()

    def _open(self) -> list[tuple[str, Any]]:
        """The open connections, each with the name in its certificate."""
        with self.driver.conn_lock:
            connections = list(self.driver.connections.values())
        return [(c.get_conn_properties().get(DriverParams.PEER_CN.value, ""), c) for c in connections]

    def _hosts(self, name: str) -> list[str]:
        """Where those are who are connected under this name."""
        found = [c.get_conn_properties()[DriverParams.PEER_ADDR.value] for who, c in self._open() if who == name]
        return [address.rpartition(":")[0] for address in found]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in one line what went wrong with a connection, instead of with a traceback."""
        error = sys.exc_info()[1]
        refusals.warning(f"a connection from {client_address[0]} broke: {in_words(error) if error else ''}")


class Revoked:
    """The names on the list of revoked sites, read again when the list changes."""

    def __init__(self, file: Path):
        self._file, self._seen, self._names = file, 0, frozenset[str]()

    def names(self) -> frozenset[str]:
        """The names; none if there is no list."""
        try:
            changed = self._file.stat().st_mtime_ns
            if changed != self._seen:
                self._names = frozenset(json.loads(self._file.read_text())["disabled_clients"])
                self._seen = changed
        except FileNotFoundError:
            self._names = frozenset()
        return self._names
