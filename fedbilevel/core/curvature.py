"""How strongly a symmetric matrix bends, seen through its products with vectors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

PRODUCTS = 30  # of the matrix: enough for the ends of a spectrum, which Lanczos' method finds first


def squared(v: Array) -> Array:
    """|v|²"""
    return jnp.sum(v * v)


def ratio(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0."""
    return a / jnp.where(b == 0, 1, b) * (b != 0)


def unit(v: Array) -> Array:
    """v / |v|, and 0 if v is."""
    return ratio(v, jnp.linalg.norm(v))


def probe(like: Array) -> Array:
    """A direction of the same size that is always the same, and as good as random."""
    return unit(jnp.sin(1.0 + jnp.arange(like.size, dtype=like.dtype)))


def extreme_curvatures(product: Callable[[Array], Array], like: Array) -> tuple[Array, Array]:
    """The largest eigenvalue in absolute value and the least eigenvalue, by Lanczos' method with full orthogonalisation."""
    steps = min(PRODUCTS, like.size)

    def one(k: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        basis, matrix, v = carry
        basis = basis.at[k].set(v)
        image = product(v)
        row = basis @ image
        rest = image - row @ basis
        return basis, matrix.at[k].set(row).at[:, k].set(row), unit(rest - (basis @ rest) @ basis)

    empty = jnp.zeros((steps, like.size), like.dtype), jnp.zeros((steps, steps), like.dtype)
    matrix = lax.fori_loop(0, steps, one, (*empty, probe(like)))[1]
    values = jnp.linalg.eigvalsh(matrix)
    return jnp.abs(values).max(), values.min()
