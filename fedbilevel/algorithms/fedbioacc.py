"""FedBiOAcc: FedBiO with STORM momenta on x, y and u.

J. Li, F. Huang and H. Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local
Lower Level Problems, NeurIPS 2023, Algorithm 1 and Eq. (7)-(8).

The point is z = (x, y, u), the momentum d = (ν, ω, q), and with α_t = δ / (u₀ + t)^⅓ iteration t is

    z⁺ = P_r(z - (η, γ, τ) α_t d),                              averaged over the clients if I divides t;
    d⁺ = D(z⁺; B) + (1 - c α_t²) (d - D(z; B)),                 likewise,

where z is the client's own point before the averaging, and D = `Problem.direction` on five independent minibatches B, the
same at both points. (The sentence below the paper's Eq. (6) swaps the names of ω and ν; Eq. (7) is right.) The first
momentum is an average too, which the paper's line 2 does not say, over a sampled cohort like any other. The paper counts the
two averagings as one round; they are two round trips.

What is averaged are increments, z + Σ_{i∈S} (M/|S|) w_i (z_i - z) and likewise for d, from what the server had before the
step: with equal weights these are the averages of the z_i and d_i, and otherwise they are right on average over S. (The d_i
are taken at a point that the same S has averaged: with unequal weights their mean is right up to a term of order α_t d.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import DRIFT, HYPERGRADIENT_NORM, U_NORM, algorithm
from fedbilevel.algorithms.storm import WithMomenta, storm
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.problem import Point
from fedbilevel.settings import count, flag, real, step_size


class State(NamedTuple):
    """The averaged point, its momentum, and the number of the next iteration."""

    x: Array
    y: Array
    u: Array
    nu: Array
    omega: Array
    q: Array
    t: Array


@algorithm
class FedBiOAcc(WithMomenta):
    """Local steps on x, y and u with STORM momenta, averaged every I steps."""

    rounds_to_start: ClassVar[int] = 1
    reports: ClassVar[Mapping[str, str]] = {**DRIFT, **HYPERGRADIENT_NORM, **U_NORM}
    late_answers: ClassVar[bool] = True

    eta: float = step_size(0.1, "η, step on x, times α_t")
    gamma: float = step_size(1.0, "γ, step on y, times α_t")
    tau: float = step_size(1.0, "τ, step on u, times α_t")
    delta: float = real(0.5, "δ, in α_t = δ / (u₀ + t)^⅓", above=0)
    offset: float = real(8.0, "u₀, in α_t", above=0)
    c_nu: float = real(1.0, "c_ν, forgetting of x's momentum: 1 - c_ν α_t² is kept", above=0)
    c_omega: float = real(1.0, "c_ω, forgetting of y's momentum", above=0)
    c_u: float = real(1.0, "c_u, forgetting of u's momentum", above=0)
    radius: float = real(1e4, "r, bound on the norm of u", source="ours: idle unless u runs away", above=0)
    local_steps: int = count(5, "I, local steps between two averagings", source="the paper's data cleaning")
    share_batch: bool = flag(False, "one minibatch for all derivatives of a local step")

    def direction(self, client: Client, z: Point, k: Any, times: int = 1) -> Point:
        """D at z on the k-th minibatches of this call, each `times` the usual size."""
        return client.problem.direction(z, client.five_batches(k, times, self.share_batch))

    def moved(self, z: Point, d: Point, t: Array) -> Point:
        """z⁺ of iteration t, Eq. (8)"""
        alpha = self.alpha(t)
        return z.moved(d, self.eta * alpha, self.gamma * alpha, self.tau * alpha, self.radius)

    def refreshed(self, client: Client, d: Point, old: Point, new: Point, t: Array, k: Any) -> Point:
        """d⁺ of iteration t, Eq. (7)"""
        alpha = self.alpha(t)
        keep = Point(1 - self.c_nu * alpha**2, 1 - self.c_omega * alpha**2, 1 - self.c_u * alpha**2)
        return storm(self.direction(client, new, k), d, self.direction(client, old, k), keep)

    @at_client
    def first_momentum(self, client: Client, z: Point) -> Point:
        """The first d, from minibatches of I times the usual size."""
        return self.direction(client, z, 0, self.local_steps)

    @at_client
    def local_iterates(self, client: Client, z: Point, d: Point, t: Array) -> tuple[Point, Point]:
        """z and d after I - 1 iterations, which stay at the client."""

        def local_step(k: Any, zd: tuple[Point, Point]) -> tuple[Point, Point]:
            z, d = zd
            new = self.moved(z, d, t + k)
            return new, self.refreshed(client, d, z, new, t + k, k)

        return iterate(self.local_steps - 1, local_step, (z, d))

    @at_client
    def last_point(self, client: Client, zd: tuple[Point, Point], t: Array) -> Point:
        """z of the I-th iteration."""
        return self.moved(*zd, t)

    @at_client
    def last_momentum(self, client: Client, zd: tuple[Point, Point], new: Point, t: Array) -> Point:
        """d of the I-th iteration, at the averaged point."""
        z, d = zd
        return self.refreshed(client, d, z, new, t, 0)

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        z = Point(x, y, jnp.zeros_like(y))
        d = clients.draw().mean(self.first_momentum, z)
        return State(x, y, z.u, d.x, d.y, d.u, jnp.int32(1))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        x, y, u, nu, omega, q, t = state
        z, d = Point(x, y, u), Point(nu, omega, q)
        last = t + self.local_steps - 1
        S = clients.draw()
        zd = S.map(self.local_iterates, z, d, t)
        z, drift = S.mean_and_drift(self.last_point, zd, last, around=z)
        d = S.mean(self.last_momentum, zd, z, last, around=d)
        clients.report(u_norm=jnp.linalg.norm(z.u), hypergradient_norm=jnp.linalg.norm(d.x), drift=drift)
        return State(z.x, z.y, z.u, d.x, d.y, d.u, last + 1)

    def rounds(self, key: Array, size: int) -> int:
        return 2
