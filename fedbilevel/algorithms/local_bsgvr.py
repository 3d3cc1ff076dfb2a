"""Local-BSGVR and AdaFBiO: STORM momenta on y and on each client's own hypergradient.

H. Gao, On the Convergence of Momentum-Based Algorithms for Federated Stochastic Bilevel Optimization Problems,
2022; and with `adaptive` F. Huang, Fast Adaptive Federated Bilevel Optimization, 2022. The point is z = (x, y), the
momentum d = (ν, ω), and D = (Φ_m, ∇_y g_m) with Φ_m the Neumann hypergradient of client m alone. Iteration t is

    z⁺ = z - (η, γ) α_t d,    d⁺ = D(z⁺; B) + (1 - c α_t²) (d - D(z; B)),    α_t = δ / (u₀ + t)^⅓,

and x, y and both momenta are averaged every I iterations: as increments, z + Σ_{i∈S} (M/|S|) w_i (z_i - z) and likewise d,
which is right on average over S for any weights, as in `FedBiOAcc`.

This is meant for homogeneous clients: the average of the Φ_m is not the hypergradient of the average, so where the clients'
lower levels differ the method converges to a wrong point.

AdaFBiO scales the steps, x by 1 / (√a + ρ) and y by 1 / (b + ρ), with a ← k a + (1 - k) ν² and
b ← k b + (1 - k) |ω| refreshed where the momenta are averaged and frozen in between.

MRBO (J. Yang, K. Ji and Y. Liang, Provably Faster Algorithms for Bilevel Optimization, NeurIPS 2021) is this for one
client that holds all data, with I = 1. Rows count as in StocBiO (see `LFedNest`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import DRIFT, HYPERGRADIENT_NORM, algorithm
from fedbilevel.algorithms.estimators import local_direction
from fedbilevel.algorithms.storm import WithMomenta, storm
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.problem import Pair, Tree
from fedbilevel.settings import count, flag, real, step_size


class State(NamedTuple):
    """The averaged point and its momentum, a and b if adaptive, and the number of the next iteration."""

    x: Array
    y: Array
    nu: Array
    omega: Array
    scaling: Tree
    t: Array


@algorithm
class LocalBSGVR(WithMomenta):
    """STORM momenta on y and on the clients' own hypergradients, all averaged every I steps."""

    rounds_to_start: ClassVar[int] = 1
    reports: ClassVar[Mapping[str, str]] = {**DRIFT, **HYPERGRADIENT_NORM}
    late_answers: ClassVar[bool] = True

    eta: float = step_size(0.1, "η, step on x, times α_t")
    gamma: float = step_size(1.0, "γ, step on y, times α_t")
    delta: float = real(0.5, "δ, in α_t = δ / (u₀ + t)^⅓", above=0)
    offset: float = real(8.0, "u₀, in α_t", above=0)
    c_nu: float = real(1.0, "c_ν, forgetting of x's momentum: 1 - c_ν α_t² is kept", above=0)
    c_omega: float = real(1.0, "c_ω, forgetting of y's momentum", above=0)
    tau: float = step_size(0.5, "τ, step of the Neumann series")
    neumann_order: int = count(10, "Q, order of the Neumann series, of Q + 1 terms", least=0)
    local_steps: int = count(5, "I, local steps between two averagings")
    adaptive: bool = flag(False, "scale the steps by the momenta's size: AdaFBiO")
    memory: float = real(0.9, "k, memory of the scaling, if adaptive", least=0, most=1)
    floor: float = real(0.1, "ρ, added to the scaling, if adaptive", above=0)
    pooled: bool = flag(False, "one client holds all rows: MRBO")

    def direction(self, client: Client, z: Pair, k: Any, times: int = 1) -> Pair:
        """D at z on the k-th minibatches of this call, each `times` the usual size."""
        return local_direction(client, z, self.tau, self.neumann_order, k, times)

    def moved(self, z: Pair, d: Pair, scaling: Tree, t: Array) -> Pair:
        """z⁺ of iteration t"""
        alpha = self.alpha(t)
        x_scale, y_scale = (jnp.sqrt(scaling.x) + self.floor, scaling.y + self.floor) if self.adaptive else (1.0, 1.0)
        return Pair(z.x - self.eta * alpha * d.x / x_scale, z.y - self.gamma * alpha * d.y / y_scale)

    def refreshed(self, client: Client, d: Pair, old: Pair, new: Pair, t: Array, k: Any) -> Pair:
        """d⁺ of iteration t"""
        alpha = self.alpha(t)
        keep = Pair(1 - self.c_nu * alpha**2, 1 - self.c_omega * alpha**2)
        return storm(self.direction(client, new, k), d, self.direction(client, old, k), keep)

    def rescaled(self, d: Pair, a: Array | float = 0.0, b: Array | float = 0.0) -> Tree:
        """a and b updated with the averaged momentum d; empty if not adaptive."""
        if not self.adaptive:
            return ()
        k = self.memory
        return Pair(k * a + (1 - k) * d.x**2, k * b + (1 - k) * jnp.linalg.norm(d.y))

    @at_client
    def first_momentum(self, client: Client, z: Pair) -> Pair:
        """The first d, from minibatches of I times the usual size."""
        return self.direction(client, z, 0, self.local_steps)

    @at_client
    def local_iterates(self, client: Client, z: Pair, d: Pair, scaling: Tree, t: Array) -> tuple[Pair, Pair]:
        """z and d after I - 1 iterations, which stay at the client."""

        def local_step(k: Any, zd: tuple[Pair, Pair]) -> tuple[Pair, Pair]:
            z, d = zd
            new = self.moved(z, d, scaling, t + k)
            return new, self.refreshed(client, d, z, new, t + k, k)

        return iterate(self.local_steps - 1, local_step, (z, d))

    @at_client
    def last_point(self, client: Client, zd: tuple[Pair, Pair], scaling: Tree, t: Array) -> Pair:
        """z of the I-th iteration."""
        return self.moved(*zd, scaling, t)

    @at_client
    def last_momentum(self, client: Client, zd: tuple[Pair, Pair], new: Pair, t: Array) -> Pair:
        """d of the I-th iteration, at the averaged point."""
        z, d = zd
        return self.refreshed(client, d, z, new, t, 0)

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        d = clients.draw().mean(self.first_momentum, Pair(x, y))
        return State(x, y, d.x, d.y, self.rescaled(d), jnp.int32(1))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        x, y, nu, omega, scaling, t = state
        z, d = Pair(x, y), Pair(nu, omega)
        last = t + self.local_steps - 1
        S = clients.draw()
        zd = S.map(self.local_iterates, z, d, scaling, t)
        z, drift = S.mean_and_drift(self.last_point, zd, scaling, last, around=z)
        d = S.mean(self.last_momentum, zd, z, last, around=d)
        clients.report(hypergradient_norm=jnp.linalg.norm(d.x), drift=drift)
        return State(z.x, z.y, d.x, d.y, self.rescaled(d, *scaling), last + 1)

    def rounds(self, key: Array, size: int) -> int:
        return 2
