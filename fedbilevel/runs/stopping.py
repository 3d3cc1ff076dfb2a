"""Stopping a run between two steps, when a signal asks for it."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP


class Interrupted(Exception):
    """A signal asked the run to stop; it can be resumed."""

    def __init__(self, signum: int):
        self.signum = signum


def resume_command(folder: object) -> str:
    """The command that continues what a folder holds, as a shell reads it."""
    return shlex.join(["fedbilevel", "resume", str(folder)])


class StopRequest:
    """Notes the first SIGINT, SIGTERM or SIGHUP, so that a run can stop between two stretches; a second one acts at once."""

    signum: int | None = None

    def check(self) -> None:
        """Raise `Interrupted` if a signal came."""
        if self.signum is not None:
            raise Interrupted(self.signum)


def heeded() -> list[signal.Signals]:
    """The signals that stop a run; SIGHUP is not among them if nohup has had it ignored."""
    return [n for n in STOPS if n.name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN]


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """During the block, note signals instead of letting them act; only the main thread can."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[signal.Signals, Any] = {}

    def note(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in heeded():
        before[number] = signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
