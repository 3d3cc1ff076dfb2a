"""A transport inside one process that still turns every message into bytes and back."""

from __future__ import annotations

from collections.abc import Mapping

from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.failure import Failure, Failures


class Loopback:
    """Clients in this process, asked one after another."""

    def __init__(self, runtimes: Mapping[int, ClientRuntime]):
        self._runtimes = runtimes

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], Failures]:
        """Each client's reply; for a client that raises, what went wrong."""
        replies: dict[int, bytes] = {}
        failures: Failures = {}
        for m, request in requests.items():
            try:
                replies[m] = self._runtimes[m].answer(request)
            except Exception as error:
                failures[m] = Failure.of(error)
        return replies, failures
