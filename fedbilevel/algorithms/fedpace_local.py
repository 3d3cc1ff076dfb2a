"""FedPace-Local: FedPace where every client has a lower problem of its own. Nothing is tuned, and only x travels.

Ours; docs/fedpace.md derives it. A client of S solves its lower level at the server's x with all of its rows, by N steps of
Newton's method from its last y_m,

    y_m ← y_m - a H⁻¹ ∇_y g_m,    H = ∇²_yy g_m,

and sends its hypergradient D_m = ∇_x f_m - ∇²_xy g_m u with u = H⁻¹ ∇_y f_m. Products with H⁻¹ are K steps of conjugate
gradients, which need no step size. a is 1, and smaller where the step would lead far beyond the least g_m on its way.

It also sends how much D_m turns as x moves, |∇²h_m v|² with h_m(x) = f_m(x, y_m*(x)) and v = D_m / |D_m|, from

    y' = -H⁻¹ ∂_x(∇_y g_m) v,    u' = -H⁻¹ (H u - ∇_y f_m)',    ∇²h_m v = D_m',

where ' is the derivative as x moves along v, and y and u with it. The server averages over rounds, m ← β m + (1 - β) mean_S D_m,
and in round t = 1, 2, ... moves

    x ← x - p c / L · m / (1 - β^t),    L the largest √(mean_S |∇²h_m v|²) of late,

with FedPace's pace p (`pace`). All of that is unchanged if x, y, f or g are scaled, but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, Algorithm, algorithm
from fedbilevel.algorithms.estimators import conjugate_gradients
from fedbilevel.algorithms.pace import FADE, Pace, average
from fedbilevel.core.clients import Client, Clients, PerClient, at_client, iterate
from fedbilevel.core.curvature import ratio, squared, unit
from fedbilevel.core.problem import LowerLevel
from fedbilevel.settings import count, real, step_size

START = 10  # rounds until x's step has its full length
TRIALS = 3  # of a's length


class State(NamedTuple):
    """The server's x with its momentum, every client's own y_m, and what has been measured."""

    x: Array
    y: PerClient
    m: Array
    t: Array
    curvature: Array  # L
    pace: Pace


class Answer(NamedTuple):
    """What a client sends; lengths are squared."""

    d: Array  # D_m
    turned: Array  # ∇²h_m v
    loss: Array  # f_m
    fy: Array  # ∇_y f_m
    left: Array  # ∇_y f_m - H u


@algorithm
class FedPaceLocal(Algorithm):
    """Each client solves its own lower level; x's step comes from measured curvatures. Needs no tuning."""

    lower_level: ClassVar[LowerLevel] = "local"
    reports: ClassVar[Mapping[str, str]] = {
        **HYPERGRADIENT_NORM,
        "step_x": "x's step in force",
        "pace": "p, x's pace",
        "unsolved": "|∇_y f - H u| / |∇_y f|: what conjugate gradients leave of the clients' linear systems",
    }

    newton_steps: int = count(2, "N, steps of Newton's method in a round", source="ours")
    products: int = count(20, "K, products with ∇²_yy g for one with its inverse", source="ours")
    beta: float = real(0.9, "β, of x's momentum", least=0, below=1, source="ours")
    c: float = step_size(4.0, "c, x's step in units of 1 / L", source="ours: a tenth of what β = 0.9 allows")

    @at_client
    def first_y(self, client: Client, y: Array) -> Array:
        """The client's first y, which stays at the client."""
        return y

    @at_client
    def own_y(self, client: Client, x: Array, y: Array) -> Array:
        """y_m after N steps of Newton's method, which stays at the client."""
        problem, rows = client.problem, client.whole()

        def newton_step(_: Any, y: Array) -> Array:
            gradient = problem.gy(x, y, rows)
            s = conjugate_gradients(lambda v: problem.gyy(x, y, rows, v), gradient, self.products)
            slope = jnp.vdot(gradient, s)

            def shortened(_: Any, a: Array) -> Array:
                after = jnp.vdot(problem.gy(x, y - a * s, rows), s)
                return jnp.where(after < -slope / 2, a * ratio(slope, slope - after), a)

            return y - iterate(TRIALS, shortened, jnp.ones_like(slope)) * s

        return iterate(self.newton_steps, newton_step, y)

    @at_client
    def answer(self, client: Client, x: Array, y: Array) -> Answer:
        """D_m, and what is measured with it."""
        problem, rows = client.problem, client.whole()

        def solve(v: Array) -> Array:
            return conjugate_gradients(lambda w: problem.gyy(x, y, rows, w), v, self.products)

        def residual(x: Array, y: Array, u: Array) -> Array:
            return problem.gyy(x, y, rows, u) - problem.fy(x, y, rows)

        def hypergradient(x: Array, y: Array, u: Array) -> Array:
            return problem.fx(x, y, rows) - problem.gxy(x, y, rows, u)

        fy = problem.fy(x, y, rows)
        u = solve(fy)
        d = hypergradient(x, y, u)
        v = unit(d)
        y_turned = -solve(jax.jvp(lambda x: problem.gy(x, y, rows), (x,), (v,))[1])
        u_turned = -solve(jax.jvp(lambda x, y: residual(x, y, u), (x, y), (v, y_turned))[1])
        turned = jax.jvp(hypergradient, (x, y, u), (v, y_turned, u_turned))[1]
        return Answer(d, squared(turned), problem.upper_loss(x, y, rows), squared(fy), squared(residual(x, y, u)))

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        zero = jnp.zeros((), x.dtype)
        return State(x, clients.everyone().map(self.first_y, y), jnp.zeros_like(x), jnp.int32(0), zero, Pace.first(x))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        x, t = state.x, state.t.astype(state.x.dtype)
        S = clients.draw()
        y = S.map(self.own_y, x, S.take(state.y))
        nothing = jnp.zeros_like(state.curvature)
        around = Answer(jnp.zeros_like(x), nothing, state.pace.last_loss, nothing, nothing)
        seen = S.mean(self.answer, x, y, around=around)

        m = average(self.beta, state.m, seen.d)
        along = m / (1 - self.beta ** (t + 1))
        curvature = jnp.maximum(FADE * state.curvature, jnp.sqrt(seen.turned))
        step = ratio(state.pace.p * self.c * jnp.minimum(1, (t + 1) / START), curvature)
        clients.report(
            hypergradient_norm=jnp.linalg.norm(along),
            step_x=step,
            pace=state.pace.p,
            unsolved=jnp.sqrt(ratio(seen.left, seen.fy)),
        )
        after = state._replace(
            x=x - step * along,
            m=m,
            t=state.t + 1,
            curvature=curvature,
            pace=state.pace.after(t, self.beta, x, seen.d, along, seen.loss),
        )
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.any(S.active), new, old), after._replace(y=()), state._replace(y=()))
        return kept._replace(y=S.put(state.y, y))

    def rounds(self, key: Array, size: int) -> int:
        return 1
