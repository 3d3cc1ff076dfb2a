"""FedMBO: minibatch SGD on y, then n independent Neumann chains that travel from client to client.

M. Huang, D. Zhang and K. Ji, Achieving Linear Speedup in Non-IID Federated Bilevel Learning, ICML 2023,
Algorithms 1 and 2 and Eq. (6). T rounds of

    y ← y - β mean_{i∈S} ∇_y g_i(x, y),    S fresh in every round,

then the parallel hypergradient estimator PHE: chain i draws N_i ~ U{0..N-1} and starts at a sampled client with

    d_i = ∇_x f_c(x, y),    p_i = (N / ℓ) ∇_y f_c(x, y),

is sent in round l <= N_i to a fresh client c, p_i ← p_i - ∇²_yy g_c(x, y) p_i / ℓ, and ends in a last round at
a fresh client: H_i = d_i - ∇²_xy g_c(x, y) p_i. Then x ← x - α mean_i H_i.

(Algorithm 2's line 4 has ∇_y f where Eq. (6) has ∇_x f; Algorithm 1's line 11 has y^{k,t-1} for y^{k,t}.)
A client's derivatives count M w_m times, so that the estimate is unbiased for unequal weights too. A chain
whose client drops out skips that factor.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from fedbilevel.algorithms.base import Algorithm, algorithm
from fedbilevel.clients import Client, Clients, at_client
from fedbilevel.problem import Pair
from fedbilevel.settings import count, step_size


@algorithm
class FedMBO(Algorithm):
    """Minibatch SGD on y and the parallel hypergradient estimator PHE."""

    alpha: float = step_size(0.05, "α, step on x")
    beta: float = step_size(0.5, "β, step on y")
    smoothness: float = step_size(1.0, "ℓ, smoothness of g in y; its inverse is the step of the Neumann series")
    lower_rounds: int = count(5, "T, rounds on y in a step")
    neumann_terms: int = count(20, "N, terms of the Neumann series")

    @at_client
    def descend(self, client: Client, x: Array, y: Array) -> Array:
        """∇_y g_i"""
        return client.problem.gy(x, y, client.batch())

    @at_client
    def begin(self, client: Client, x: Array, y: Array) -> tuple[Array, Array]:
        """p_i and d_i"""
        p = self.neumann_terms / self.smoothness * client.problem.fy(x, y, client.batch(0))
        return client.weight * p, client.weight * client.problem.fx(x, y, client.batch(1))

    @at_client
    def contract(self, client: Client, x: Array, y: Array, p: Array) -> Array:
        """A factor of the chain: p_i - ∇²_yy g p_i / ℓ"""
        return p - client.weight * client.problem.gyy(x, y, client.batch(), p) / self.smoothness

    @at_client
    def cross(self, client: Client, x: Array, y: Array, p: Array) -> Array:
        """∇²_xy g p_i"""
        return client.problem.gxy(x, y, client.batch(), p)

    def lengths(self, key: Array, size: int) -> Array:
        """N_1..N_n"""
        return jax.random.randint(key, (size,), 0, self.neumann_terms)

    def hypergradient(self, x: Array, y: Array, clients: Clients, key: Array) -> Array:
        """PHE, Algorithm 2"""
        lengths = self.lengths(key, clients.size)
        first = clients.draw()
        p, d = first.gather(self.begin, x, y)

        def neumann_round(k: Any, p: Array) -> Array:
            S = clients.draw(active=first.active & (k < lengths))
            return S.gather(self.contract, x, y, S.scatter(p), otherwise=p)

        p = clients.loop(lengths.max(), neumann_round, p)
        S = clients.draw(active=first.active)
        return d.sum(0) / first.active.sum() - S.unbiased_mean(self.cross, x, y, S.scatter(p))

    def init(self, x: Array, y: Array, clients: Clients) -> Pair:
        return Pair(x, y)

    def step(self, state: Pair, clients: Clients, key: Array) -> Pair:
        x, y = state
        y = clients.loop(self.lower_rounds, lambda _, y: y - self.beta * clients.draw().mean(self.descend, x, y), y)
        return Pair(x - self.alpha * self.hypergradient(x, y, clients, key), y)

    def rounds(self, key: Array, size: int) -> Array:
        return self.lower_rounds + self.lengths(key, size).max() + 2
