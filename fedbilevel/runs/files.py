"""Locks and atomic writes, for files and folders that several processes use and that must survive a crash at any point."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedbilevel.core.locks import held
from fedbilevel.errors import FolderTaken, InputError


@contextlib.contextmanager
def locked(path: Path, by: str = "") -> Iterator[None]:
    """Let only one process at a time run in the folder; the lock ends with the process, however that ends.

    Locking a file of the folder, named in `by`, is independent of locking the folder: it is for a process that has another
    one run there.
    """
    with held(path / by, f"{path} is being run by another process: wait for it, or stop it"):
        yield


def is_locked(path: Path) -> bool:
    """Whether a process is running in the folder."""
    try:
        with locked(path):
            return False
    except InputError:
        return True


def require_place(path: Path, *patterns: str) -> None:
    """Raise `InputError` if the path cannot be a folder, or holds a file that matches one of the patterns."""
    if any(part.exists() and not part.is_dir() for part in (path, *path.parents)):
        raise FolderTaken(f"{path} cannot be a folder, since a part of it is a file: choose another folder")
    for pattern in patterns:
        for file in path.glob(pattern):
            raise FolderTaken(f"{file.parent} already holds something else ({file.name}): choose another folder")


def append_durably(path: Path, text: str) -> None:
    """Add lines to a file, which are on the disk when this returns."""
    with path.open("a") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content so that a reader sees all of the old or all of the new, even after a crash."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
