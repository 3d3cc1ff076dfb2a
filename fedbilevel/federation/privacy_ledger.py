"""What a site's rows have been asked for, by all runs so far, and the secret from which the site's noise comes.

A line is written, and is on the disk, before the answer that it stands for is computed: so a process that is killed at any
moment may have paid for an answer that nobody got, and never the reverse. A line that such a process left unfinished stands for
no answer. An answer follows from the secret and the whole question, so the same question has the same answer and is paid for
once.

A ledger that is lost would be a budget that begins again. So where there is a budget, nobody but the site's owner begins one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np

from fedbilevel.core.locks import held
from fedbilevel.core.privacy_accounting import Event, Events, epsilon
from fedbilevel.errors import InputError, Withheld
from fedbilevel.federation.own_secret import keyed, own_secret, private_key

LEDGER = "ledger.jsonl"


class Ledger:
    """The file of one site, or of one site in several federations. Several processes may use it."""

    @classmethod
    def of_site(cls, folder: Path, most: float | None, delta: float) -> Self:
        """The one in a folder; `InputError` if the site has a budget, and nothing says what it has spent of it."""
        file = folder.resolve() / LEDGER
        if most is not None and not file.exists():
            raise Withheld(
                "this site has a privacy budget and no ledger of what it has spent; its log says how to begin one",
                "there is no ledger of what these rows have spent: copy the whole folder of the one that they have had so far, "
                f"or name it in site.toml; if none: install -d -m700 {file.parent} && install -m600 /dev/null {file}",
            )
        return cls(file.parent, most, delta)

    def __init__(self, folder: Path, most: float | None, delta: float):
        self._secret = own_secret(folder)
        self._file, self._most, self._delta = folder / LEDGER, most, delta
        self._file.touch(mode=0o600)
        self._read = 0  # bytes of the file that are in what follows
        self._paid: set[str] = set()
        self._spent: dict[str, Events] = {}  # by run

    def key(self, question: bytes) -> np.ndarray:
        """The words of a random key for a question, which nobody else can know."""
        return private_key(self._secret, question)

    def epsilon(self) -> float:
        """ε of all that has been answered here."""
        with held(self._file):
            self._catch_up()
        return epsilon(_total(self._spent), self._delta)

    def require(self, run: str, planned: Events) -> None:
        """Raise `InputError` if a run that asks for so much exceeds what is left; what it has paid for is part of its plan."""
        with held(self._file):
            self._catch_up()
        others = {name: events for name, events in self._spent.items() if name != run}
        self._require_within(_total({**others, run: planned | self._spent.get(run, Counter())}), "this run would spend")

    def charge(self, run: str, question: bytes, events: Events) -> None:
        """Pay for an answer, unless it has been paid for; `InputError` if it exceeds what is left."""
        name = keyed(self._secret, b"paid" + question).hex()[:32]
        with held(self._file):
            self._catch_up()
            if name in self._paid or not events:
                return
            self._require_within(_total(self._spent) + events, "the next answer would spend")
            line = json.dumps({"run": run, "answer": name, "events": [[*event, n] for event, n in events.items()]})
            with self._file.open("ab") as file:
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._catch_up()

    def _require_within(self, events: Events, what: str) -> None:
        if self._most is not None and (needed := epsilon(events, self._delta)) > self._most:
            raise InputError(
                f"{what} ε = {needed:.3g} of this site's privacy in all, and it allows {self._most:g} at δ = {self._delta:g}: "
                "refused"
            )

    def _catch_up(self) -> None:
        """Read what was added to the file, and remove an unfinished line at its end."""
        with self._file.open("r+b") as file:
            file.seek(self._read)
            added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            if whole != added:
                file.truncate(self._read + len(whole))
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
                events = Counter({Event(float(rate), float(noise)): int(n) for rate, noise, n in entry["events"]})
                self._paid.add(entry["answer"])
                self._spent[entry["run"]] = self._spent.get(entry["run"], Counter()) + events
            except (ValueError, TypeError, KeyError):
                raise InputError("this site's privacy ledger is damaged, so what is left of its budget is not known") from None
        self._read += len(whole)


def _total(each: Mapping[str, Events]) -> Events:
    return sum(each.values(), Counter())
