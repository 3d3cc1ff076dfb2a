"""EF-SOBA: one loop and one round per step, compressed, with error feedback.

Y. He, J. Hu, X. Huang, S. Lu, B. Wang and K. Yuan, Distributed Bilevel Optimization with Communication Compression,
ICML 2024. With D_m = (∇_x f_m - ∇²_xy g_m u, ∇_y g_m, ∇²_yy g_m u - ∇_y f_m) and a memory e_m of it at every client,

    C_m = the largest entries of D_m - e_m, in each of x, y and u,    e_m ← e_m + C_m;
    D = e + mean_S C_m,    e ← e + (1/M) Σ_{m∈S} C_m,  which is the mean of all e_m;
    x ← x - α h,    h ← (1 - θ) h + θ D_x,    y ← y - β D_y,    u ← P_r(u - γ D_u).

A client sends the values and positions of its entries. What they leave out stays in D_m - e_m, so clients that differ do no
harm: at the solution e_m is D_m. If everyone takes part, D is the new e; for a sampled S this D is right on average if nothing
is left out. For the weighted problem D_m is multiplied by M w_m before it is compressed, as in `CommFedBiO`.

This was written from a summary of the paper (clients send compressed differences to memories that both sides update), not from
its listing, which is yet to be compared. Chosen here are the largest entries as the compression, memories that start at 0 and
take all of C_m, the moving average of CM-SOBA, x that moves along the h of the step before, the bound on u, and sampling.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import algorithm
from fedbilevel.algorithms.estimators import Sparse, SparsePoint, compressed
from fedbilevel.algorithms.soba import CompressedSOBA
from fedbilevel.core.clients import Client, Clients, PerClient, at_client
from fedbilevel.core.problem import Point


class State(NamedTuple):
    """The server's point, h and e, and the e_m of every client."""

    x: Array
    y: Array
    u: Array
    h: Array
    memory: Point
    memories: PerClient


@algorithm
class EFSOBA(CompressedSOBA):
    """Compressed directions in x, y and u with error feedback, one aggregation per step, and a moving average for x."""

    @at_client
    def first_memory(self, client: Client, zeros: Point) -> Point:
        """The first e_m: nothing has been sent yet."""
        return zeros

    @at_client
    def compressed_change(self, client: Client, z: Point, memory: Point) -> tuple[SparsePoint, Point]:
        """C_m and the new e_m, which stay at the client."""
        d = client.problem.direction(z, client.five_batches())
        sent, after = zip(*(self.change(client.weight * v, e) for v, e in zip(d, memory, strict=True)), strict=True)
        return SparsePoint(*sent), Point(*after)

    def change(self, v: Array, memory: Array) -> tuple[Sparse, Array]:
        """The entries of v - memory that are sent, and the memory once they are added."""
        sent, left = compressed(v, -memory, self.one_in)
        return sent, v - left

    @at_client
    def shared(self, client: Client, result: tuple[SparsePoint, Point]) -> SparsePoint:
        """C_m, the part that is sent."""
        return result[0]

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        zeros = Point(*map(jnp.zeros_like, (x, y, y)))
        return State(x, y, zeros.u, zeros.x, zeros, clients.everyone().map(self.first_memory, zeros))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        z = Point(*state[:3])
        S = clients.draw()
        result = S.map(self.compressed_change, z, S.take(state.memories))
        total = S.gather(self.shared, result).dense(z)
        d = jax.tree.map(lambda e, c: e + c / jnp.maximum(S.active.sum(), 1), state.memory, total)
        memory = jax.tree.map(lambda e, c: e + c / clients.everyone().active.size, state.memory, total)
        z, h = self.moved(z, state.h, d, clients)
        return State(*z, h, memory, S.put(state.memories, result[1]))
