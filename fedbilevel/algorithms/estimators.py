"""Estimators shared by several algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.core.clients import Client, iterate
from fedbilevel.core.curvature import ratio, squared
from fedbilevel.core.problem import Pair, Point


def neumann(hessian: Callable[[Any, Array], Array], v: Array, step: Array | float, terms: int) -> Array:
    """step · Σ_{k<terms} Π_{j<k} (I - step H_j) v, which tends to H⁻¹ v.

    `hessian(j, r)` is H_j r; with independent minibatches for every j the expectation is the same series in E[H].
    """

    def term(k: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        power, total = carry
        power = power - step * hessian(k, power)
        return power, total + power

    return step * iterate(terms - 1, term, (v, v))[1]


def conjugate_gradients(product: Callable[[Array], Array], rhs: Array, steps: int) -> Array:
    """H⁻¹ rhs by steps of conjugate gradients from 0, where `product(v)` is H v.

    A direction along which H does not bend upwards is followed as if it did, and is the last: so the answer v has rhsᵀv ≥ 0
    whatever H is.
    """

    def step(_: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        v, left, along = carry
        image = product(along)
        bend, length = jnp.vdot(along, image), squared(left)
        size = ratio(length, jnp.abs(bend))
        new = left - size * image
        ahead = (bend > 0) * (new + ratio(squared(new), length) * along)
        return v + size * along, new, ahead

    return iterate(steps, step, (jnp.zeros_like(rhs), rhs, rhs))[0]


def neumann_hypergradient(
    client: Client, x: Array, y: Array, step: Array | float, terms: int, first: Any = 0, times: int = 1
) -> Array:
    """∇_x f - ∇²_xy g · neumann(∇²_yy g, ∇_y f): the hypergradient of a client's own data alone.

    Every derivative has its own minibatch, numbers `first` to `first + terms` of this call, each `times` the usual size.
    """
    problem, direct = client.problem, client.batch(first + 1, times)

    def hessian(j: Any, v: Array) -> Array:
        return problem.gyy(x, y, client.batch(first + 2 + j, times), v)

    u = neumann(hessian, problem.fy(x, y, client.batch(first, times)), step, terms)
    return problem.fx(x, y, direct) - problem.gxy(x, y, direct, u)


def local_direction(client: Client, z: Pair, step: Array | float, order: int, k: Any, times: int = 1) -> Pair:
    """(Φ, ∇_y g) at z, with Φ the client's own hypergradient by a Neumann series of `order` + 1 terms.

    Every derivative has its own minibatch from the k-th set of this call, each `times` the usual size.
    """
    terms = order + 1
    first = k * (terms + 2)
    hypergradient = neumann_hypergradient(client, *z, step, terms, first + 1, times)
    return Pair(hypergradient, client.problem.gy(*z, client.batch(first, times)))


def corrected_descent(gradient: Callable[[Array, Any], Array], start: Array, direction: Array, step: Any, steps: int) -> Array:
    """`steps` of v ← v - step (∇(v; B_k) - ∇(start; B_k) + direction): local steps whose drift is corrected as in SVRG.

    `gradient(v, k)` is the gradient on the k-th minibatch B_k; `direction` is the averaged gradient at the start.
    """

    def local_step(k: Any, v: Array) -> Array:
        return v - step * (gradient(v, k) - gradient(start, k) + direction)

    return iterate(steps, local_step, start)


class Sparse(NamedTuple):
    """The entries of a vector that are sent; all others count as 0."""

    values: Array
    places: Array

    def dense(self, size: int) -> Array:
        """The full vector; several rows of entries are added up."""
        return jnp.zeros(size, self.values.dtype).at[self.places.ravel()].add(self.values.ravel())


class SparsePoint(NamedTuple):
    """The entries that are sent of a direction in x, y and u."""

    x: Sparse
    y: Sparse
    u: Sparse

    def dense(self, like: Point) -> Point:
        """The full direction, of the sizes of that point; several rows of entries are added up."""
        return Point(*(entries.dense(v.size) for entries, v in zip(self, like, strict=True)))


def compressed(v: Array, residual: Array, one_in: int) -> tuple[Sparse, Array]:
    """The largest entries of v + residual, one in `one_in`, and the residual that is left for the next call.

    Top-k with error feedback: Stich, Cordonnier and Jaggi, Sparsified SGD with memory, 2018.
    """
    wanted = v + residual
    _, places = lax.top_k(jnp.abs(wanted), max(1, v.size // one_in))
    sparse = Sparse(wanted[places], places)
    return sparse, wanted - sparse.dense(v.size)


def unbiased(v: Array, order: Array, one_in: int) -> Sparse:
    """Random entries of v, one in `one_in`: the first in a random order, so scaled that their mean over all orders is v."""
    places = order[: max(1, v.size // one_in)]
    return Sparse(v[places] * (v.size / places.size), places)
