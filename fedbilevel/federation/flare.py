"""Requests to sites through NVIDIA FLARE's Collab API: one call per site and round, all at the same time.

A site that has not answered in time is left out, and not asked again before it has: its answer to the old request is
thrown away when it comes. What goes wrong at a site comes back as one line, never as a traceback, which could
quote data. Once the job is aborted nothing comes back at all: the engine ends the sites' parts before the server's,
and answers of those that are left would be taken for a round without the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

from nvflare.collab import CollabCallError

from fedbilevel.engines.deployed import Unsent
from fedbilevel.errors import in_one_line

LONGEST_CALL = 24 * 3600.0  # seconds; no round may take longer
ABORTING = 4.0  # seconds after which a job whose sites the engine has ended knows that it is aborted
Answer = tuple[bool, Any]  # the reply's bytes, or a line that says what went wrong


class JobAborted(RuntimeError):
    """The engine ends the job: what its sites still answer does not count."""


class Unreachable(str):
    """What went wrong with a request that the engine could not deliver, or that the end of a site's process cut off."""


class Flare:
    """The sites of a running job, by client number; those without a proxy are not connected.

    `aborted()` says whether the engine ends the job.
    """

    def __init__(self, proxies: Mapping[int, Any], names: Mapping[int, str], timeout: float, aborted: Callable[[], bool]):
        self._names, self._timeout, self._aborted = names, timeout, aborted
        self._unreachable: set[int] = set()
        self._lines = {m: _Line(proxy, names[m]) for m, proxy in proxies.items()}
        self._late: dict[int, Future[Answer]] = {}

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], dict[int, str]]:
        """Send each site its request at the same time: the replies, and for the others what went wrong."""
        return self.call("answer", requests)

    def call(
        self, method: str, requests: Mapping[int, bytes], timeout: float | None = None
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        """The same, for any method that sites publish, and within a time limit of its own."""
        limit = self._timeout if timeout is None else timeout
        self._late = {m: future for m, future in self._late.items() if not future.done()}
        errors: dict[int, str] = {m: Unsent(f"{self._names[m]} is not connected") for m in requests if m not in self._lines}
        for m in requests:
            if m in self._late:
                errors[m] = Unsent(f"{self._names[m]} has not yet answered an earlier request")
        futures = {m: self._lines[m].call(method, request) for m, request in requests.items() if m not in errors}
        wait(futures.values(), limit)
        replies: dict[int, bytes] = {}
        for m, future in futures.items():
            if not future.done():
                self._late[m] = future
                errors[m] = f"{self._names[m]} did not answer within {limit:g} s"
                continue
            done, value = future.result()
            if done:
                replies[m] = value
            else:
                errors[m] = value
        self._heed_an_abort(replies, errors)
        return replies, errors

    def _heed_an_abort(self, replies: Mapping[int, bytes], errors: Mapping[int, str]) -> None:
        """Raise `JobAborted` if the job ends, which sites that cannot be reached any more may be the first sign of."""
        unreachable = {m for m, error in errors.items() if isinstance(error, Unreachable)}
        deadline = time.monotonic() + (ABORTING if unreachable - self._unreachable else 0.0)
        while not self._aborted() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._aborted():
            raise JobAborted("the engine aborted the job")
        self._unreachable = (self._unreachable | unreachable) - replies.keys()


class _Line:
    """One site: a thread that calls it, which does not keep the process alive when the site never answers."""

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
            return False, Unreachable(f"{self._name} could not be reached ({error.cause_type}: {error.cause})")
        except Exception as error:
            return False, Unreachable(f"{self._name} could not be asked ({type(error).__name__}: {error})")
        match reply:
            case [True, bytes(value)]:
                return True, value
            case [False, str(line)]:
                said = in_one_line(line)
                return False, said if said.startswith("NotFinite") else f"{self._name}: {said}"
            case _:
                return False, f"{self._name} answered something that is no reply of ours"
