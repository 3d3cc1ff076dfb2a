"""SimFBO: one loop, one round per step.

Y. Yang, P. Xiao and K. Ji, SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel
Learning, NeurIPS 2023, Algorithm 1 with coefficients a = 1.

Each sampled client makes local steps on x, y and u at once and sends up the sum of its directions D; the
server takes q = Σ_{i∈S} (M/|S|) w_i Σ_k D_i^k and moves

    x ← x - γ_x q_x,    y ← y - γ_y q_y,    u ← P_r(u - γ_u q_u).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import Algorithm, algorithm
from fedbilevel.clients import Client, Clients, at_client, iterate
from fedbilevel.problem import Point
from fedbilevel.settings import count, flag, step_size


@algorithm
class SimFBO(Algorithm):
    """Simultaneous local steps on x, y and u, one aggregation per step."""

    eta_x: float = step_size(0.02, "η_x, local step on x")
    eta_y: float = step_size(0.5, "η_y, local step on y")
    eta_u: float = step_size(0.5, "η_u, local step on u")
    gamma_x: float = step_size(0.02, "γ_x, server step on x")
    gamma_y: float = step_size(0.5, "γ_y, server step on y")
    gamma_u: float = step_size(0.5, "γ_u, server step on u")
    radius: float = step_size(1e4, "r, bound on the norm of u", source="ours: idle unless u runs away")
    local_steps: int = count(1, "τ, local steps in a round")
    share_batch: bool = flag(False, "one minibatch for all derivatives of a local step")

    @at_client
    def descend(self, client: Client, z: Point) -> Point:
        """The sum of the client's local directions."""

        def local_step(k: Any, carry: tuple[Point, Point]) -> tuple[Point, Point]:
            z, total = carry
            d = client.problem.direction(z, client.five_batches(k, shared=self.share_batch))
            return z.moved(d, self.eta_x, self.eta_y, self.eta_u), jax.tree.map(jnp.add, total, d)

        return iterate(self.local_steps, local_step, (z, jax.tree.map(jnp.zeros_like, z)))[1]

    def init(self, x: Array, y: Array, clients: Clients) -> Point:
        return Point(x, y, jnp.zeros_like(y))

    def step(self, z: Point, clients: Clients, key: Array) -> Point:
        q = clients.draw().unbiased_mean(self.descend, z)
        return z.moved(q, self.gamma_x, self.gamma_y, self.gamma_u, self.radius)

    def rounds(self, key: Array, size: int) -> int:
        return 1
