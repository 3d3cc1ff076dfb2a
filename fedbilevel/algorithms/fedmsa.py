"""FedMSA: STORM momenta at the server, and local steps that start from them and correct their drift.

D. A. Tarzanagh, M. Li, P. Sharma and S. Oymak, Federated Multi-Sequence Stochastic Approximation with Local Hypergradient
Estimation, 2023, for bilevel problems: the sequences are z = (x, y, u), their maps D = `Problem.direction`, and the momentum is
d = (h, q¹, q²). A step has two rounds, each with a fresh S. In the first, clients make K local steps from the server's z and d,

    z_m ← z_m - (α, β, β) d_m,    d_m ← d_m + D_m(z_m; B) - D_m(previous z_m; B),    with a fresh B in each,

and z⁺ is the average of the z_m. In the second, which is also how the method starts, with ρ = 1,

    d ← mean_S (D_m(z⁺; B) + (1 - ρ) (d - D_m(z; B))).

A local direction differs from the average d only as far as the clients' derivatives of D do: so x, y and u all move locally,
and still the hypergradient is that of the average. What is averaged are increments, around z - K (α, β, β) d for the local
steps, which is where d alone would lead: right on average for any weights if K = 1, and up to order (α, β)² if not.

The recursion was read from the authors' code (github.com/ucr-optml/FedMSA), not from the paper's listing. There everyone takes
part in d, and one client of ten, drawn at random, in the local steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import DRIFT, HYPERGRADIENT_NORM, U_NORM, Algorithm, algorithm
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.problem import Point
from fedbilevel.settings import count, real, step_size


class State(NamedTuple):
    """The averaged point and its momentum."""

    x: Array
    y: Array
    u: Array
    d: Point


@algorithm
class FedMSA(Algorithm):
    """Local steps on x, y and u along a momentum of the server's, corrected for drift."""

    rounds_to_start: ClassVar[int] = 1
    reports: ClassVar[Mapping[str, str]] = {**DRIFT, **HYPERGRADIENT_NORM, **U_NORM}
    late_answers: ClassVar[bool] = True

    alpha: float = step_size(0.02, "α, step on x", source="ours: with the authors' 0.05, x outruns y on quadratics")
    beta: float = step_size(0.1, "β, step on y and u", source="the authors' code, loss tuning")
    rho: float = real(0.5, "ρ, forgetting of the momentum in a step", above=0, most=1, source="the authors' code, loss tuning")
    local_steps: int = count(4, "K, local steps in a step", source="the authors' code, loss tuning")

    def moved(self, z: Point, d: Point, steps: int = 1) -> Point:
        """The point after so many steps along d."""
        return z.moved(d, steps * self.alpha, steps * self.beta, steps * self.beta)

    def direction(self, client: Client, z: Point, k: Any = 0) -> Point:
        """D_m at z on the k-th minibatches of this call."""
        return client.problem.direction(z, client.five_batches(k))

    @at_client
    def first_momentum(self, client: Client, z: Point) -> Point:
        """D_m at z"""
        return self.direction(client, z)

    @at_client
    def local_point(self, client: Client, z: Point, d: Point) -> Point:
        """z_m after K local steps."""

        def local_step(k: Any, carry: tuple[Point, Point]) -> tuple[Point, Point]:
            z, d = carry
            new = self.moved(z, d)
            return new, jax.tree.map(lambda d, a, b: d + a - b, d, self.direction(client, new, k), self.direction(client, z, k))

        return self.moved(*iterate(self.local_steps - 1, local_step, (z, d)))

    @at_client
    def change(self, client: Client, new: Point, old: Point) -> Point:
        """D_m(z⁺; B) - (1 - ρ) D_m(z; B)"""
        at_new, at_old = self.direction(client, new), self.direction(client, old)
        return jax.tree.map(lambda a, b: a - (1 - self.rho) * b, at_new, at_old)

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        z = Point(x, y, jnp.zeros_like(y))
        return State(*z, clients.draw().mean(self.first_momentum, z))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        old, d = Point(*state[:3]), state.d
        around = self.moved(old, d, self.local_steps)
        z, drift = clients.draw().mean_and_drift(self.local_point, old, d, around=around)
        change = clients.draw().mean(self.change, z, old)
        d = jax.tree.map(lambda d, c: (1 - self.rho) * d + c, d, change)
        clients.report(hypergradient_norm=jnp.linalg.norm(d.x), u_norm=jnp.linalg.norm(z.u), drift=drift)
        return State(z.x, z.y, z.u, d)

    def rounds(self, key: Array, size: int) -> int:
        return 2
