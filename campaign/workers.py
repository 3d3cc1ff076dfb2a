"""Processes that run cases one after another; one that takes too long is ended, and another takes its place."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from campaign.case import LIMIT, Case

CASES_OF_ONE = 100  # since a process has room for some thousand compiled programs
Listing = Callable[[], list[Case]]


def failures(listing: Listing, cases: Sequence[Case], made: Path, workers: int, say: Callable[[Case, str], None]) -> int:
    """Run the cases, which a worker finds by their names in the listing; say each problem; how many there are."""

    def run(part: Sequence[Case]) -> int:
        found = 0
        with _Worker(listing, made) as worker:
            for case in part:
                if problem := worker.problem(case.name):
                    say(case, problem)
                    found += 1
        return found

    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(run, (cases[k::workers] for k in range(workers))))


class _Worker:
    def __init__(self, listing: Listing, made: Path):
        self._listing, self._made, self._left = listing, made, 0
        self._process: multiprocessing.context.SpawnProcess | None = None

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def problem(self, name: str) -> str:
        if not self._left:
            self._end()
            self._start()
        self._left -= 1
        self._pipe.send(name)
        try:
            if self._pipe.poll(LIMIT):
                return self._pipe.recv()
            said = f"it has not ended after {LIMIT:.0f} s"
        except EOFError:
            said = "its process died"
        self._end()
        return said

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._listing, self._made, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._left = CASES_OF_ONE
        self._pipe.recv()  # ready: what it imports is no part of a case

    def _end(self) -> None:
        self._left = 0
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(listing: Listing, made: Path, pipe: Connection) -> None:
    cases = {case.name: case for case in listing()}
    pipe.send("ready")
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        folder = Path(tempfile.mkdtemp(prefix="case-", dir=made.parent))
        try:
            shutil.copytree(made, folder, dirs_exist_ok=True)
            said = cases[name].act(folder)
        except BaseException:
            said = f"the campaign itself fails: {traceback.format_exc(limit=-3)}"
        finally:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # which the command lets end its process
            shutil.rmtree(folder, ignore_errors=True)
        pipe.send(said)
