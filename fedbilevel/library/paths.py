"""Paths that a call is given."""

from __future__ import annotations

import os
from pathlib import Path

from fedbilevel.errors import require


def path_of(name: str, given: str | Path) -> Path:
    """The path that an argument names; `InputError` if it is empty, which would be the current folder, or something else."""
    named = isinstance(given, str | os.PathLike) and bool(str(given).strip())
    require(named, name, "the path of a file or a folder", given)
    return Path(given)
