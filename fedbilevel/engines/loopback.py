"""A transport within one process that still turns every message into bytes and back."""

from __future__ import annotations

from collections.abc import Mapping

from fedbilevel.engines.client_runtime import ClientRuntime


class Loopback:
    """Clients of this process, asked one after another."""

    def __init__(self, runtimes: Mapping[int, ClientRuntime]):
        self._runtimes = runtimes

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], dict[int, str]]:
        """Each client's reply; a client that raises has its error in its place."""
        replies, errors = {}, {}
        for m, request in requests.items():
            try:
                replies[m] = self._runtimes[m].answer(request)
            except Exception as error:
                errors[m] = f"{type(error).__name__}: {error}"
        return replies, errors
