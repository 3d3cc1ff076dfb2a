"""SimFBO and ShroFBO: one loop, one round per step.

Y. Yang, P. Xiao and K. Ji, SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel
Learning, NeurIPS 2023, Algorithm 1 with coefficients a = 1.

Each sampled client makes local steps on x, y and u at once and sends up the sum of its directions D; the
server takes q = Σ_{i∈S} (M/|S|) w_i Σ_k D_i^k and moves

    x ← x - γ_x q_x,    y ← y - γ_y q_y,    u ← P_r(u - γ_u q_u).

Where clients make unequal numbers τ_m of local steps, those with more weigh more, and SimFBO solves a different problem.
ShroFBO (the paper's Algorithm 2) has clients send Σ_k D_m^k / τ_m and τ_m, and multiplies the aggregate by
ρ = Σ_{i∈S} (M/|S|) w_i τ_i, so that all get their proper weight. Here it is ρ = τ + Σ_{i∈S} (M/|S|) w_i (τ_i - τ), with τ the
smallest of them: the same on average, and simply τ if all are equal. Both factors come from one S, so with unequal τ_m the
product is biased unless everyone takes part, for equal weights too (8 % on a heterogeneous quadratic with 2 of 6 clients).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, U_NORM, BiasedBySampling, algorithm
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.participation import Participation
from fedbilevel.core.problem import Point
from fedbilevel.settings import count, flag, real, step_size


@algorithm
class SimFBO(BiasedBySampling):
    """Simultaneous local steps on x, y and u, one aggregation per step."""

    reports: ClassVar[Mapping[str, str]] = {**HYPERGRADIENT_NORM, **U_NORM}
    late_answers: ClassVar[bool] = True

    eta_x: float = step_size(0.02, "η_x, local step on x", tied_to="gamma_x")
    eta_y: float = step_size(0.5, "η_y, local step on y", tied_to="gamma_y")
    eta_u: float = step_size(0.5, "η_u, local step on u", tied_to="gamma_u")
    gamma_x: float = step_size(0.02, "γ_x, server step on x")
    gamma_y: float = step_size(0.5, "γ_y, server step on y")
    gamma_u: float = step_size(0.5, "γ_u, server step on u")
    radius: float = real(1e4, "r, bound on the norm of u", source="ours: idle unless u runs away", above=0)
    local_steps: int = count(1, "τ, local steps in a round")
    spread: int = count(0, "unequal local steps: client m makes τ_m = τ + m mod (spread + 1)", least=0)
    rescale: bool = flag(False, "give all clients' steps the same weight: ShroFBO")
    share_batch: bool = flag(False, "one minibatch for all derivatives of a local step")

    def steps_of(self, client: Client) -> Array | int:
        """τ_m"""
        return self.local_steps + (client.number % (self.spread + 1) if self.spread else 0)

    @at_client
    def direction_sum(self, client: Client, z: Point) -> Point:
        """The sum of the client's local directions."""

        def local_step(k: Any, carry: tuple[Point, Point]) -> tuple[Point, Point]:
            z, total = carry
            d = client.problem.direction(z, client.five_batches(k, shared=self.share_batch))
            return z.moved(d, self.eta_x, self.eta_y, self.eta_u), jax.tree.map(jnp.add, total, d)

        return iterate(self.steps_of(client), local_step, (z, jax.tree.map(jnp.zeros_like, z)))[1]

    @at_client
    def mean_direction_and_steps(self, client: Client, z: Point) -> tuple[Point, Array]:
        """The mean of the client's local directions, and τ_m."""
        steps = jnp.asarray(self.steps_of(client), z.x.dtype)
        return jax.tree.map(lambda d: d / steps, self.direction_sum(client, z)), steps

    def init(self, x: Array, y: Array, clients: Clients) -> Point:
        return Point(x, y, jnp.zeros_like(y))

    def step(self, z: Point, clients: Clients, key: Array) -> Point:
        if self.rescale:
            around = jax.tree.map(jnp.zeros_like, z), jnp.asarray(self.local_steps, z.x.dtype)
            mean, steps = clients.draw().unbiased_mean(self.mean_direction_and_steps, z, around=around)
            q = jax.tree.map(lambda d: steps * d, mean)
        else:
            q = clients.draw().unbiased_mean(self.direction_sum, z)
            steps = self.local_steps + self.spread / 2  # the clients' average: they do not send τ_m
        z = z.moved(q, self.gamma_x, self.gamma_y, self.gamma_u, self.radius)
        clients.report(u_norm=jnp.linalg.norm(z.u), hypergradient_norm=jnp.linalg.norm(q.x) / steps)
        return z

    def rounds(self, key: Array, size: int) -> int:
        return 1

    def sampling_bias(self, participation: Participation, clients: int) -> str:
        if not (self.rescale and self.spread) or participation.is_everyone(clients):
            return ""
        return "ShroFBO's ρ and its direction come from one cohort: with unequal local steps their product is biased."
