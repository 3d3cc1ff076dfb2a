"""The exact solution of the lower level and the exact hypergradient, on all data, for metrics and tests.

    y*(x) = argmin_y g(x, y),    u* = [∇²_yy g]⁻¹ ∇_y f,    ∇h(x) = ∇_x f - ∇²_xy g u*        at y*(x),

with f and g the weighted averages over the clients (global lower level) or client by client (local).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.sparse.linalg import cg

from fedbilevel.algorithms.base import LowerLevel
from fedbilevel.population import Population
from fedbilevel.problem import Batch, evaluate

DIRECT = 512  # up to this dimension linear systems are solved directly
AT_ONCE = 16  # clients evaluated together


class Solution(NamedTuple):
    """y*(x), u*(x) and ∇h(x); with a local lower level y and u have a row per client."""

    y: Array
    u: Array
    hypergradient: Array


def average(population: Population, of: Callable[[Any, Array, Array], Array], x: Array, y: Array, lower: LowerLevel) -> Array:
    """Σ_m w_m of(all data of client m, x, y_m)."""
    key = jax.random.key(0)  # all rows: nothing is drawn

    def one(m: Array) -> Array:
        return of(population.client(m, key).whole(), x, y if lower == "global" else y[m])

    each = lax.map(one, jnp.arange(population.size), batch_size=min(AT_ONCE, population.size))
    return jnp.tensordot(population.weights.astype(each.dtype), each, 1)


def losses(population: Population, x: Array, y: Array, lower: LowerLevel = "global") -> tuple[Array, Array]:
    """(f, g) on all data."""
    problem = population.problem

    def both(batch: Batch, x: Array, y: Array) -> Array:
        return jnp.stack([evaluate(problem.f, x, y, batch.upper), evaluate(problem.g, x, y, batch.lower)])

    f, g = average(population, both, x, y, lower)
    return f, g


def solution(
    population: Population, x: Array, y: Array, lower: LowerLevel = "global", tolerance: float = 1e-6, most_steps: int = 100
) -> Solution:
    """y*(x) by Newton's method from y until |∇_y g| <= tolerance, then u* and the hypergradient."""
    key = jax.random.key(0)

    def f(x: Array, y: Array) -> Array:
        return average(population, lambda batch, x, y: evaluate(population.problem.f, x, y, batch.upper), x, y, "global")

    def g(x: Array, y: Array) -> Array:
        return average(population, lambda batch, x, y: evaluate(population.problem.g, x, y, batch.lower), x, y, "global")

    if lower == "global":
        return _solve(f, g, x, y, tolerance, most_steps)

    def one(m: Array) -> Solution:
        whole = population.client(m, key).whole()
        f = lambda x, y: evaluate(population.problem.f, x, y, whole.upper)  # noqa: E731
        g = lambda x, y: evaluate(population.problem.g, x, y, whole.lower)  # noqa: E731
        return _solve(f, g, x, y[m], tolerance, most_steps)

    each = lax.map(one, jnp.arange(population.size))
    return Solution(each.y, each.u, jnp.tensordot(population.weights, each.hypergradient, 1))


def _solve(f: Callable, g: Callable, x: Array, y: Array, tolerance: float, most_steps: int) -> Solution:
    gy = jax.grad(g, 1)

    def solve_hessian(y: Array, v: Array) -> Array:
        if y.size <= DIRECT:
            return jnp.linalg.solve(jax.jacfwd(lambda y: gy(x, y))(y), v)
        return cg(lambda r: jax.jvp(lambda y: gy(x, y), (y,), (r,))[1], v, tol=1e-10)[0]

    def newton(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        y, gradient, k = carry
        direction = solve_hessian(y, gradient)
        halvings = 0.5 ** jnp.arange(20)
        trials = y - halvings[:, None] * direction
        y = trials[jnp.argmin(lax.map(lambda t: g(x, t), trials))]
        return y, gy(x, y), k + 1

    def unsolved(carry: tuple[Array, Array, Array]) -> Array:
        _, gradient, k = carry
        return (jnp.linalg.norm(gradient) > tolerance) & (k < most_steps)

    y, _, _ = lax.while_loop(unsolved, newton, (y, gy(x, y), jnp.int32(0)))
    fx, fy = jax.grad(f, (0, 1))(x, y)
    u = solve_hessian(y, fy)
    cross = jax.grad(lambda x: jnp.vdot(gy(x, y), u))(x)
    return Solution(y, u, fx - cross)
