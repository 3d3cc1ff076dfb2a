"""FedBiOAcc-Local: FedBiO-Local with STORM momenta on x and y.

J. Li, F. Huang and H. Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local
Lower Level Problems, NeurIPS 2023, Algorithm 4. With the momenta ν of x and ω of y, and Φ_m of `FedBiOLocal`,

    x⁺ = x - η α_t ν,                                           averaged over the clients if I divides t;
    y⁺ = y - γ α_t ω,                                           never averaged;
    ν⁺ = Φ_m(x⁺, y⁺; B) + (1 - c_ν α_t²) (ν - Φ_m(x, y; B)),    averaged if I divides t;
    ω⁺ = ∇_y g_m(x⁺, y⁺; B) + (1 - c_ω α_t²) (ω - ∇_y g_m(x, y; B)),    never averaged.

DistBiOAcc is this with I = 1. The first ν is averaged, which the paper's line 2 does not say. (Its line 4 also moves
a u that is used nowhere else.)

What is averaged are increments, x + Σ_{i∈S} (M/|S|) w_i (x_i - x) and likewise for ν, as in `FedBiOAcc`; the first ν is
averaged over all clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import DRIFT, HYPERGRADIENT_NORM, algorithm
from fedbilevel.algorithms.estimators import local_direction
from fedbilevel.algorithms.storm import WithMomenta, storm
from fedbilevel.core.clients import Client, Clients, PerClient, at_client, iterate
from fedbilevel.core.problem import LowerLevel, Pair
from fedbilevel.settings import count, real, step_size


class State(NamedTuple):
    """The averaged x and ν, each client's own (y_m, ω_m), and the number of the next iteration."""

    x: Array
    nu: Array
    own: PerClient
    t: Array

    @property
    def y(self) -> PerClient:
        return self.own[0]


Iterates = tuple[Pair, Pair]  # the point (x, y) and its momentum (ν, ω)


@algorithm
class FedBiOAccLocal(WithMomenta):
    """FedBiOAcc for local lower levels: STORM momenta, Neumann hypergradients, x and its momentum averaged."""

    lower_level: ClassVar[LowerLevel] = "local"
    rounds_to_start: ClassVar[int] = 1
    reports: ClassVar[Mapping[str, str]] = {**DRIFT, **HYPERGRADIENT_NORM}
    late_answers: ClassVar[bool] = True

    eta: float = step_size(0.1, "η, step on x, times α_t")
    gamma: float = step_size(1.0, "γ, step on y, times α_t")
    delta: float = real(0.5, "δ, in α_t = δ / (u₀ + t)^⅓", above=0)
    offset: float = real(8.0, "u₀, in α_t", above=0)
    c_nu: float = real(1.0, "c_ν, forgetting of x's momentum: 1 - c_ν α_t² is kept", above=0)
    c_omega: float = real(1.0, "c_ω, forgetting of y's momentum", above=0)
    tau: float = step_size(0.5, "τ, step of the Neumann series", source="the paper's Omniglot experiment")
    neumann_order: int = count(10, "Q, order of the Neumann series, of Q + 1 terms", least=0)
    local_steps: int = count(5, "I, local steps between two averagings")

    def direction(self, client: Client, z: Pair, k: Any, times: int = 1) -> Pair:
        """(Φ_m, ∇_y g_m) at z on the k-th minibatches of this call, each `times` the usual size."""
        return local_direction(client, z, self.tau, self.neumann_order, k, times)

    def moved(self, z: Pair, d: Pair, t: Array) -> Pair:
        """x⁺ and y⁺ of iteration t"""
        alpha = self.alpha(t)
        return Pair(z.x - self.eta * alpha * d.x, z.y - self.gamma * alpha * d.y)

    def refreshed(self, client: Client, d: Pair, old: Pair, new: Pair, t: Array, k: Any) -> Pair:
        """ν⁺ and ω⁺ of iteration t"""
        alpha = self.alpha(t)
        keep = Pair(1 - self.c_nu * alpha**2, 1 - self.c_omega * alpha**2)
        return storm(self.direction(client, new, k), d, self.direction(client, old, k), keep)

    @at_client
    def first_nu_and_own(self, client: Client, x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
        """The first ν and (y, ω), from minibatches of I times the usual size; they stay at the client."""
        d = self.direction(client, Pair(x, y), 0, self.local_steps)
        return d.x, (y, d.y)

    @at_client
    def local_iterates(self, client: Client, x: Array, nu: Array, own: tuple[Array, Array], t: Array) -> Iterates:
        """The point and its momentum after I - 1 iterations, which stay at the client."""

        def local_step(k: Any, zd: Iterates) -> Iterates:
            z, d = zd
            new = self.moved(z, d, t + k)
            return new, self.refreshed(client, d, z, new, t + k, k)

        y, omega = own
        return iterate(self.local_steps - 1, local_step, (Pair(x, y), Pair(nu, omega)))

    @at_client
    def last_x(self, client: Client, zd: Iterates, t: Array) -> Array:
        """x of the I-th iteration."""
        return self.moved(*zd, t).x

    @at_client
    def last_nu_and_own(self, client: Client, zd: Iterates, x: Array, t: Array) -> tuple[Array, tuple[Array, Array]]:
        """ν and (y, ω) of the I-th iteration, at the averaged x; they stay at the client."""
        z, d = zd
        new = Pair(x, self.moved(z, d, t).y)
        d = self.refreshed(client, d, z, new, t, 0)
        return d.x, (new.y, d.y)

    @at_client
    def shared(self, client: Client, result: tuple[Array, tuple[Array, Array]]) -> Array:
        """ν, the part that is averaged."""
        return result[0]

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        everyone = clients.everyone()
        result = everyone.map(self.first_nu_and_own, x, y)
        return State(x, everyone.mean(self.shared, result), result[1], jnp.int32(1))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        x, nu, own, t = state
        last = t + self.local_steps - 1
        S = clients.draw()
        zd = S.map(self.local_iterates, x, nu, S.take(own), t)
        x, drift = S.mean_and_drift(self.last_x, zd, last, around=x)
        result = S.map(self.last_nu_and_own, zd, x, last)
        nu = S.mean(self.shared, result, around=nu)
        clients.report(hypergradient_norm=jnp.linalg.norm(nu), drift=drift)
        return State(x, nu, S.put(own, result[1]), last + 1)

    def rounds(self, key: Array, size: int) -> int:
        return 2
