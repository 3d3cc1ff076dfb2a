"""What the algorithms with a hypergradient of each client's own share: its direction in x and y."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.estimators import neumann_hypergradient
from fedbilevel.core.clients import Client
from fedbilevel.core.problem import Pair
from fedbilevel.settings import count, step_size


@dataclass(frozen=True, kw_only=True)
class LocalDirection(Algorithm):
    """An algorithm whose clients follow D = (Φ_m, ∇_y g_m), with Φ_m the Neumann hypergradient of Eq. (11)."""

    tau: float = step_size(0.5, "τ, step of the Neumann series", source="FedBiO-Local's Omniglot experiment")
    neumann_order: int = count(10, "Q, order of the Neumann series, of Q + 1 terms", least=0)

    def direction(self, client: Client, z: Pair, k: Any, times: int = 1) -> Pair:
        """D at z = (x, y) on the k-th minibatches of this call, `times` as large as usual; each derivative has its own."""
        terms = self.neumann_order + 1
        first = k * (terms + 2)
        hypergradient = neumann_hypergradient(client, *z, self.tau, terms, first + 1, times)
        return Pair(hypergradient, client.problem.gy(*z, client.batch(first, times)))
