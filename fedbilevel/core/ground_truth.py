"""The exact solution of the lower level and the exact hypergradient, on all data, for metrics and tests.

    y*(x) = argmin_y g(x, y),    u* = [∇²_yy g]⁻¹ ∇_y f,    ∇h(x) = ∇_x f - ∇²_xy g u*        at y*(x),

with f and g the weighted averages over the clients (global lower level) or client by client (local). If the lower level
is not strongly convex or y is constrained, the residual of MeFBO's penalty problem replaces the hypergradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.sparse.linalg import cg

from fedbilevel.core.population import Population, Shards
from fedbilevel.core.problem import Batch, LowerLevel, mean_loss
from fedbilevel.core.sets import EVERYWHERE, ConvexSet
from fedbilevel.errors import InputError

DIRECT = 512  # up to this dimension linear systems are solved directly
AT_ONCE = 2**22  # bytes of rows evaluated together


class ExactSolution(NamedTuple):
    """y*(x), u*(x) and ∇h(x); with a local lower level y and u have a row per client."""

    y: Array
    u: Array
    hypergradient: Array


def average(population: Population, of: Callable[[Any, Array, Array], Array], x: Array, y: Array, lower: LowerLevel) -> Array:
    """Σ_m w_m of(all data of client m, x, y_m); x has a row per client where each has its own."""

    def one(m: Array) -> Array:
        return of(population.whole(m), _at(x, m), y if lower == "global" else y[m])

    bytes_each = sum(leaf.nbytes for leaf in jax.tree.leaves((population.upper.rows, population.lower.rows))) / population.size
    at_once = max(1, min(population.size, int(AT_ONCE / bytes_each)))
    each = lax.map(one, jnp.arange(population.size), batch_size=at_once)
    return jnp.tensordot(population.weights.astype(each.dtype), each, 1)


def losses(population: Population, x: Array, y: Array, lower: LowerLevel = "global") -> tuple[Array, Array]:
    """(f, g) on all data."""
    problem = population.problem

    def both(batch: Batch, x: Array, y: Array) -> Array:
        return jnp.stack([mean_loss(problem.f, x, y, batch.upper), mean_loss(problem.g, x, y, batch.lower)])

    f, g = average(population, both, x, y, lower)
    return f, g


def metrics(population: Population, x: Array, y: Array, lower: LowerLevel = "global") -> Array:
    """The problem's metrics at (x, y) on the clients' data, in the order of its `metric_names`."""
    return average(population, lambda batch, x, y: population.problem.evaluate(x, y, batch), x, y, lower)


def tests(population: Population, x: Array, y: Array, lower: LowerLevel = "global") -> Array:
    """The problem's `tests` at (x, y), each a mean over all held-out rows; zeros if no client holds any out."""
    rows, problem = population.test, population.problem
    if rows is None or not problem.tests:
        return jnp.zeros(len(problem.tests))
    return held_out(problem.test, rows, jnp.arange(population.size), x, y, lower)


def held_out(
    of: Callable[[Array, Array, Any], Array], rows: Shards, owners: Array, x: Array, y: Array, lower: LowerLevel = "global"
) -> Array:
    """`of(x, y, rows)` as a mean over all rows; the shards of these belong to the clients `owners`."""
    shares = rows.size / rows.size.sum()

    def one(k: Array) -> Array:
        return of(_at(x, owners[k]), y if lower == "global" else y[owners[k]], rows.whole(k))

    each = lax.map(one, jnp.arange(len(owners)))
    return jnp.tensordot(shares.astype(each.dtype), each, 1)


def _at(x: Array, m: Array) -> Array:
    """Client m's x."""
    return x if x.ndim == 1 else x[m]


def solution(
    population: Population, x: Array, y: Array, lower: LowerLevel = "global", tolerance: float = 1e-6, most_steps: int = 100
) -> ExactSolution:
    """y*(x) by Newton's method from y until |∇_y g| <= tolerance, then u* and the hypergradient."""
    if population.problem.sets.y != EVERYWHERE:
        raise InputError("the exact hypergradient needs an unconstrained y: use ground_truth.residual for a constrained one")
    if lower == "global":
        f, g = (lambda x, y, which=which: losses(population, x, y)[which] for which in (0, 1))
        return _solve(f, g, x, y, tolerance, most_steps)

    def one(m: Array) -> ExactSolution:
        whole = population.whole(m)
        f = lambda x, y: mean_loss(population.problem.f, x, y, whole.upper)  # noqa: E731
        g = lambda x, y: mean_loss(population.problem.g, x, y, whole.lower)  # noqa: E731
        return _solve(f, g, x, y[m], tolerance, most_steps)

    each = lax.map(one, jnp.arange(population.size))
    return ExactSolution(each.y, each.u, jnp.tensordot(population.weights, each.hypergradient, 1))


def proximal_point(
    population: Population, x: Array, y: Array, proximal: float, tolerance: float = 1e-6, most_steps: int = 10_000
) -> Array:
    """θ*(x, y) = argmin_{θ∈Y} g(x, θ) + |θ - y|²/2γ, where γ = proximal is small enough to make that strongly convex.

    Computed by Newton's method, or by projected gradient steps if y is constrained, until the (projected) gradient is
    within the tolerance.
    """

    def objective(theta: Array) -> Array:
        return losses(population, x, theta)[1] + jnp.sum((theta - y) ** 2) / (2 * proximal)

    within = population.problem.sets.y
    if within == EVERYWHERE:
        return _newton(objective, y, tolerance, most_steps)
    return _projected_gradient(objective, within, y, proximal, tolerance, most_steps)


def residual(population: Population, x: Array, y: Array, penalty: float, proximal: float, tolerance: float = 1e-6) -> Array:
    """R_t(x, y) = dist(0, ∇Υ_c(x, y) + N_{X×Y}(x, y))², MeFBO's measure of stationarity, Eq. (13), on all data.

    Υ_c = f/c + g - v_γ, Eq. (4), with c = penalty, γ = proximal and ∇v_γ = (∇_x g(x, θ*), (y - θ*)/γ), Eq. (6).
    The distance is the norm of -∇Υ_c projected on the tangent cone of X×Y at (x, y).
    """
    theta = proximal_point(population, x, y, proximal, tolerance)

    def smooth(x: Array, y: Array) -> Array:
        f, g = losses(population, x, y)
        return f / penalty + g - losses(population, x, theta)[1]

    along_x, along_y = jax.grad(smooth, (0, 1))(x, y)
    X, Y = population.problem.sets
    moves = [_tangent(X, x, -along_x), _tangent(Y, y, (y - theta) / proximal - along_y)]
    return jnp.asarray(sum(jnp.sum(move**2) for move in moves))


def _tangent(of: ConvexSet, z: Array, direction: Array) -> Array:
    """The direction's projection on the tangent cone of a set at z: how P(z + s direction) moves for small s."""
    if of == EVERYWHERE:
        return direction
    s = jnp.sqrt(jnp.finfo(z.dtype).eps) / jnp.maximum(1, jnp.linalg.norm(direction))
    return (of.project(z + s * direction) - of.project(z)) / s


def _solve(f: Callable, g: Callable, x: Array, y: Array, tolerance: float, most_steps: int) -> ExactSolution:
    y = _newton(lambda y: g(x, y), y, tolerance, most_steps)
    fx, fy = jax.grad(f, (0, 1))(x, y)
    u = _solve_hessian(lambda y: g(x, y), y, fy)
    cross = jax.grad(lambda x: jnp.vdot(jax.grad(g, 1)(x, y), u))(x)
    return ExactSolution(y, u, fx - cross)


def _solve_hessian(objective: Callable[[Array], Array], y: Array, v: Array) -> Array:
    gradient = jax.grad(objective)
    if y.size <= DIRECT:
        return jnp.linalg.solve(jax.jacfwd(gradient)(y), v)
    return cg(lambda r: jax.jvp(gradient, (y,), (r,))[1], v, tol=1e-10)[0]


def _newton(objective: Callable[[Array], Array], y: Array, tolerance: float, most_steps: int) -> Array:
    """The minimiser of a strongly convex function, starting from y."""
    halvings = 0.5 ** jnp.arange(20)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        y, gradient, k = carry
        trials = y - halvings[:, None] * _solve_hessian(objective, y, gradient)
        y = trials[jnp.argmin(lax.map(objective, trials))]
        return y, jax.grad(objective)(y), k + 1

    def unsolved(carry: tuple[Array, Array, Array]) -> Array:
        _, gradient, k = carry
        return (jnp.linalg.norm(gradient) > tolerance) & (k < most_steps)

    return lax.while_loop(unsolved, step, (y, jax.grad(objective)(y), jnp.int32(0)))[0]


def _projected_gradient(
    objective: Callable[[Array], Array], within: ConvexSet, y: Array, first_step: float, tolerance: float, most_steps: int
) -> Array:
    """The minimiser of a strongly convex function over a set, starting from y.

    A step s is halved until the gradient changes along it by at most |change of y| / s.
    """
    gradient = jax.grad(objective)

    def step(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        y, s, _, k = carry
        new = within.project(y - s * gradient(y))
        moved = jnp.linalg.norm(new - y) / s
        fits = jnp.linalg.norm(gradient(new) - gradient(y)) <= moved
        return jnp.where(fits, new, y), jnp.where(fits, s, s / 2), jnp.where(fits, moved, jnp.inf), k + 1

    def unsolved(carry: tuple[Array, Array, Array, Array]) -> Array:
        *_, moved, k = carry
        return (moved > tolerance) & (k < most_steps)

    y = within.project(y)
    start = (y, jnp.asarray(first_step, y.dtype), jnp.asarray(jnp.inf, y.dtype), jnp.int32(0))
    return lax.while_loop(unsolved, step, start)[0]
