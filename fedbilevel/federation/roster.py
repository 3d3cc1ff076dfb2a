"""The sites of a job as a transport: each begins the run before it is asked anything, and one that refuses is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fedbilevel.engines.failure import Failures, Kind
from fedbilevel.errors import InputError
from fedbilevel.federation.flare import Flare

BEGINNING = 120.0  # seconds, at least, that sites have to load their data, and for a first answer, which compiles
BEGINNINGS = 3  # how often a site is asked to begin the run


class Roster:
    """Sites by client number, each with its message that begins the run; `timeout` is that of a round."""

    def __init__(self, transport: Flare, beginnings: Mapping[int, bytes], timeout: float):
        self._transport, self._beginnings = transport, beginnings
        self._first_timeout = max(timeout, BEGINNING)
        self._told: Counter[int] = Counter()
        self._answered: set[int] = set()
        self.data: dict[int, bytes] = {}  # what the sites say about their data
        self.left_out: Failures = {}  # those that are no longer asked

    def begin(self) -> Failures:
        """Have all sites begin the run; returns what went wrong, by site. Raises `InputError` if all connected sites refuse."""
        failures = self._begin(self._beginnings, self._first_timeout)
        if not self.data:
            asked = {m: failure for m, failure in failures.items() if failure.sent}
            refused = bool(asked) and asked.keys() == self.left_out.keys()
            raise (InputError if refused else RuntimeError)(f"no site takes part; {next(iter((asked or failures).values()))}")
        return failures

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], Failures]:
        """Like `Flare.ask`; a site that has not yet begun the run is first asked again to begin it."""
        failures = self._begin([m for m in requests if m not in self.data and m not in self.left_out])
        there = {m: request for m, request in requests.items() if m in self.data}
        first = not there.keys() <= self._answered
        replies, unanswered = self._transport.call("answer", there, self._first_timeout if first else None)
        self._answered |= replies.keys()
        left_out = {m: failure._replace(sent=False) for m, failure in self.left_out.items() if m in requests}
        return replies, failures | unanswered | left_out

    def _begin(self, sites: Iterable[int], timeout: float | None = None) -> Failures:
        replies, failures = self._transport.call("begin", {m: self._beginnings[m] for m in sites}, timeout)
        self.data |= replies
        heard = {m: failure for m, failure in failures.items() if failure.sent}
        self._told.update(heard.keys())
        for m, failure in heard.items():
            if failure.kind is Kind.REFUSED or self._told[m] >= BEGINNINGS:
                self.left_out[m] = failure
        return failures
