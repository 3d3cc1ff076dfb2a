"""FedMBO and FedNest: a lower solver, a hypergradient estimator and an upper step, each chosen separately.

FedMBO: M. Huang, D. Zhang and K. Ji, Achieving Linear Speedup in Non-IID Federated Bilevel Learning, ICML 2023,
Algorithms 1 and 2 and Eq. (6): lower solver sgd, estimator PHE, x ← x - α h at the server.
FedNest: D. A. Tarzanagh, M. Li, C. Thrampoulidis and S. Oymak, FedNest: Federated Bilevel, Minimax, and
Compositional Optimization, ICML 2022: lower solver fedsvrg, estimator IHGP, τ local upper steps.

PHE has n independent chains that travel. Chain i draws N_i ~ U{0..N-1} and starts at a sampled client c with

    d_i = ∇_x f_c(x, y),    p_i = (N / ℓ) ∇_y f_c(x, y),

is sent to a fresh client c in each round l <= N_i, p_i ← p_i - ∇²_yy g_c(x, y) p_i / ℓ, and ends in a last round at
another fresh client: H_i = d_i - ∇²_xy g_c(x, y) p_i, h = mean_i H_i. The variance of h falls as 1/n.
(Algorithm 2's line 4 has ∇_y f where Eq. (6) has ∇_x f; Algorithm 1's line 11 has y^{k,t-1} for y^{k,t}.)
A client's derivatives count M w_m times, since each place in a cohort is equally likely to be any client's: so the estimate
is unbiased for any weights. A factor is then I - M w_m ∇²_yy g_m / ℓ, so ℓ must be at least the largest M w_m L_m, where L_m
is the smoothness of g_m. A chain whose client is absent skips the factor, so p_i is too long on average: with dropouts, or
with a random number of participants, PHE is biased, for equal weights too.

IHGP has one chain that all share: N' ~ U{0..N-1}, p = (N / ℓ) mean_S ∇_y f_m, then N' rounds with fresh S of
p ← p - mean_S ∇²_yy g_m p / ℓ, then h = mean_S (∇_x f_m - ∇²_xy g_m p). Each mean_S is Σ_{i∈S} (M/|S|) w_i, and
every S is drawn independently: so the estimate is unbiased for any weights and cohorts.

(The third estimator of this family, AggITD, rides on the lower solver's own rounds: see `fbo-aggitd`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, BiasedBySampling, algorithm
from fedbilevel.algorithms.double_loop import LOWER_ROUNDS, DoubleLoop
from fedbilevel.core.clients import Client, Clients, at_client
from fedbilevel.core.participation import Bernoulli, Dropouts, Participation
from fedbilevel.core.problem import Pair
from fedbilevel.settings import choice, count, flag, real


@algorithm
class FedMBO(DoubleLoop, BiasedBySampling):
    """A lower solver, then a Neumann estimate of the hypergradient in separate rounds, then a step on x."""

    reports: ClassVar[Mapping[str, str]] = {**HYPERGRADIENT_NORM}
    gathers: ClassVar[Mapping[str, str]] = {"estimator": "phe"}  # its chains travel from client to client

    lower_solver: str = choice("sgd", "how y approaches y*(x)", LOWER_ROUNDS, source="the paper's Algorithm 1")
    estimator: str = choice(
        "phe", "n chains (phe), or one that all share (ihgp)", ("phe", "ihgp"), source="the paper's Algorithm 2"
    )
    smoothness: float = real(
        1.0, "ℓ ≥ max M w_m L_m, L_m the smoothness of g_m in y; 1/ℓ is the Neumann series' step", above=0, decades=4
    )
    neumann_terms: int = count(20, "N, terms of the Neumann series")
    local_upper: bool = flag(False, "move x in τ corrected local steps, which take one more round")

    @at_client
    def chain_start(self, client: Client, x: Array, y: Array) -> tuple[Array, Array]:
        """p_i and d_i of PHE"""
        p = self.neumann_terms / self.smoothness * client.problem.fy(x, y, client.batch(0))
        return client.weight * p, client.weight * client.problem.fx(x, y, client.batch(1))

    @at_client
    def contracted(self, client: Client, x: Array, y: Array, p: Array) -> Array:
        """A factor of a chain of PHE: p_i - M w_m ∇²_yy g_m p_i / ℓ"""
        return p - client.weight * client.problem.gyy(x, y, client.batch(), p) / self.smoothness

    @at_client
    def mixed_product(self, client: Client, x: Array, y: Array, p: Array) -> Array:
        """∇²_xy g_m p_i"""
        return client.problem.gxy(x, y, client.batch(), p)

    @at_client
    def upper_gradient(self, client: Client, x: Array, y: Array) -> Array:
        """∇_y f_m"""
        return client.problem.fy(x, y, client.batch())

    @at_client
    def hessian_product(self, client: Client, x: Array, y: Array, p: Array) -> Array:
        """∇²_yy g_m p"""
        return client.problem.gyy(x, y, client.batch(), p)

    def lengths(self, key: Array, size: int) -> Array:
        """N_1..N_n of PHE's chains, or N' of IHGP's only chain."""
        return jax.random.randint(key, (size if self.estimator == "phe" else 1,), 0, self.neumann_terms)

    def phe(self, x: Array, y: Array, clients: Clients, lengths: Array) -> Array:
        """FedMBO's Algorithm 2"""
        first = clients.draw()
        p, d = first.gather(self.chain_start, x, y)

        def neumann_round(k: Any, p: Array) -> Array:
            S = clients.draw(active=first.active & (k < lengths))
            return S.gather(self.contracted, x, y, S.scatter(p), otherwise=p)

        p = clients.loop(lengths.max(), neumann_round, p)
        S = clients.draw(active=first.active)
        return d.sum(0) / first.active.sum() - S.unbiased_mean(self.mixed_product, x, y, S.scatter(p))

    def ihgp(self, x: Array, y: Array, clients: Clients, lengths: Array) -> Array:
        """FedNest's FedIHGP"""
        p = self.neumann_terms / self.smoothness * clients.draw().mean(self.upper_gradient, x, y)

        def neumann_round(_: Any, p: Array) -> Array:
            return p - clients.draw().mean(self.hessian_product, x, y, p) / self.smoothness

        p = clients.loop(lengths.max(), neumann_round, p)
        return clients.draw().mean(self.hypergradient_part, x, y, p)

    def hypergradient(self, x: Array, y: Array, clients: Clients, key: Array) -> Array:
        """h, by the chosen estimator"""
        estimate = self.phe if self.estimator == "phe" else self.ihgp
        return estimate(x, y, clients, self.lengths(key, clients.size))

    def init(self, x: Array, y: Array, clients: Clients) -> Pair:
        return Pair(x, y)

    def step(self, state: Pair, clients: Clients, key: Array) -> Pair:
        x, y = state
        y = self.solve_lower(x, y, clients)
        h = self.hypergradient(x, y, clients, key)
        clients.report(hypergradient_norm=jnp.linalg.norm(h))
        x = self.upper_round(x, y, h, clients.draw()) if self.local_upper else x - self.alpha * h
        return Pair(x, y)

    def rounds(self, key: Array, size: int) -> Array:
        return self.lower_cost() + self.lengths(key, size).max() + 2 + self.local_upper

    def sampling_bias(self, participation: Participation, clients: int) -> str:
        if self.estimator != "phe" or not isinstance(participation, (Bernoulli, Dropouts)):
            return ""
        return "FedMBO's chains skip the factors of clients that are absent: with dropouts its hypergradient is biased."
