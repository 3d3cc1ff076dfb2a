"""FedPace-Local: FedPace where every client has a lower problem of its own. Nothing is tuned, and only x travels.

Ours; docs/fedpace.md derives it. A client of S solves its lower level at the server's x with all of its rows, by N steps of
Newton's method from its last y_m,

    y_m ← y_m - a H⁻¹ ∇_y g_m,    H = ∇²_yy g_m,

and sends its hypergradient D_m = ∇_x f_m - ∇²_xy g_m u with u = H⁻¹ ∇_y f_m. Products with H⁻¹ are K steps of conjugate
gradients, which need no step size. a is 1, and smaller where the step would lead far beyond the least g_m on its way.

It also sends how much D_m turns as x moves along it, |∇²h_m v|² with h_m(x) = f_m(x, y_m*(x)) and v = D_m / |D_m|. As x moves
along v, y_m moves along q and u along w:

    q = -H⁻¹ ∇_y (vᵀ ∇_x g_m),    w = H⁻¹ ∇_y s,    ∇²h_m v = ∇_x s - ∇²_xy g_m w,
    s(x, y) = vᵀ D_m - qᵀ (H u - ∇_y f_m)    with u, v and q constant.

The server averages over rounds, m ← β m + (1 - β) mean_S D_m, and in round t = 1, 2, ... moves

    x ← x - p c / ((1 + n / 20) L) · m / (1 - β^t),    L² = mean_S |∇²h_m v|²,

with the largest L of late, FedPace's pace p (`pace`), and n the rounds so far that did not agree on x's direction: so the noise
of changing cohorts dies down. Scaling x, y, f or g by a constant changes nothing but rounding, and a round in which nobody
takes part changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, Algorithm, algorithm
from fedbilevel.algorithms.estimators import conjugate_gradients
from fedbilevel.algorithms.pace import FADE, Heading, Pace, average, if_any
from fedbilevel.core.clients import Client, Clients, PerClient, at_client, iterate
from fedbilevel.core.curvature import ratio, squared, unit
from fedbilevel.core.problem import Batch, LowerLevel, Problem
from fedbilevel.settings import count, real

START = 10  # rounds until x's step has its full length
APART = 20  # rounds that disagree until it has half of that
TRIALS = 3  # of a
FASTEST = 10  # the bound of the pace: up to the longest step that is stable on a quadratic


class State(NamedTuple):
    """The server's x with its momentum, what has been measured, and every client's own y_m."""

    x: Array
    m: Array
    t: Array
    curvature: Array  # L
    apart: Array  # n
    pace: Pace
    y: PerClient


class Answer(NamedTuple):
    """What a client sends."""

    d: Array  # D_m
    turned: Array  # |∇²h_m v|²
    loss: Array  # f_m


@algorithm
class FedPaceLocal(Algorithm):
    """Each client solves its own lower level; x's step comes from measured curvatures. Needs no tuning."""

    lower_level: ClassVar[LowerLevel] = "local"
    reports: ClassVar[Mapping[str, str]] = {
        **HYPERGRADIENT_NORM,
        "step_x": "x's step in force",
        "pace": "p, x's pace",
    }

    newton_steps: int = count(2, "N, steps of Newton's method in a round", source="ours")
    products: int = count(20, "K, products with ∇²_yy g for one with its inverse", source="ours")
    beta: float = real(0.9, "β, of x's momentum", least=0, below=1, source="ours")
    c: float = real(4.0, "c, x's step in units of 1 / L", source="ours: a tenth of what β = 0.9 allows", above=0)

    @at_client
    def first_y(self, client: Client, y: Array) -> Array:
        """The client's first y, which stays at the client."""
        return y

    def solution(self, problem: Problem, rows: Batch, x: Array, y: Array) -> Array:
        """y_m after N steps of Newton's method."""

        def newton_step(_: Any, y: Array) -> Array:
            gradient = problem.gy(x, y, rows)
            along = conjugate_gradients(lambda v: problem.gyy(x, y, rows, v), gradient, self.products)
            slope = jnp.vdot(gradient, along)

            def shortened(_: Any, a: Array) -> Array:
                after = jnp.vdot(problem.gy(x, y - a * along, rows), along)
                return jnp.where(after < -slope / 2, a * ratio(slope, slope - after), a)

            return y - iterate(TRIALS, shortened, jnp.ones_like(slope)) * along

        return iterate(self.newton_steps, newton_step, y)

    def answer(self, problem: Problem, rows: Batch, x: Array, y: Array) -> Answer:
        """D_m, and what is measured with it."""

        def solve(v: Array) -> Array:
            return conjugate_gradients(lambda w: problem.gyy(x, y, rows, w), v, self.products)

        u = solve(problem.fy(x, y, rows))

        def hypergradient(x: Array, y: Array) -> Array:
            return problem.fx(x, y, rows) - problem.gxy(x, y, rows, u)

        def residual(x: Array, y: Array) -> Array:
            return problem.gyy(x, y, rows, u) - problem.fy(x, y, rows)

        d = hypergradient(x, y)
        v = unit(d)
        q = -solve(jax.grad(lambda y: jnp.vdot(problem.gx(x, y, rows), v))(y))

        def s(x: Array, y: Array) -> Array:
            return jnp.vdot(v, hypergradient(x, y)) - jnp.vdot(q, residual(x, y))

        s_x, s_y = jax.grad(s, (0, 1))(x, y)
        turned = s_x - problem.gxy(x, y, rows, solve(s_y))
        return Answer(d, squared(turned), problem.upper_loss(x, y, rows))

    @at_client
    def own_y_and_answer(self, client: Client, x: Array, y: Array) -> tuple[Array, Answer]:
        """y_m and what is to be sent, which stay at the client."""
        problem, rows = client.problem, client.whole()
        y = self.solution(problem, rows, x, y)
        return y, self.answer(problem, rows, x, y)

    @at_client
    def shared(self, client: Client, result: tuple[Array, Answer]) -> Answer:
        """The part that is sent."""
        return result[1]

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        zero = jnp.zeros((), x.dtype)
        own = clients.everyone().map(self.first_y, y)
        return State(x, jnp.zeros_like(x), jnp.int32(0), zero, zero, Pace.first(x, zero), own)

    def step(self, state: State, clients: Clients, key: Array) -> State:
        x, m, count, curvature, apart, pace, y = state
        t = count.astype(x.dtype)
        S = clients.draw()
        result = S.map(self.own_y_and_answer, x, S.take(y))
        around = Answer(jnp.zeros_like(x), jnp.zeros_like(curvature), pace.last_loss)
        seen = S.mean(self.shared, result, around=around)

        m = average(self.beta, m, seen.d)
        along = m / (1 - self.beta ** (t + 1))
        curvature = jnp.maximum(FADE * curvature, jnp.sqrt(seen.turned))
        step = ratio(pace.p * self.c * jnp.minimum(1, (t + 1) / START), curvature) / (1 + apart / APART)
        clients.report(hypergradient_norm=jnp.linalg.norm(along), step_x=step, pace=pace.p)
        heading = Heading.of(seen.d, along, x, pace.best_x)
        pace, better = pace.after(t, self.beta, heading, seen.loss, FASTEST)
        pace = pace._replace(best_x=jnp.where(better, x, pace.best_x))
        new = x - step * along, m, count + 1, curvature, apart + ~pace.averages.agree(heading.along), pace
        return State._make((*if_any(S.active, new, state[:-1]), S.put(y, result[0])))

    def rounds(self, key: Array, size: int) -> int:
        return 1
