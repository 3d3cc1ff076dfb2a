"""Requests to sites through NVIDIA FLARE's Collab API: one call per site and round, all at the same time.

A site that does not answer in time is left out, and not asked again until it has: its late answer is discarded, unless the run
asks for first answers and collects the late ones. What goes wrong at a site comes back as one line, never as a traceback,
which could quote data. Once the job is aborted nothing comes back at all: FLARE ends the sites' parts before the server's,
and answers from the sites that are left would pass for a round without the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any

from nvflare.collab import CollabCallError

from fedbilevel.engines.failure import Failure, Failures, Kind
from fedbilevel.errors import in_one_line, in_words

LONGEST_CALL = 24 * 3600.0  # seconds; no round may take longer
ABORTING = 10.0  # seconds within which a job learns that it is aborted: FLARE has ended its sites, or one was restarted
Answer = bytes | Failure


class JobAborted(RuntimeError):
    """FLARE is ending the job: what its sites still answer does not count."""


class Flare:
    """The sites of a running job, by client number; those without a proxy are not connected.

    `aborted()` says whether FLARE is ending the job.
    """

    def __init__(self, proxies: Mapping[int, Any], names: Mapping[int, str], timeout: float, aborted: Callable[[], bool]):
        self._names, self._timeout, self._aborted = names, timeout, aborted
        self._unreachable: set[int] = set()
        self._lines = {m: _Line(proxy, names[m]) for m, proxy in proxies.items()}
        self._late: dict[int, Future[Answer]] = {}  # whose answers will be discarded
        self._under_way: dict[int, Future[Answer]] = {}  # whose answers will be collected

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], Failures]:
        """Send all sites their requests at the same time; returns the replies, and what went wrong at the others."""
        return self.call("answer", requests)

    def call(
        self, method: str, requests: Mapping[int, bytes], timeout: float | None = None, enough: int | None = None
    ) -> tuple[dict[int, bytes], Failures]:
        """Like `ask`, for any method that sites publish, with a time limit of its own, or until so many have answered."""
        limit = self._timeout if timeout is None else timeout
        self._late = {m: future for m, future in self._late.items() if not future.done()}
        failures: Failures = {}
        for m in requests:
            if m not in self._lines:
                failures[m] = Failure(Kind.UNREACHABLE, f"{self._names[m]} is not connected", sent=False)
            elif m in self._late or self._is_busy(m, enough):
                kind = Kind.LATE if enough is None else Kind.UNDER_WAY
                failures[m] = Failure(kind, f"{self._names[m]} has not yet answered an earlier request", sent=False)
        futures = {m: self._lines[m].call(method, request) for m, request in requests.items() if m not in failures}
        _wait(futures.values(), limit, len(futures) if enough is None else enough)
        replies: dict[int, bytes] = {}
        for m, future in futures.items():
            if not future.done() and enough is not None:
                self._under_way[m] = future
                failures[m] = Failure(Kind.UNDER_WAY, f"{self._names[m]} has not answered yet")
                continue
            if not future.done():
                self._late[m] = future
                failures[m] = Failure(Kind.LATE, f"{self._names[m]} did not answer within {limit:g} s")
                continue
            answer = future.result()
            if isinstance(answer, Failure):
                failures[m] = answer
            else:
                replies[m] = answer
        self._heed_an_abort(replies, failures)
        return replies, failures

    def late(self) -> tuple[dict[int, bytes], Failures]:
        """The replies to requests that were not waited for, and what went wrong, as far as they have come since."""
        come = {m: future.result() for m, future in self._under_way.items() if future.done()}
        self._under_way = {m: future for m, future in self._under_way.items() if m not in come}
        replies = {m: answer for m, answer in come.items() if isinstance(answer, bytes)}
        return replies, {m: answer for m, answer in come.items() if isinstance(answer, Failure)}

    def wait(self, sites: Iterable[int]) -> None:
        """Wait until these sites have answered earlier requests, at most a round's time."""
        wait([self._under_way[m] for m in sites if m in self._under_way], self._timeout)

    def _is_busy(self, m: int, enough: int | None) -> bool:
        """Whether an answer of a site is under way, or has come and must be collected before the next one can be under way."""
        return m in self._under_way and (enough is not None or not self._under_way[m].done())

    def _heed_an_abort(self, replies: Mapping[int, bytes], failures: Failures) -> None:
        """Raise `JobAborted` if the job is ending, of which sites that become unreachable may be the first sign."""
        unreachable = {m for m, failure in failures.items() if failure.kind is Kind.UNREACHABLE and failure.sent}
        deadline = time.monotonic() + (ABORTING if unreachable - self._unreachable else 0.0)
        while not self._aborted() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._aborted():
            raise JobAborted("FLARE aborted the job")
        self._unreachable = (self._unreachable | unreachable) - replies.keys()


def _wait(futures: Collection[Future[Answer]], limit: float, enough: int) -> None:
    """Wait until so many sites have answered, or all have or failed, for as long as the limit allows."""
    deadline, missing, answered = time.monotonic() + limit, set(futures), 0
    while missing and answered < enough and (left := deadline - time.monotonic()) > 0:
        done, missing = wait(missing, left, FIRST_COMPLETED)
        answered += sum(isinstance(future.result(), bytes) for future in done)


class _Line:
    """One site, and a thread that calls it, which does not keep the process alive if the site never answers."""

    def __init__(self, proxy: Any, name: str):
        self._proxy, self._name = proxy, name
        self._calls: SimpleQueue[tuple[str, bytes, Future[Answer]]] = SimpleQueue()
        threading.Thread(target=self._work, name=f"line to {name}", daemon=True).start()

    def call(self, method: str, request: bytes) -> Future[Answer]:
        future: Future[Answer] = Future()
        self._calls.put((method, request, future))
        return future

    def _work(self) -> None:
        while True:
            method, request, future = self._calls.get()
            future.set_result(self._answer(method, request))

    def _answer(self, method: str, request: bytes) -> Answer:
        try:
            reply = getattr(self._proxy(timeout=LONGEST_CALL), method)(request)
        except CollabCallError as error:
            why = in_one_line(f"{error.cause_type}: {error.cause}")
            return Failure(Kind.UNREACHABLE, f"{self._name} could not be reached ({why})")
        except Exception as error:
            return Failure(Kind.UNREACHABLE, f"{self._name} could not be called ({in_words(error)})")
        match reply:
            case [True, bytes(value)]:
                return value
            case [False, Kind.REFUSED | Kind.NOT_FINITE | Kind.BROKEN as kind, str(line)]:
                return Failure(Kind(kind), f"{self._name}: {in_one_line(line)}")
            case _:
                return Failure(Kind.INVALID, f"{self._name} answered with something that is not a valid reply")
