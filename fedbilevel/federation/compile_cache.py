"""Compiled programs kept in a kit, so that a restarted process does not compile them again."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax

MOST_BYTES = 10**9  # of programs that earlier runs have left, before a run adds its own


def keep_compiled(kit: Path) -> None:
    """Have JAX keep what it compiles in the kit, unless the environment names another folder; the oldest are deleted.

    JAX's own bound needs a file beside each program: after a kill between the two it would keep no more programs.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = kit / "compiled"
        _tidy(folder, MOST_BYTES)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _tidy(folder: Path, most: int) -> None:
    """Delete the oldest files of a folder, until the others have at most so many bytes."""
    with contextlib.suppress(FileNotFoundError):  # another job's process tidies at the same time
        files = [(file, file.stat()) for file in folder.glob("*")]
        for file, status in sorted(files, key=lambda of: of[1].st_mtime, reverse=True):
            most -= status.st_size
            if most < 0:
                file.unlink()
