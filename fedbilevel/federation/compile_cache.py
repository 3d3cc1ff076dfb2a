"""Compiled programs kept in a kit, so that a restarted process does not compile them again."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def keep_compiled(kit: Path) -> None:
    """Have JAX keep what it compiles in the kit, unless the environment names another folder."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(kit / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
