"""CM-SOBA: one loop and one round per step, with unbiased compression and a moving average for x.

Y. He, J. Hu, X. Huang, S. Lu, B. Wang and K. Yuan, Distributed Bilevel Optimization with Communication Compression,
ICML 2024. With D_m = (∇_x f_m - ∇²_xy g_m u, ∇_y g_m, ∇²_yy g_m u - ∇_y f_m),

    C_m = one in s of the entries of D_m, in each of x, y and u, at random and times s;    D = mean_S C_m;
    x ← x - α h,    h ← (1 - θ) h + θ D_x,    y ← y - β D_y,    u ← P_r(u - γ D_u).

A client sends the values and positions of its entries. C_m is D_m on average, and √s times as long. Where clients differ, D_m
does not vanish at the solution, so the iterates stay in motion there, the more the larger the steps are; EF-SOBA's do not.
For the weighted problem D_m is multiplied by M w_m before it is compressed, as in `CommFedBiO`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, U_NORM, Algorithm, algorithm
from fedbilevel.algorithms.estimators import Sparse, SparsePoint, unbiased
from fedbilevel.core.clients import Client, Clients, at_client
from fedbilevel.core.problem import Point
from fedbilevel.settings import count, real, step_size


class State(NamedTuple):
    """The server's point and h."""

    x: Array
    y: Array
    u: Array
    h: Array


@algorithm
class CMSOBA(Algorithm):
    """Compressed directions in x, y and u, one aggregation per step, and a moving average for x."""

    reports: ClassVar[Mapping[str, str]] = {**HYPERGRADIENT_NORM, **U_NORM}

    alpha: float = step_size(0.02, "α, step on x")
    beta: float = step_size(0.1, "β, step on y")
    gamma: float = step_size(0.1, "γ, step on u")
    theta: float = real(0.1, "θ, weight of the new direction in x's moving average", above=0, most=1)
    radius: float = step_size(1e4, "r, bound on the norm of u", source="ours: idle unless u runs away")
    one_in: int = count(4, "s: a client sends one in this many entries")

    @at_client
    def compressed_direction(self, client: Client, z: Point) -> SparsePoint:
        """C_m"""
        d = client.problem.direction(z, client.five_batches())
        return SparsePoint(*(self.entries(client, k, client.weight * v) for k, v in enumerate(d)))

    def entries(self, client: Client, k: int, v: Array) -> Sparse:
        """What is sent of the k-th of several vectors."""
        return unbiased(v, client.order(v.size, k), self.one_in)

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        return State(x, y, jnp.zeros_like(y), jnp.zeros_like(x))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        z, h = Point(*state[:3]), state.h
        S = clients.draw()
        total = S.gather(self.compressed_direction, z).dense(z)
        d = jax.tree.map(lambda c: c / S.active.sum(), total)
        z = z.moved(Point(h, d.y, d.u), self.alpha, self.beta, self.gamma, self.radius)
        clients.report(hypergradient_norm=jnp.linalg.norm(h), u_norm=jnp.linalg.norm(z.u))
        return State(*z, (1 - self.theta) * h + self.theta * d.x)

    def rounds(self, key: Array, size: int) -> int:
        return 1
