"""How strongly functions bend, seen through products of their second derivatives with vectors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import eigh_tridiagonal

from fedbilevel.core import randomness
from fedbilevel.core.problem import Tree

PRODUCTS = 30  # of the matrix: enough for the ends of a spectrum, which Lanczos' method finds first
SKETCHED = 32  # numbers in a sketch, at most: lengths are right to about √(2/32), a quarter
ROUNDING = 100  # in units of the last place of the matrix: a new direction that is shorter is rounding


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


def sketch(v: Array) -> Array:
    """A few sums over the entries of v with fixed random signs: linear in v, and about as long; just as long if v is short.

    So an average of sketches is as long as the average of the vectors.
    """
    size = min(SKETCHED, v.size)
    signs = 1 - 2 * (randomness.bits(randomness.key(0), v.shape) & 1).astype(v.dtype)
    return jnp.pad(signs * v, (0, -v.size % size)).reshape(-1, size).sum(0)


def derivative_along(function: Callable[[Array], Tree], at: Array, v: Array) -> tuple[Tree, Tree]:
    """The function's value and its derivative along v, by reverse mode alone: losses may have custom derivatives."""
    value, pull = jax.vjp(function, at)
    _, push = jax.vjp(lambda w: pull(w)[0], jax.tree.map(jnp.zeros_like, value))
    return value, push(v)[0]


def extreme_curvatures(product: Callable[[Array], Array], like: Array) -> tuple[Array, Array]:
    """The largest eigenvalue in absolute value and the least eigenvalue, by Lanczos' method with full orthogonalisation."""
    steps = min(PRODUCTS, like.size)

    def one(k: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        basis, matrix, v = carry
        basis = basis.at[k].set(v)
        image = product(v)
        row = basis @ image
        matrix = matrix.at[k].set(row).at[:, k].set(row)
        rest = image - row @ basis
        rest = rest - (basis @ rest) @ basis
        new = jnp.linalg.norm(rest) > ROUNDING * jnp.finfo(like.dtype).eps * jnp.abs(matrix).max()
        return basis, matrix, unit(rest) * new

    empty = jnp.zeros((steps, like.size), like.dtype), jnp.zeros((steps, steps), like.dtype)
    basis, matrix, _ = lax.fori_loop(0, steps, one, (*empty, probe(like)))
    unused = jnp.all(basis == 0, 1)  # the products span fewer dimensions: there, a value from inside the spectrum
    diagonal = jnp.diagonal(matrix) + unused * matrix[0, 0]
    # by bisection: jnp.linalg.eigvalsh waits for XLA's threads in one of them, for ever if as many wait as there are
    ends = eigh_tridiagonal(diagonal, jnp.diagonal(matrix, 1), eigvals_only=True)[jnp.array([0, -1])]
    return jnp.abs(ends).max(), ends[0]
