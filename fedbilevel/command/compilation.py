"""How the command sets up JAX's compiler: programs are cached between processes, and compile fast."""

from __future__ import annotations

import os
import warnings

from fedbilevel.tasks.data.datasets import cache_folder

OPTIMIZATION = "--xla_backend_optimization_level"
WORTH_KEEPING = "0.2"  # seconds that a program must have taken to compile


def set_up() -> None:
    """Configure JAX through the environment, before it is imported; keep what the user has set.

    If the cache folder cannot be read or written, programs are silently compiled again.
    """
    compile_fast()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_folder() / "compiled")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", WORTH_KEEPING)
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def compile_fast() -> None:
    """Choose the second level of optimisation: it takes two thirds of the third's time, for programs that are as fast."""
    flags = os.environ.get("XLA_FLAGS", "")
    if OPTIMIZATION not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {OPTIMIZATION}=2".strip()
