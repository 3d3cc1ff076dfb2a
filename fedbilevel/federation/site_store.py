"""What a site has of each run on its own disk: first of all what it keeps from step to step, for the last two checkpoints."""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from pathlib import Path

from fedbilevel.errors import InputError
from fedbilevel.runs.files import write_atomically

CHECKPOINTS = 2  # of a run, whose values are kept
RUNS = 8  # how many runs have a folder of one kind; the least recently used go first


def make_room(folder: Path) -> None:
    """Create a run's folder unless it is there, and delete the least recently used of those beside it."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    others = _least_recent_first(folder)
    for old in others[: max(0, len(others) + 1 - RUNS)]:
        shutil.rmtree(old)


def place_of_run(folder: Path, run: str) -> Path:
    """The place of a run in a folder; `InputError` if the server has not given it an identity."""
    if not re.fullmatch(r"[0-9a-f]{1,64}", run):
        raise InputError(f"{run!r} is not a run's identity: refused")
    return folder / run


def _least_recent_first(folder: Path) -> list[Path]:
    """The folders beside a run's own."""
    others = [p for p in folder.parent.iterdir() if p != folder and p.is_dir()]
    return sorted(others, key=lambda p: p.stat().st_mtime)


def _bytes_of(path: Path) -> int:
    """Those of a file, or of the files in a folder; none if it is not there."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.exists())


class DiskStore:
    """The values of one run, in their own folder beside those of others, with which they take at most so many bytes."""

    def __init__(self, folder: Path, run: str, most: float = math.inf):
        self._folder, self._most = place_of_run(folder, run), most
        if self._folder.exists():
            self._folder.touch()

    def save(self, step: int, data: bytes, keep: int) -> None:
        """Store the data of a step, and of older steps keep only that of the step `keep`."""
        make_room(self._folder)
        for file in self._folder.iterdir():
            if file not in (self._file(step), self._file(keep)):
                file.unlink()
        content = hashlib.sha256(data).digest() + data
        self._free(len(content) + (_bytes_of(self._file(keep)) if keep != step else 0))
        write_atomically(self._file(step), content)

    def load(self, step: int) -> bytes:
        """The data of a step; `InputError` if it is missing or damaged."""
        try:
            content = self._file(step).read_bytes()
        except FileNotFoundError:
            raise InputError(f"this site has no values of step {step} on its disk: it cannot take part in this run") from None
        digest, data = content[:32], content[32:]
        if hashlib.sha256(data).digest() != digest:
            raise InputError(f"the values of step {step} on this site's disk are damaged: it cannot take part in this run")
        return data

    def _free(self, needed: int) -> None:
        """Delete the least recently used of other runs until so many bytes fit beside them; `InputError` if they never do."""
        if needed > self._most:
            raise InputError(
                f"the values of two checkpoints would take {needed:,} bytes of this site's disk, and {self._most:,.0f} are "
                "the most: refused unless the site's policy has more memory"
            )
        others = _least_recent_first(self._folder)
        while others and needed + sum(map(_bytes_of, others)) > self._most:
            shutil.rmtree(others.pop(0))

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{int(step)}"
