"""S-TFBO: one loop, whose steps are the inverse lengths of all gradients so far.

Y. Yang, H. Ban, M. Huang, S. Ma and K. Ji, Tuning-Free Bilevel Optimization: New Algorithms and Convergence Analysis,
ICLR 2025, Algorithm 2, with gradients averaged over clients. With D_x = ∇_x f - ∇²_xy g u, D_y = ∇_y g and
D_u = ∇²_yy g u - ∇_y f, each the mean over S at the server,

    α² ← α² + |D_x|²,    β² ← β² + |D_y|²,    γ² ← γ² + |D_u|²,    φ = max(β, γ);
    y ← y - D_y / β,    u ← u - D_u / φ,    x ← x - D_x / (α φ).

One minibatch of f and one of g serve all derivatives of a step, as in the authors' code. The theorem is for full gradients:
with noise the sums grow for ever and the steps fall as 1/√t, on x as 1/t.

The method needs no tuning, but it is not invariant to scaling: the first step on y has length 1, that on x length 1/φ,
whatever x, y, f and g are measured in, and only sums that have grown make later ones shorter. With a sampled S the directions
are right on average, but their lengths, and so the steps, are those of the sample.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import algorithm
from fedbilevel.algorithms.tuning_free import State, TuningFree
from fedbilevel.core.clients import Client, Clients, at_client
from fedbilevel.core.problem import Point


@algorithm
class STFBO(TuningFree):
    """Steps from cumulative gradient lengths on x, y and u at the server, one aggregation per step; needs no tuning."""

    @at_client
    def direction(self, client: Client, z: Point) -> Point:
        """D_m"""
        return client.problem.direction(z, client.five_batches(shared=True))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        z = Point(*state[:3])
        d = clients.draw().mean(self.direction, z)
        alpha, beta, gamma = (jnp.hypot(old, jnp.linalg.norm(v)) for old, v in zip(state[3:], d, strict=True))
        phi = jnp.maximum(beta, gamma)
        steps = 1 / (alpha * phi), 1 / beta, 1 / phi
        z = z.moved(d, *steps)
        clients.report(
            hypergradient_norm=jnp.linalg.norm(d.x),
            u_norm=jnp.linalg.norm(z.u),
            step_x=steps[0],
            step_y=steps[1],
            step_u=steps[2],
        )
        return State(*z, alpha, beta, gamma)

    def rounds(self, key: Array, size: int) -> int:
        return 1
