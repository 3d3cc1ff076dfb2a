"""Locks between processes, where the operating system has some that end with their process; Windows has none for folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedbilevel.errors import InputError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def held(path: Path, otherwise: str = "") -> Iterator[None]:
    """Hold the lock of a file or a folder, however the process ends; `InputError` with that line if another one holds it.

    Without a line, wait until no other process holds it. Without such locks nothing keeps two processes apart.
    """
    if fcntl is None:
        yield
        return
    lock = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if otherwise else 0))
        except BlockingIOError:
            raise InputError(otherwise) from None
        yield
    finally:
        os.close(lock)
