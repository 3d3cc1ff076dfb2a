"""LFedNest: FedNest with local hypergradients, so that x moves in one round.

D. A. Tarzanagh, M. Li, C. Thrampoulidis and S. Oymak, FedNest: Federated Bilevel, Minimax, and Compositional
Optimization, ICML 2022, section on Light-FedNest. After the lower rounds every client makes τ local steps

    x_m ← x_m - α Φ_m(x_m, y),    Φ_m = ∇_x f_m - ∇²_xy g_m (1/ℓ) Σ_{k<N} (I - ∇²_yy g_m / ℓ)^k ∇_y f_m,

and x ← x + Σ_{i∈S} (M/|S|) w_i (x_i - x), which is their average if weights are equal, and right on average over S if not.
The average of the Φ_m is not the hypergradient of the average: where the clients' lower levels differ, the method converges
to a wrong point.

StocBiO (K. Ji, J. Yang and Y. Liang, Bilevel Optimization: Convergence Analysis and Enhanced Design, ICML 2021) is
this for one client that holds all data: T steps of SGD on y, then x ← x - α Φ(x, y). A minibatch draws a client with
probability w_m and then one of its rows, so that all rows of client m together count w_m, as in the weighted problem.
With equal weights each row counts the same instead, as in the paper: clients with more rows weigh more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import DRIFT, HYPERGRADIENT_NORM, algorithm
from fedbilevel.algorithms.double_loop import LOWER_ROUNDS, DoubleLoop
from fedbilevel.algorithms.estimators import neumann_hypergradient
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.problem import Pair
from fedbilevel.settings import choice, count, flag, real


@algorithm
class LFedNest(DoubleLoop):
    """Lower rounds, then local steps along each client's own Neumann hypergradient."""

    reports: ClassVar[Mapping[str, str]] = {**DRIFT, **HYPERGRADIENT_NORM}
    late_answers: ClassVar[bool] = True

    lower_solver: str = choice("fedsvrg", "how y approaches y*(x)", LOWER_ROUNDS)
    smoothness: float = real(1.0, "ℓ, smoothness of g in y; its inverse is the step of the Neumann series", above=0, decades=4)
    neumann_terms: int = count(20, "N, terms of the Neumann series")
    pooled: bool = flag(False, "one client holds all rows: StocBiO")

    @at_client
    def local_x(self, client: Client, x: Array, y: Array) -> Array:
        """x_m after τ local steps along its own hypergradient."""

        def local_step(k: Any, x: Array) -> Array:
            first = k * (self.neumann_terms + 1)
            return x - self.alpha * neumann_hypergradient(client, x, y, 1 / self.smoothness, self.neumann_terms, first)

        return iterate(self.local_steps, local_step, x)

    def init(self, x: Array, y: Array, clients: Clients) -> Pair:
        return Pair(x, y)

    def step(self, state: Pair, clients: Clients, key: Array) -> Pair:
        x, y = state
        y = self.solve_lower(x, y, clients)
        new, drift = clients.draw().mean_and_drift(self.local_x, x, y, around=x)
        clients.report(hypergradient_norm=jnp.linalg.norm(x - new) / (self.alpha * self.local_steps), drift=drift)
        return Pair(new, y)

    def rounds(self, key: Array, size: int) -> int:
        return self.lower_cost() + 1
