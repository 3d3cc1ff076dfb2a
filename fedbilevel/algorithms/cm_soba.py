"""CM-SOBA: one loop and one round per step, with unbiased compression and a moving average for x.

Y. He, J. Hu, X. Huang, S. Lu, B. Wang and K. Yuan, Distributed Bilevel Optimization with Communication Compression,
ICML 2024. With D_m = (∇_x f_m - ∇²_xy g_m u, ∇_y g_m, ∇²_yy g_m u - ∇_y f_m),

    C_m = one in s of the entries of D_m, in each of x, y and u, at random and times s;    D = mean_S C_m;
    x ← x - α h,    h ← (1 - θ) h + θ D_x,    y ← y - β D_y,    u ← P_r(u - γ D_u).

A client sends the values and positions of its entries. C_m is D_m on average, and √s times as long. Where clients differ, D_m
does not vanish at the solution, so the iterates stay in motion there, the more the larger the steps are; EF-SOBA's do not.
For the weighted problem D_m is multiplied by M w_m before it is compressed, as in `CommFedBiO`.

This was written from a summary of the paper (SOBA's directions, unbiased compression, a moving average at the server), not from
its listing, which is yet to be compared. Chosen here are random entries as the compression, x that moves along the h of the
step before, and the bound on u.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import algorithm
from fedbilevel.algorithms.estimators import Sparse, SparsePoint, unbiased
from fedbilevel.algorithms.soba import CompressedSOBA
from fedbilevel.core.clients import Client, Clients, at_client
from fedbilevel.core.problem import Point


class State(NamedTuple):
    """The server's point and h."""

    x: Array
    y: Array
    u: Array
    h: Array


@algorithm
class CMSOBA(CompressedSOBA):
    """Compressed directions in x, y and u, one aggregation per step, and a moving average for x."""

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
        z = Point(*state[:3])
        S = clients.draw()
        total = S.gather(self.compressed_direction, z).dense(z)
        d = jax.tree.map(lambda c: c / jnp.maximum(S.active.sum(), 1), total)
        z, h = self.moved(z, state.h, d, clients)
        return State(*z, h)
