"""Over which sites the secure sums were that a site has helped to open: it answers no question again in a sum over others.

Two sums of the same answers, of which one is over one site more, differ by that site's answer. So before a site hands out
what unmasks a sum, it writes down the question and the sites whose numbers are in the sum, in a file for each run that stays.
It takes t sites to open a sum, and none of them will be in another one for the same question: so two that are opened have the
same sites, or differ by t answers or more. (A server that lies about who has dropped out needs t others for that, of 2 t.)

    FILE    for each question half its SHA-256, and half that of the sites' names
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from fedbilevel.core.locks import held
from fedbilevel.errors import InputError
from fedbilevel.federation.site_store import place_of_run

HALF = 16  # bytes of a hash
MOST = 1 << 22  # questions of one run


class AnsweredSumsFile:
    """Those of one run, in which client m is the site `names[m]`. Several processes may use the file."""

    def __init__(self, folder: Path, run: str, names: Sequence[str]):
        self._file, self._names = place_of_run(folder, run), names
        self._read = 0  # bytes of the file that are in what follows
        self._answered: dict[bytes, bytes] = {}

    def require(self, question: bytes, members: Collection[int]) -> None:
        """See `AnsweredSums`."""
        if self._file.exists():
            with held(self._file):
                self._catch_up()
        self._require(question[:HALF], self._hash(members))

    def add(self, question: bytes, members: Collection[int]) -> None:
        """See `AnsweredSums`."""
        asked, over = question[:HALF], self._hash(members)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch(mode=0o600)
        with held(self._file):
            self._catch_up()
            self._require(asked, over)
            if asked in self._answered:
                return
            with self._file.open("ab") as file:
                file.write(asked + over)
                file.flush()
                os.fsync(file.fileno())
            self._catch_up()

    def _require(self, asked: bytes, over: bytes) -> None:
        if self._answered.get(asked, over) != over:
            raise InputError(
                "this site has answered the same in a sum over other sites, and both sums together would show what one site "
                "has answered: refused"
            )
        if asked not in self._answered and len(self._answered) >= MOST:
            raise InputError(f"this site takes part in at most {MOST:,} secure sums of one run: start another run")

    def _catch_up(self) -> None:
        """Read what was added to the file, and remove an unfinished entry at its end, which stands for no answer."""
        with self._file.open("r+b") as file:
            file.seek(self._read)
            added = file.read()
            whole = len(added) - len(added) % (2 * HALF)
            if whole < len(added):
                file.truncate(self._read + whole)
        for at in range(0, whole, 2 * HALF):
            self._answered[added[at : at + HALF]] = added[at + HALF : at + 2 * HALF]
        self._read += whole

    def _hash(self, members: Collection[int]) -> bytes:
        return hashlib.sha256(repr([self._names[m] for m in sorted(members)]).encode()).digest()[:HALF]
