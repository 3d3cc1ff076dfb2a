"""The sites of a job as a transport: each is told of the run before it is asked anything, and one that refuses is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fedbilevel.errors import InputError
from fedbilevel.federation.job import NOT_BEGUN
from fedbilevel.remote import Unsent
from fedbilevel.transports.flare import Flare

BEGINNING = 120.0  # seconds, at least, that sites get to load their data
BEGINNINGS = 3  # how often a site is told of the run


class Participants:
    """Sites by client number, each with what it is told of the run."""

    def __init__(self, transport: Flare, beginnings: Mapping[int, bytes], names: Mapping[int, str]):
        self._transport, self._beginnings, self._names = transport, beginnings, names
        self._told: Counter[int] = Counter()
        self.data: dict[int, bytes] = {}  # what the sites say of their data
        self.left_out: dict[int, str] = {}  # those that are asked no more, and why

    def begin(self, timeout: float) -> dict[int, str]:
        """Tell all sites of the run: what went wrong, by site. Raises `InputError` if all that are connected refuse."""
        errors = self._begin(self._beginnings, max(timeout, BEGINNING))
        if not self.data:
            asked = {m: error for m, error in errors.items() if not isinstance(error, Unsent)}
            refused = bool(asked) and asked.keys() == self.left_out.keys()
            raise (InputError if refused else RuntimeError)(f"no site takes part; {next(iter((asked or errors).values()))}")
        return errors

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], dict[int, str]]:
        """As the transport's; a site that has missed the beginning is told of it and asked again."""
        replies, errors = self._transport.ask({m: r for m, r in requests.items() if m not in self.left_out})
        missed = [m for m, error in errors.items() if NOT_BEGUN in error]
        if missed:
            errors |= self._begin(missed)
            late, still = self._transport.ask({m: requests[m] for m in missed if m not in self.left_out})
            replies |= late
            errors = {m: error for m, error in (errors | still).items() if m not in late}
        return replies, errors | {m: Unsent(line) for m, line in self.left_out.items() if m in requests}

    def _begin(self, sites: Iterable[int], timeout: float | None = None) -> dict[int, str]:
        replies, errors = self._transport.call("begin", {m: self._beginnings[m] for m in sites}, timeout)
        self.data |= replies
        self._told.update(errors.keys())
        for m, error in errors.items():
            if error.startswith(f"{self._names[m]}: {InputError.__name__}: ") or self._told[m] >= BEGINNINGS:
                self.left_out[m] = error
        return errors
