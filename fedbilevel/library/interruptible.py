"""Work that a signal may stop: its progress goes to stderr, and the signal acts once what is done is safe."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from rich.console import Console

from fedbilevel.runs.stopping import Interrupted, StopRequest, resume_command, stop_request


@contextlib.contextmanager
def interruptible(then: str) -> Iterator[tuple[Console, StopRequest]]:
    """During the block, note signals; one that stopped it acts afterwards, when a line has said what to do `then`."""
    console = Console(stderr=True, highlight=False, markup=False)
    try:
        with stop_request() as stop:
            yield console, stop
    except Interrupted as interrupted:
        console.print(f"stopped; {then}", soft_wrap=True)
        signal.raise_signal(interrupted.signum)
        raise KeyboardInterrupt from None  # the program's own handler has let it go on


def continue_with(folder: object) -> str:
    """What to do then about work that a folder describes."""
    return f"continue with: {resume_command(folder)}"
