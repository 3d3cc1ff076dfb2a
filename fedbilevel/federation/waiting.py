"""Waiting for other processes, by polling."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL = 0.5  # seconds between two checks


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true within this many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True
