"""FedBiO: local steps on x, y and u, all averaged every I steps.

J. Li, F. Huang and H. Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local
Lower Level Problems, NeurIPS 2023, Algorithm 2 and Eq. (6).

With D = `Problem.direction` on mutually independent minibatches, everything at the values of iteration t,

    x ← x - η D_x,    y ← y - γ D_y,    u ← P_r(u - τ D_u).

With z = (x, y, u), the average after I steps is z + Σ_{i∈S} (M/|S|) w_i (z_i - z). If weights are equal, it is the average of
the z_i; if not, it is still right on average over S, unlike an average whose weights are normalised over S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import DRIFT, HYPERGRADIENT_NORM, U_NORM, Algorithm, algorithm
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.problem import Point
from fedbilevel.settings import count, flag, real, step_size


@algorithm
class FedBiO(Algorithm):
    """Local steps on x, y and u, averaged every I steps."""

    reports: ClassVar[Mapping[str, str]] = {**DRIFT, **HYPERGRADIENT_NORM, **U_NORM}
    late_answers: ClassVar[bool] = True

    eta: float = step_size(0.02, "η, step on x")
    gamma: float = step_size(0.5, "γ, step on y")
    tau: float = step_size(0.5, "τ, step on u")
    radius: float = real(1e4, "r, bound on the norm of u", source="ours: idle unless u runs away", above=0)
    local_steps: int = count(5, "I, local steps between two averagings", source="the paper's data cleaning")
    share_batch: bool = flag(False, "one minibatch for all derivatives of a local step")

    @at_client
    def local_point(self, client: Client, z: Point) -> Point:
        """The client's point after its local steps."""

        def local_step(k: Any, z: Point) -> Point:
            d = client.problem.direction(z, client.five_batches(k, shared=self.share_batch))
            return z.moved(d, self.eta, self.gamma, self.tau, self.radius)

        return iterate(self.local_steps, local_step, z)

    def init(self, x: Array, y: Array, clients: Clients) -> Point:
        return Point(x, y, jnp.zeros_like(y))

    def step(self, z: Point, clients: Clients, key: Array) -> Point:
        new, drift = clients.draw().mean_and_drift(self.local_point, z, around=z)
        moved = jnp.linalg.norm(z.x - new.x) / (self.eta * self.local_steps)
        clients.report(u_norm=jnp.linalg.norm(new.u), hypergradient_norm=moved, drift=drift)
        return new

    def rounds(self, key: Array, size: int) -> int:
        return 1
