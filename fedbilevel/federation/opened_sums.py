"""The secure sums that the server of a run has opened, in a file: a step that is repeated does not ask for them again.

    FILE    a record after another: its length, its SHA-256, and what it holds in the engines' wire format

It holds what was opened since the checkpoint before the last, and sums that last. A kill may leave an unfinished record at its
end, which counts for nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from fedbilevel.engines import wire
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.engines.secure_exchange import Opened
from fedbilevel.runs.files import write_atomically

OPENED = "sums"  # in the run folder
LENGTH, DIGEST = 8, 32  # bytes before a record
Records = dict[bytes, bytes]  # by question


class OpenedSumsFile:
    """Those of one run; the file is first read when a sum is looked for, once no other job of the run has it."""

    def __init__(self, file: Path, run: str):
        self._file, self._run = file, run

    def found(self, question: bytes) -> Opened | None:
        """See `OpenedSums`."""
        record = self._recent.get(question) or self._lasting.get(question)
        return None if record is None else _opened(record)

    def add(self, question: bytes, opened: Opened, lasts: bool) -> None:
        """See `OpenedSums`."""
        record = _record(self._run, question, opened, lasts)
        (self._lasting if lasts else self._recent)[question] = record
        with self._file.open("ab") as file:
            file.write(record)
            file.flush()
            os.fsync(file.fileno())

    def checkpoint(self) -> None:
        """See `OpenedSums`."""
        write_atomically(self._file, b"".join([*self._lasting.values(), *self._recent.values()]))
        self._recent.clear()

    @cached_property
    def _known(self) -> tuple[Records, Records]:
        """The records that last, and the others."""
        lasting, recent = Records(), Records()
        whole = self._file.read_bytes() if self._file.exists() else b""
        read = 0
        for record in _records(whole):
            content = _content(record)
            if content["run"] == self._run:
                (lasting if content["lasts"] else recent)[bytes.fromhex(content["question"])] = record
            read += len(record)
        if read < len(whole) or not self._file.exists():
            write_atomically(self._file, whole[:read])
        return lasting, recent

    @property
    def _lasting(self) -> Records:
        return self._known[0]

    @property
    def _recent(self) -> Records:
        return self._known[1]


def _record(run: str, question: bytes, opened: Opened, lasts: bool) -> bytes:
    failures = {str(m): [str(kind), line, sent] for m, (kind, line, sent) in opened.failures.items()}
    content = {"run": run, "question": question.hex(), "lasts": lasts, "members": opened.members, "total": opened.total}
    data = wire.encode({**content, "failures": failures})
    return len(data).to_bytes(LENGTH, "big") + hashlib.sha256(data).digest() + data


def _records(whole: bytes) -> Iterator[bytes]:
    """Those that are complete."""
    at = 0
    while at < len(whole):
        start = at + LENGTH + DIGEST
        end = start + int.from_bytes(whole[at : at + LENGTH], "big")
        if end > len(whole) or hashlib.sha256(whole[start:end]).digest() != whole[at + LENGTH : start]:
            return
        yield whole[at:end]
        at = end


def _content(record: bytes) -> dict:
    return wire.decode(record[LENGTH + DIGEST :])


def _opened(record: bytes) -> Opened:
    content = _content(record)
    failures = {int(m): Failure(Kind(kind), line, sent) for m, (kind, line, sent) in content["failures"].items()}
    return Opened(content["members"], content["total"], failures)
