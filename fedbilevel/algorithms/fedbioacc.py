"""FedBiOAcc: FedBiO with STORM momenta on x, y and u.

J. Li, F. Huang and H. Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local
Lower Level Problems, NeurIPS 2023, Algorithm 1 and Eq. (7)-(8).

The point is z = (x, y, u), the momentum d = (ν, ω, q), and with α_t = δ / (u₀ + t)^⅓ iteration t is

    z⁺ = P_r(z - (η, γ, τ) α_t d),                              averaged over the clients if I divides t;
    d⁺ = D(z⁺; B) + (1 - c α_t²) (d - D(z; B)),                 likewise,

D of `Problem.direction` on five independent minibatches. (The sentence below the paper's Eq. (6) exchanges the
names of ω and ν; Eq. (7) is right.) The first momenta are averaged, which the paper's line 2 does not say. The paper
counts the two averagings as one round; they are two round trips.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import algorithm
from fedbilevel.algorithms.storm import AveragedStorm
from fedbilevel.core.clients import Client
from fedbilevel.core.problem import Point, Tree
from fedbilevel.settings import flag, step_size


@algorithm
class FedBiOAcc(AveragedStorm):
    """Local steps on x, y and u with STORM momenta, averaged every I steps."""

    eta: float = step_size(0.1, "η, step on x, times α_t")
    gamma: float = step_size(1.0, "γ, step on y, times α_t")
    tau: float = step_size(1.0, "τ, step on u, times α_t")
    c_nu: float = step_size(1.0, "c_ν, forgetting of x's momentum: 1 - c_ν α_t² is kept")
    c_omega: float = step_size(1.0, "c_ω, forgetting of y's momentum")
    c_u: float = step_size(1.0, "c_u, forgetting of u's momentum")
    radius: float = step_size(1e4, "r, bound on the norm of u", source="ours: idle unless u runs away")
    share_batch: bool = flag(False, "one minibatch for all derivatives of a local step")

    def start(self, x: Array, y: Array) -> Point:
        return Point(x, y, jnp.zeros_like(y))

    def direction(self, client: Client, z: Point, k: Any, times: int = 1) -> Point:
        return client.problem.direction(z, client.five_batches(k, times, self.share_batch))

    def moved(self, z: Point, d: Point, alpha: Array, scaling: Tree) -> Point:
        return z.moved(d, self.eta * alpha, self.gamma * alpha, self.tau * alpha, self.radius)

    def forgetting(self) -> tuple[float, ...]:
        return self.c_nu, self.c_omega, self.c_u

    def rescaled(self, scaling: Tree, d: Point) -> Tree:
        return ()
