"""The best rate that a library here reaches in products of float32 matrices: what steps are measured against."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from timing import SIDE, TIMES, seconds

REPEATS = 5


class Shape(NamedTuple):
    """Of a batch of products."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def operations(self) -> int:
        """Floating-point operations in the batch."""
        return 2 * self.batch * self.rows * self.inner * self.columns


SQUARE = Shape(1, SIDE, SIDE, SIDE)


class Best(NamedTuple):
    """The library that is fastest at a shape, the product repeated until it takes as long as `TIMES` large ones would."""

    library: str
    run: Callable[[], Any]
    operations: int

    @classmethod
    def at(cls, shape: Shape) -> Best:
        """Of those installed: XLA, SciPy's BLAS, and PyTorch, which brings MKL."""
        times = max(1, TIMES * SQUARE.operations // shape.operations)
        found = {name: _repeated(multiply, times) for name, multiply in _libraries(shape).items()}
        fastest = min(found, key=lambda name: min(seconds(found[name]) for _ in range(REPEATS)))
        return cls(fastest, found[fastest], times * shape.operations)


def _repeated(multiply: Callable[[], Any], times: int) -> Callable[[], Any]:
    return lambda: [multiply() for _ in range(times)][-1]


def _libraries(shape: Shape) -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    left = rng.standard_normal((shape.batch, shape.rows, shape.inner), np.float32)
    right = rng.standard_normal((shape.batch, shape.inner, shape.columns), np.float32)
    multiply, ours = jax.jit(jnp.matmul), (jnp.asarray(left), jnp.asarray(right))
    found: dict[str, Callable[[], Any]] = {"XLA": lambda: multiply(*ours)}
    if jax.default_backend() != "cpu":
        return found
    from scipy.linalg.blas import sgemm

    found["SciPy"] = lambda: [sgemm(1, b.T, a.T) for a, b in zip(left, right, strict=True)]
    if importlib.util.find_spec("torch"):
        import torch

        theirs = torch.from_numpy(left), torch.from_numpy(right)
        found["PyTorch"] = lambda: torch.bmm(*theirs)
    return found
