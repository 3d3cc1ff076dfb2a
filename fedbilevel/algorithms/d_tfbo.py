"""D-TFBO: rounds on y, rounds on u, then one on x, with steps that are the inverse lengths of all gradients so far.

Y. Yang, H. Ban, M. Huang, S. Ma and K. Ji, Tuning-Free Bilevel Optimization: New Algorithms and Convergence Analysis,
ICLR 2025, Algorithm 1, with gradients averaged over clients. A step has P rounds on y, Q on u and one on x, each with a
fresh S:

    q = mean_S ∇_y g_m,                     β² ← β² + |q|²,    y ← y - q / β;
    r = mean_S (∇²_yy g_m u - ∇_y f_m),     γ² ← γ² + |r|²,    u ← u - r / γ;
    h = mean_S (∇_x f_m - ∇²_xy g_m u),     α² ← α² + |h|²,    x ← x - h / α.

The paper's inner loops go on until |q|² and |r|² are below 1/T, T the number of steps. What a step sends cannot depend on
its numbers here, so they have a fixed number of rounds, and β and γ go on from step to step: both as in the authors' code.
The theorem is for full gradients: with noise the sums grow for ever, and the steps fall as 1/√t.

The method needs no tuning, but it is not invariant to scaling: the first steps have length 1, whatever x, y, f and g are
measured in, and only sums that have grown make later ones shorter. With a sampled S the directions are right on average, but
their lengths, and so the steps, are those of the sample.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import algorithm
from fedbilevel.algorithms.double_loop import WithGradients
from fedbilevel.algorithms.tuning_free import State, TuningFree
from fedbilevel.core.clients import Client, Clients, at_client
from fedbilevel.settings import count


def moved(z: Array, total: Array, d: Array) -> tuple[Array, Array]:
    """z - d / √(total² + |d|²), and that root."""
    total = jnp.hypot(total, jnp.linalg.norm(d))
    return z - d / total, total


@algorithm
class DTFBO(TuningFree, WithGradients):
    """Rounds on y and on u, then one on x, with steps from cumulative gradient lengths; needs no tuning."""

    lower_rounds: int = count(10, "P, rounds on y in a step", source="the authors' code")
    system_rounds: int = count(10, "Q, rounds on u in a step", source="the authors' code")

    @at_client
    def system_gradient(self, client: Client, x: Array, y: Array, u: Array) -> Array:
        """∇²_yy g_m u - ∇_y f_m"""
        batch = client.batch()
        return client.problem.gyy(x, y, batch, u) - client.problem.fy(x, y, batch)

    def step(self, state: State, clients: Clients, key: Array) -> State:
        x, y, u, alpha, beta, gamma = state

        def lower_round(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            y, beta = carry
            return moved(y, beta, clients.draw().mean(self.lower_gradient, x, y))

        y, beta = clients.loop(self.lower_rounds, lower_round, (y, beta))

        def system_round(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            u, gamma = carry
            return moved(u, gamma, clients.draw().mean(self.system_gradient, x, y, u))

        u, gamma = clients.loop(self.system_rounds, system_round, (u, gamma))
        h = clients.draw().mean(self.hypergradient_part, x, y, u)
        x, alpha = moved(x, alpha, h)
        clients.report(
            hypergradient_norm=jnp.linalg.norm(h),
            u_norm=jnp.linalg.norm(u),
            step_x=1 / alpha,
            step_y=1 / beta,
            step_u=1 / gamma,
        )
        return State(x, y, u, alpha, beta, gamma)

    def rounds(self, key: Array, size: int) -> int:
        return self.lower_rounds + self.system_rounds + 1
