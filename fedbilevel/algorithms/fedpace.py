"""FedPace: every step size is measured, none is set. One round per step, no memory at the clients.

Ours; docs/fedpace.md derives it, says what is guaranteed and what it was tried on. Each sampled client sends the mean
over τ minibatches of

    D_x = ∇_x f - G,    D_y = ∇_y g + δ ∇_y f,    D_u = H - ∇_y f,

where (G, H) are (∇²_xy g u, ∇²_yy g u) if δ = 0, and otherwise the secants of (∇_x g, ∇_y g) from y to y + δu, divided by δ.
With δ = 0 this is SimFBO's direction, for the bilevel problem itself. With δ > 0 it is that of a penalty problem in other
coordinates: y descends g + δf, and y + δu descends g. Where g is not convex in y, secants stay bounded when derivatives do
not, and of the lower level's many solutions y seeks the one that is best for f.

The server averages over rounds, m ← β m + (1 - β) D, and in round t = 1, 2, ... moves x, y and u along m / (1 - β^t). Its
steps come from numbers that the clients measure on one minibatch and send beside D, lengths as their squares:

    y, u:  c / L with L = |∇²_yy g v| / |v| for v = ∇²_yy g w, where w is D_y / |D_y| plus a fixed unit vector;
    x:     p times the smaller of c_x / |∂_x D_x h| and φ / (s⁴ r |D_x|), where h = D_x / |D_x|.

L, which starts as the largest curvature of the first round, |∂_x D_x h| and |D_x| are the largest of late. The rest is
averaged over rounds. r² = |∂_x D_y h|² / (|D_y|² + δ₀² |∇_y f|²) + |∂_x D_u h|² / |∇_y f|² says how much the equations of y
and u change as x moves, relatively: φ is the most that they may change in a round if y and u are to follow. These are lengths
of averages over clients, which are shorter than the clients' own where clients differ; `sketch` makes them known to the
server. φ binds if D_x comes mostly through y, with s = |G|² / (|G|² + |∇_x f|²). The rules of the pace p are in `pace`. It is
at most (1 - √β) / φ, or 1 if that is less: along m, no direction of y comes nearer to its place in a round than by the factor
√β, so what x changes by more than 1 - √β is never made good.

A first round looks at the lower level: if it is convex and y is free, δ = 0. If not, δ starts from δ₀, and then is what
makes |δ∇_y f| ten times the noise of D_y from round to round, but at most δ₀: without noise δ goes to 0, and derivatives
take over. Where y is confined to Y, secants stay, and y + δu is projected as y is. δ₀, in which the losses' scales cancel,
is what makes δ₀f bend in y as strongly as g does in the first round, times the square root of the ratio of f's rows to g's if
f has fewer. (If f is linear in y, gradients are compared instead.)

x has few entries if f has twenty rows or more for each. Then it hardly fits these rows, but y can, and x would suit a y that
has. So where δ is not 0 and x has few entries, δ is at most δ₀ / (1 + t/50)² or, if that is less, just long enough for secants,
and x goes so that it can come back from where y's first rounds sent it: r² has |∂_x D_x h|² / (|G|² + |∇_x f|²) too, how much
x's own direction changes, in means of the clients' own lengths; and of |D_x|² only 3/t is forgotten in a round where that is
less than 5 %.

The x and y that are reported are averages over the last ninth of the rounds. All rules are ratios: to scale x, y, f or g by a
constant changes no step but for rounding. A round in which nobody takes part changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, U_NORM, Algorithm, Penalised, algorithm
from fedbilevel.algorithms.pace import FADE, Heading, Pace, average, averaged, if_any
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.curvature import derivative_along, extreme_curvatures, probe, ratio, sketch, squared, unit
from fedbilevel.core.problem import Batch, Point, Problem, Tree
from fedbilevel.core.sets import EVERYWHERE, ConvexSet
from fedbilevel.settings import count, real

CONVEX = 1e-4  # of the largest curvature: negative curvature below that is rounding
SHORTEST = 1e-3  # of δ₀: shorter secants are rounding, and derivatives take their place
Y_START, X_START = 20, 50  # rounds until a step has its full length
FORGET = 0.95  # of |D_x|² from round to round
FEW = 20  # rows of f for each entry of x: with as many, x hardly fits them
FADING = 50  # rounds until δ is at most a quarter of δ₀, where x has few entries
LONGER = 3  # of |D_x|², over the number of rounds, is forgotten in one, where x has few entries
HEARD = 10  # times the noise of D_y: what is heard of f in it
NINTH = 8  # the weight of past rounds in the reported average is 1 - 9 / (t + 9)


class Look(NamedTuple):
    """What a client sees of the lower level in the first round."""

    largest: Array  # curvature of g in y
    least: Array
    bends: Array  # f's largest curvature in y over g's
    rows: Array  # of f over those of g
    enough: Array  # rows of f over those that x has few entries with; at most 1, as sums of which no part is seen are bounded
    gy: Array  # |∇_y g|²
    fy: Array  # |∇_y f|²


class Sketches(NamedTuple):
    """The sketches of these."""

    fy: Array  # ∇_y f
    turned_y: Array  # ∂_x D_y h
    turned_u: Array  # ∂_x D_u h


class Measured(NamedTuple):
    """What a client measures in a round: the squared lengths of these, and of some a sketch, for the length of the average."""

    bent: Array  # ∇²_yy g v
    v: Array
    turned_x: Array  # ∂_x D_x h
    fy: Array  # ∇_y f
    fx: Array  # ∇_x f
    through_y: Array  # D_x - ∇_x f
    sketches: Sketches

    @classmethod
    def nothing(cls, y: Array) -> Measured:
        """All zeros."""
        zero, empty = jnp.zeros((), y.dtype), sketch(jnp.zeros_like(y))
        return cls(zero, zero, zero, zero, zero, zero, Sketches(empty, empty, empty))


class Averages(NamedTuple):
    """What the server averages over rounds with β, from the first round's value on."""

    follow: Array  # r
    share: Array  # s
    noise: Array  # |D_y - m_y|²


class State(NamedTuple):
    """What is reported, the point with its momenta, and what has been measured."""

    x: Array
    y: Array
    z: Point
    m: Point
    t: Array  # rounds so far
    convex: Array
    few: Array  # whether δ is not 0, and x has too few entries to fit f's rows
    delta_0: Array
    delta: Array
    curvature: Array  # L
    x_curvature: Array  # |∂_x D_x h|
    dx: Array  # |D_x|²
    averages: Averages
    pace: Pace

    @property
    def secant(self) -> Array:
        """Whether secants take the place of derivatives."""
        return self.delta > SHORTEST * self.delta_0


@dataclass(frozen=True, kw_only=True)
class Paced(Algorithm):
    """FedPace's hyperparameters, what clients compute, and the server's rules, which see x only through a `Heading`."""

    constrained: ClassVar[bool] = True
    needs_strong_convexity: ClassVar[bool] = False
    rounds_to_start: ClassVar[int] = 1
    reports: ClassVar[Mapping[str, str]] = {
        **HYPERGRADIENT_NORM,
        **U_NORM,
        "step_x": "x's step in force",
        "step_y": "y's and u's step in force",
        "delta": "δ, the weight of f in y's descent",
        "pace": "p, x's pace",
        "lag": "share of |D_y| on which rounds agree: near 1 if the lower level lags behind x, small if only noise is left",
    }

    minibatches: int = count(5, "τ, a client's minibatches in a round", source="ours")
    beta: float = real(0.9, "β, of the momenta", least=0, below=1, source="ours")
    c: float = real(10.0, "c, y's and u's step in units of 1 / L", source="ours: a quarter of what β = 0.9 allows", above=0)
    c_x: float = real(4.0, "c_x, x's step in units of its own 1 / L", source="ours", above=0)
    phi: float = real(0.05, "φ, the most that x may change the equations of y and u in a round", source="ours", above=0)

    @property
    def fastest(self) -> Array:
        """The bound of the pace."""
        return jnp.maximum(1, (1 - jnp.sqrt(self.beta)) / self.phi)

    def direction(self, problem: Problem, z: Point, batch: Batch, delta: Array, secant: Array) -> tuple[Point, Array, Array]:
        """D, ∇_x f and ∇_y f."""
        x, y, u = z
        fx, fy, gy = problem.fx(x, y, batch), problem.fy(x, y, batch), problem.gy(x, y, batch)

        def secants() -> tuple[Array, Array]:
            end = y + delta * u
            return (problem.gx(x, end, batch) - problem.gx(x, y, batch)) / delta, (problem.gy(x, end, batch) - gy) / delta

        def derivatives() -> tuple[Array, Array]:
            return problem.gxy(x, y, batch, u), problem.gyy(x, y, batch, u)

        through_x, through_y = lax.cond(secant, secants, derivatives)
        return Point(fx - through_x, gy + delta * fy, through_y - fy), fx, fy

    @at_client
    def first_look(self, client: Client, x: Array, y: Array) -> Look:
        """The curvatures of g in y and the first gradients, on a minibatch."""
        problem, batch = client.problem, client.batch()
        largest, least = extreme_curvatures(lambda v: problem.gyy(x, y, batch, v), y)
        bends = ratio(extreme_curvatures(lambda v: derivative_along(lambda y: problem.fy(x, y, batch), y, v)[1], y)[0], largest)
        upper, lower = (number.astype(y.dtype) for number in client.rows)
        enough = ratio(jnp.minimum(1, upper / (FEW * x.size)), client.weight.astype(y.dtype))  # so that each row counts once
        gy, fy = squared(problem.gy(x, y, batch)), squared(problem.fy(x, y, batch))
        return Look(largest, least, bends, upper / lower, enough, gy, fy)

    @at_client
    def answer(self, client: Client, z: Point, delta: Array, secant: Array) -> tuple[Point, Measured, Array]:
        """D and f over τ minibatches, and what the first of them measures."""
        problem = client.problem

        def add(k: Any, total: Any) -> Any:
            batch = client.batch(k)
            one = *self.direction(problem, z, batch, delta, secant), problem.upper_loss(z.x, z.y, batch)
            return jax.tree.map(jnp.add, total, one)

        zeros = jax.tree.map(jnp.zeros_like, (z, z.x, z.y, z.x[0]))
        d, fx, fy, loss = jax.tree.map(lambda a: a / self.minibatches, iterate(self.minibatches, add, zeros))
        batch = client.batch()
        v = problem.gyy(z.x, z.y, batch, unit(d.y) + probe(d.y))

        def direction_at(x: Array) -> Point:
            return self.direction(problem, z._replace(x=x), batch, delta, secant)[0]

        _, turned = derivative_along(direction_at, z.x, unit(d.x))
        seen = Measured(
            bent=squared(problem.gyy(z.x, z.y, batch, v)),
            v=squared(v),
            turned_x=squared(turned.x),
            fy=squared(fy),
            fx=squared(fx),
            through_y=squared(d.x - fx),
            sketches=Sketches(sketch(fy), sketch(turned.y), sketch(turned.u)),
        )
        return d, seen, loss

    def first(self, z: Point, look: Look, Y: ConvexSet) -> State:
        """The server's first state."""
        convex = (look.least > -CONVEX * look.largest) & (Y == EVERYWHERE)
        balance = jnp.where(look.bends > 0, ratio(jnp.ones_like(look.bends), look.bends), jnp.sqrt(ratio(look.gy, look.fy)))
        delta_0 = jnp.sqrt(jnp.minimum(look.rows, 1)) * balance
        zero = jnp.zeros((), z.y.dtype)
        return State(
            x=z.x,
            y=z.y,
            z=z,
            m=jax.tree.map(jnp.zeros_like, z),
            t=jnp.int32(0),
            convex=convex,
            few=~convex & (look.enough >= 1),
            delta_0=delta_0,
            delta=jnp.where(convex, 0, delta_0),
            curvature=look.largest,
            x_curvature=zero,
            dx=zero,
            averages=Averages(*[zero] * len(Averages._fields)),
            pace=Pace.first(z.x, zero),
        )

    def along(self, t: Array, m: Tree) -> Tree:
        """The average direction to move along, from the momentum after round t = 0, 1, ..."""
        return jax.tree.map(lambda m: m / (1 - self.beta ** (t + 1)), m)

    def after(
        self, state: State, m: Point, d: Point, seen: Measured, loss: Array, heading: Heading, clients: Clients
    ) -> tuple[State, Array, Array]:
        """The server's state after a round in all but x, x's step, and whether x is the best so far."""
        z, t, few = state.z, state.t.astype(state.y.dtype), state.few
        along = self.along(t, m)
        fy, turned_y, turned_u = map(squared, seen.sketches)
        turned = ratio(turned_y, squared(d.y) + state.delta_0**2 * fy) + ratio(turned_u, fy)
        seen_now = Averages(
            follow=jnp.sqrt(turned + few * ratio(seen.turned_x, seen.through_y + seen.fx)),
            share=ratio(seen.through_y, seen.through_y + seen.fx),
            noise=squared(d.y - ratio(state.m.y, 1 - self.beta**t)),
        )
        averages = averaged(state.dx, self.beta, state.averages, seen_now)  # from the first D_x that is not 0 on
        pace, better = state.pace.after(t, self.beta, heading, loss, self.fastest)

        curvature = jnp.maximum(FADE * state.curvature, jnp.sqrt(ratio(seen.bent, seen.v)))
        x_curvature = jnp.maximum(FADE * state.x_curvature, jnp.sqrt(seen.turned_x))
        kept = jnp.where(few, jnp.maximum(FORGET, 1 - LONGER / (t + 1)), FORGET)
        dx = jnp.maximum(kept * state.dx, jnp.maximum(heading.dx, pace.averages.dx))
        unfollowed = averages.share**4 * averages.follow * jnp.sqrt(dx)
        step_y = ratio(self.c * jnp.minimum(1, (t + 1) / Y_START), curvature)
        step_x = ratio(state.pace.p * jnp.minimum(1, t / X_START), jnp.maximum(x_curvature / self.c_x, unfollowed / self.phi))

        Y = clients.sets.y
        y, u = Y.project(z.y - step_y * along.y), z.u - step_y * along.u
        u = jnp.where(state.secant, ratio(Y.project(y + state.delta * u) - y, state.delta), u)

        quiet = HEARD * jnp.sqrt(ratio(averages.noise, seen.fy))
        secants_stay = 2 * SHORTEST * state.delta_0
        longest = jnp.maximum(state.delta_0 * (1 + few * t / FADING) ** -2, secants_stay)
        shortest = 0 if Y == EVERYWHERE else secants_stay
        clients.report(
            hypergradient_norm=jnp.sqrt(heading.along),
            u_norm=jnp.linalg.norm(u),
            step_x=step_x,
            step_y=step_y,
            delta=state.delta,
            pace=state.pace.p,
            lag=jnp.sqrt(ratio(squared(along.y), squared(along.y) + averages.noise)),
        )
        new = state._replace(
            y=reported(t, state.y, y),
            z=Point(z.x, y, u),
            m=m,
            t=state.t + 1,
            delta=jnp.where(state.convex, 0, jnp.clip(quiet, shortest, longest)),
            curvature=curvature,
            x_curvature=x_curvature,
            dx=dx,
            averages=averages,
            pace=pace,
        )
        return new, step_x, better

    def rounds(self, key: Array, size: int) -> int:
        return 1


def reported(t: Array, old: Array, new: Array) -> Array:
    """The average over the last ninth of the rounds, after round t = 0, 1, ..."""
    return old + (NINTH + 1) / (t + 1 + NINTH) * (new - old)


@algorithm
class FedPace(Paced, Penalised):
    """Steps from measured curvatures on x, y and u at the server, one aggregation per step; needs no tuning."""

    def led_by_g(self, state: State) -> Array | None:
        return state.z.y + state.delta * state.z.u if state.secant else None

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        X, Y = clients.sets
        z = Point(X.project(x), Y.project(y), jnp.zeros_like(y))
        look = clients.draw().mean(self.first_look, z.x, z.y)
        return self.first(z, look._replace(enough=look.enough * clients.everyone().active.size), Y)

    def step(self, state: State, clients: Clients, key: Array) -> State:
        z, t = state.z, state.t.astype(state.y.dtype)
        cohort = clients.draw()
        nothing = jax.tree.map(jnp.zeros_like, z), Measured.nothing(z.y)
        d, seen, loss = cohort.mean(self.answer, z, state.delta, state.secant, around=(*nothing, state.pace.last_loss))
        m = average(self.beta, state.m, d)
        along = self.along(t, m.x)
        heading = Heading.of(d.x, along, z.x, state.pace.best_x)
        new, step_x, better = self.after(state, m, d, seen, loss, heading, clients)
        x = clients.sets.x.project(z.x - step_x * along)
        new = new._replace(
            x=reported(t, state.x, x),
            z=new.z._replace(x=x),
            pace=new.pace._replace(best_x=jnp.where(better, z.x, state.pace.best_x)),
        )
        return if_any(cohort.active, new, state)
