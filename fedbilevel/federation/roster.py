"""The sites of a job as a transport: each begins the run before it is asked anything, and one that refuses is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fedbilevel.engines.failure import Failure, Failures, Kind
from fedbilevel.errors import InputError, in_one_line
from fedbilevel.federation.begin_message import Holdings
from fedbilevel.federation.flare import Flare
from fedbilevel.user_files import decoded

BEGINNING = 120.0  # seconds, at least, that sites have to load their data, and for a first answer, which compiles
BEGINNINGS = 3  # how often a site is asked to begin the run


class Roster:
    """Sites by client number, each with its message that begins the run; `timeout` is that of a round."""

    def __init__(self, transport: Flare, beginnings: Mapping[int, bytes], timeout: float):
        self._transport, self._beginnings = transport, beginnings
        self._first_timeout = max(timeout, BEGINNING)
        self._told: Counter[int] = Counter()
        self._answered: set[int] = set()
        self.data: dict[int, Holdings] = {}  # what the sites that have begun say about their data
        self.left_out: Failures = {}  # those that are no longer asked

    def begin(self, beginnings: Mapping[int, bytes] | None = None) -> Failures:
        """Have all sites begin the run; returns what went wrong, by site. Raises `InputError` if all connected sites refuse.

        Messages that know more than those given first may replace them: then all begin again.
        """
        if beginnings is not None:
            self._beginnings, self.data = beginnings, {}
        failures = self._begin([m for m in self._beginnings if m not in self.left_out], self._first_timeout)
        failures |= self.left_out
        if not self.data:
            asked = {m: failure for m, failure in failures.items() if failure.sent}
            refused = bool(asked) and asked.keys() == self.left_out.keys()
            raise (InputError if refused else RuntimeError)(f"no site takes part; {next(iter((asked or failures).values()))}")
        return failures

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], Failures]:
        """Like `Flare.ask`; a site that has not yet begun the run is first asked again to begin it."""
        return self._ask(requests)

    def ask_first(self, call: str, requests: dict[int, bytes], enough: int) -> tuple[dict[int, bytes], Failures]:
        """Like `ask`, until so many have answered; the others' answers are under way."""
        return self._ask(requests, enough)

    def late(self) -> tuple[dict[int, bytes], Failures]:
        """See `Flare.late`."""
        return self._transport.late()

    def wait(self, sites: Iterable[int]) -> None:
        """See `Flare.wait`."""
        self._transport.wait(sites)

    def saved(self) -> dict[str, Any]:
        """Nothing: answers under way are lost with the process."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """There is nothing to restore."""

    def _ask(self, requests: dict[int, bytes], enough: int | None = None) -> tuple[dict[int, bytes], Failures]:
        failures = self._begin([m for m in requests if m not in self.data and m not in self.left_out])
        there = {m: request for m, request in requests.items() if m in self.data}
        first = not there.keys() <= self._answered
        replies, unanswered = self._transport.call("answer", there, self._first_timeout if first else None, enough)
        self._answered |= replies.keys()
        left_out = {m: failure._replace(sent=False) for m, failure in self.left_out.items() if m in requests}
        return replies, failures | unanswered | left_out

    def _begin(self, sites: Iterable[int], timeout: float | None = None) -> Failures:
        replies, failures = self._transport.call("begin", {m: self._beginnings[m] for m in sites}, timeout)
        for m, reply in replies.items():
            try:
                self.data[m] = decoded(reply, Holdings)
            except InputError as error:
                failures[m] = Failure(Kind.REFUSED, f"client {m} says nothing usable about its data: {in_one_line(error)}")
        heard = {m: failure for m, failure in failures.items() if failure.sent}
        self._told.update(heard.keys())
        for m, failure in heard.items():
            if failure.kind is Kind.REFUSED or self._told[m] >= BEGINNINGS:
                self.left_out[m] = failure
        return failures
