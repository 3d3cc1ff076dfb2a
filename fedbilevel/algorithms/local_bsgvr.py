"""Local-BSGVR and AdaFBiO: STORM momenta on y and on each client's own hypergradient.

H. Gao, On the Convergence of Momentum-Based Algorithms for Federated Stochastic Bilevel Optimization Problems,
2022; and with `adaptive` F. Huang, Fast Adaptive Federated Bilevel Optimization, 2022. The point is z = (x, y), the
momentum d = (ν, ω), and D = (Φ_m, ∇_y g_m) with Φ_m the Neumann hypergradient of client m alone; x, y and both
momenta are averaged every I iterations.

Meant for homogeneous clients: the average of the Φ_m is not the hypergradient of the average, so where the clients'
lower levels differ it converges to a wrong point.

AdaFBiO scales the steps, x by 1 / (√a + ρ) and y by 1 / (b + ρ), with a ← k a + (1 - k) ν² and
b ← k b + (1 - k) |ω| refreshed where the momenta are averaged and frozen in between.

MRBO (J. Yang, K. Ji and Y. Liang, Provably Faster Algorithms for Bilevel Optimization, NeurIPS 2021) is this for one
client that holds all data, with I = 1.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import algorithm
from fedbilevel.algorithms.local_direction import LocalDirection
from fedbilevel.algorithms.storm import AveragedStorm
from fedbilevel.core.problem import Pair, Tree
from fedbilevel.settings import flag, real, step_size


@algorithm
class LocalBSGVR(LocalDirection, AveragedStorm):
    """STORM momenta on y and on the clients' own hypergradients, all averaged every I steps."""

    eta: float = step_size(0.1, "η, step on x, times α_t")
    gamma: float = step_size(1.0, "γ, step on y, times α_t")
    c_nu: float = step_size(1.0, "c_ν, forgetting of x's momentum: 1 - c_ν α_t² is kept")
    c_omega: float = step_size(1.0, "c_ω, forgetting of y's momentum")
    adaptive: bool = flag(False, "scale the steps by the momenta's size: AdaFBiO")
    memory: float = real(0.9, "k, memory of the scaling, if adaptive", least=0, most=1)
    floor: float = step_size(0.1, "ρ, added to the scaling, if adaptive")
    pooled: bool = flag(False, "one client holds all rows, each of which counts the same: MRBO")

    def start(self, x: Array, y: Array) -> Pair:
        return Pair(x, y)

    def moved(self, z: Pair, d: Pair, alpha: Array, scaling: Tree) -> Pair:
        x_scale, y_scale = (jnp.sqrt(scaling.x) + self.floor, scaling.y + self.floor) if self.adaptive else (1.0, 1.0)
        return Pair(z.x - self.eta * alpha * d.x / x_scale, z.y - self.gamma * alpha * d.y / y_scale)

    def forgetting(self) -> tuple[float, ...]:
        return self.c_nu, self.c_omega

    def rescaled(self, scaling: Tree, d: Pair) -> Tree:
        if not self.adaptive:
            return ()
        a, b = (0.0, 0.0) if scaling is None else scaling
        k = self.memory
        return Pair(k * a + (1 - k) * d.x**2, k * b + (1 - k) * jnp.linalg.norm(d.y))
