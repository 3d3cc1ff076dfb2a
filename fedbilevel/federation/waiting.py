"""Waiting for what others do, by looking again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL = 0.5  # seconds between two looks


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True
