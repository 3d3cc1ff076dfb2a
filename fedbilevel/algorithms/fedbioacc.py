"""FedBiOAcc: FedBiO with STORM momenta on x, y and u.

J. Li, F. Huang and H. Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local
Lower Level Problems, NeurIPS 2023, Algorithm 1 and Eq. (7)-(8).

With z = (x, y, u), the momentum d = (ν, ω, q) and α_t = δ / (u₀ + t)^⅓, iteration t is

    z⁺ = P_r(z - (η, γ, τ) α_t d),                              averaged over the clients if I divides t;
    d⁺ = D(z⁺; B) + (1 - c α_t²) (d - D(z; B)),                 likewise,

D of `Problem.direction`, z the client's own point before the averaging, and B the same minibatches at both
points. (The sentence below the paper's Eq. (6) exchanges the names of ω and ν; Eq. (7) is right.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import Algorithm, algorithm
from fedbilevel.clients import Client, Clients, PerClient, at_client, iterate
from fedbilevel.estimators import storm
from fedbilevel.problem import FiveBatches, Point
from fedbilevel.settings import count, flag, step_size


class State(NamedTuple):
    """The averaged point and momentum, and the iteration to come."""

    z: Point
    d: Point
    t: Array

    @property
    def x(self) -> Array:
        return self.z.x

    @property
    def y(self) -> Array:
        return self.z.y


@algorithm
class FedBiOAcc(Algorithm):
    """Local steps on x, y and u with STORM momenta, averaged every I steps."""

    eta: float = step_size(0.1, "η, step on x, times α_t")
    gamma: float = step_size(1.0, "γ, step on y, times α_t")
    tau: float = step_size(1.0, "τ, step on u, times α_t")
    c_nu: float = step_size(1.0, "c_ν, forgetting of x's momentum: 1 - c_ν α_t² is kept")
    c_omega: float = step_size(1.0, "c_ω, forgetting of y's momentum")
    c_u: float = step_size(1.0, "c_u, forgetting of u's momentum")
    delta: float = step_size(0.5, "δ, in α_t = δ / (u₀ + t)^⅓")
    offset: float = step_size(8.0, "u₀, in α_t")
    radius: float = step_size(1e4, "r, bound on the norm of u", source="ours: idle unless u runs away")
    local_steps: int = count(5, "I, local steps between two averagings", source="the paper's data cleaning")
    share_batch: bool = flag(False, "one minibatch for all derivatives of a local step")

    def alpha(self, t: Array | int) -> Array:
        """α_t"""
        return jnp.asarray(self.delta / (self.offset + t) ** (1 / 3))

    def move(self, z: Point, d: Point, t: Array) -> Point:
        """Eq. (8)"""
        a = self.alpha(t)
        return z.moved(d, self.eta * a, self.gamma * a, self.tau * a, self.radius)

    def correct(self, client: Client, d: Point, old: Point, new: Point, t: Array, batches: FiveBatches) -> Point:
        """Eq. (7)"""
        at_new, at_old = client.problem.direction(new, batches), client.problem.direction(old, batches)
        keep = [1 - c * self.alpha(t) ** 2 for c in (self.c_nu, self.c_omega, self.c_u)]
        return Point(*map(storm, at_new, d, at_old, keep))

    @at_client
    def begin(self, client: Client, z: Point) -> Point:
        """The first momentum, from a minibatch I times the usual."""
        return client.problem.direction(z, client.five_batches(times=self.local_steps, shared=self.share_batch))

    @at_client
    def iterate(self, client: Client, z: Point, d: Point, t: Array) -> tuple[Point, Point]:
        """I - 1 iterations; their result stays here."""

        def local_step(k: Any, carry: tuple[Point, Point]) -> tuple[Point, Point]:
            z, d = carry
            new = self.move(z, d, t + k)
            return new, self.correct(client, d, z, new, t + k, client.five_batches(k, shared=self.share_batch))

        return iterate(self.local_steps - 1, local_step, (z, d))

    @at_client
    def arrive(self, client: Client, zd: tuple[Point, Point], t: Array) -> Point:
        """The point of the I-th iteration."""
        return self.move(*zd, t)

    @at_client
    def refresh(self, client: Client, zd: tuple[Point, Point], new: Point, t: Array) -> Point:
        """The momentum of the I-th iteration, at the averaged point."""
        z, d = zd
        return self.correct(client, d, z, new, t, client.five_batches(shared=self.share_batch))

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        z = Point(x, y, jnp.zeros_like(y))
        return State(z, clients.draw().mean(self.begin, z), jnp.int32(1))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        z, d, t = state
        last = t + self.local_steps - 1
        S = clients.draw()
        zd: PerClient = S.map(self.iterate, z, d, t)
        z = S.mean(self.arrive, zd, last)
        d = S.mean(self.refresh, zd, z, last)
        return State(z, d, last + 1)

    def rounds(self, key: Array, size: int) -> int:
        return 2

    def step_sizes(self, step: int) -> dict[str, float]:
        return {**super().step_sizes(step), "alpha_t": float(self.alpha(1 + step * self.local_steps))}
