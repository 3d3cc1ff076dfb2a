"""Reporting that two processes use one kit, also on one machine: each takes the other's place at the server, time and again."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.drivers.driver_params import DriverParams

from fedbilevel.federation.listener import second_processes

TIMES, WITHIN = 3, 60.0  # so often within so many seconds; a process whose network fails takes its own place once


class Displacements:
    """When connections of each process have taken the places of others that were still open."""

    def __init__(self) -> None:
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=TIMES))

    def repeated(self, name: str) -> bool:
        """Count one, and say whether this happens too often for a single process."""
        times = self._times[name]
        times.append(time.monotonic())
        return len(times) == TIMES and times[-1] - times[0] < WITHIN


def watched(add: Callable[..., None]) -> Callable[..., None]:
    """What adds a connection to those of a process at the other end, of which FLARE closes all but the latest."""
    displacements = Displacements()

    def add_and_watch(self: Any, added: Any) -> None:
        before = [_about(connection, DriverParams.PEER_ADDR) for connection in self.connections]
        add(self, added)
        name, address = _about(added, DriverParams.PEER_CN), _about(added, DriverParams.PEER_ADDR)
        came_here = added.conn.connector.mode == Mode.PASSIVE
        if came_here and name and before and displacements.repeated(self.endpoint.name):
            second_processes.warning(f"{name} connects from {address} and from {before[0]}: does a second process use its kit?")

    return add_and_watch


def _about(connection: Any, what: DriverParams) -> str:
    return str(connection.conn.get_conn_properties().get(what.value) or "")
