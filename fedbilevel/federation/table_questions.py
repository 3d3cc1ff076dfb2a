"""Questions about the sites' tables, which come before a run begins: each goes with the message that would begin it.

So a site knows for which task it is asked, and answers only if it would take part.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedbilevel.engines.failure import Failures
from fedbilevel.errors import InputError
from fedbilevel.federation.flare import Flare

LENGTH = 8  # bytes, before the message that begins the run


class TableQuestions:
    """The sites of a job as a transport for questions about their tables."""

    def __init__(self, transport: Flare, beginnings: Mapping[int, bytes], timeout: float):
        self._transport, self._beginnings, self._timeout = transport, beginnings, timeout

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], Failures]:
        """Like `Flare.ask`."""
        joined = {m: _joined(self._beginnings[m], question) for m, question in requests.items()}
        return self._transport.call("describe", joined, self._timeout)


def _joined(beginning: bytes, question: bytes) -> bytes:
    return len(beginning).to_bytes(LENGTH, "little") + beginning + question


def parted(request: bytes) -> tuple[bytes, bytes]:
    """The message that begins the run, and the question."""
    end = LENGTH + int.from_bytes(request[:LENGTH], "little")
    if end > len(request):
        raise InputError("a question about a table is cut off: refused")
    return request[LENGTH:end], request[end:]
