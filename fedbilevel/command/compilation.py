"""How the command sets JAX's compiler up: programs are remembered between processes, and compile fast."""

from __future__ import annotations

import os
import warnings

from fedbilevel.tasks.data.datasets import cache_folder

OPTIMIZATION = "--xla_backend_optimization_level"
WORTH_KEEPING = "0.2"  # seconds that a program must have taken to compile


def set_up() -> None:
    """Configure JAX through the environment, before it is imported; keep what the user has set.

    A folder that cannot be written or read makes programs compile anew, in silence.
    """
    compile_fast()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_folder() / "compiled")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", WORTH_KEEPING)
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def compile_fast() -> None:
    """The second level of optimisation compiles in two thirds of the third's time, to programs as fast as its own."""
    flags = os.environ.get("XLA_FLAGS", "")
    if OPTIMIZATION not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {OPTIMIZATION}=2".strip()
