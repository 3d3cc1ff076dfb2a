"""FedBiO-Local: every client has a lower problem of its own; only x travels.

J. Li, F. Huang and H. Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local
Lower Level Problems, NeurIPS 2023, Algorithm 3 and Eq. (11). I local iterations of

    y_m ← y_m - γ ∇_y g_m(x_m, y_m),    x_m ← x_m - η Φ_m(x_m, y_m),    both at the old values,

then x ← x + Σ_{i∈S} (M/|S|) w_i (x_i - x), which is the average of the x_i if weights are equal, and right on average over S
if not; y_m stays at its client. Φ_m is the hypergradient by a Neumann series of Q + 1 terms,

    Φ_m = ∇_x f_m - τ ∇²_xy g_m Σ_{q=-1}^{Q-1} Π_{j=Q-q}^{Q} (I - τ ∇²_yy g_m(·; ξ_j)) ∇_y f_m,

with a separate minibatch for every derivative. DistBiO is this with I = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import DRIFT, HYPERGRADIENT_NORM, Algorithm, algorithm
from fedbilevel.algorithms.estimators import local_direction
from fedbilevel.core.clients import Client, Clients, PerClient, at_client, iterate
from fedbilevel.core.problem import LowerLevel, Pair
from fedbilevel.settings import count, step_size


class State(NamedTuple):
    """The averaged x; y_m never leaves client m."""

    x: Array
    y: PerClient


@algorithm
class FedBiOLocal(Algorithm):
    """FedBiO for local lower levels: local steps, Neumann hypergradients, x averaged."""

    lower_level: ClassVar[LowerLevel] = "local"
    reports: ClassVar[Mapping[str, str]] = {**DRIFT, **HYPERGRADIENT_NORM}
    late_answers: ClassVar[bool] = True

    eta: float = step_size(0.02, "η, step on x")
    gamma: float = step_size(0.4, "γ, step on y", source="the paper's Omniglot experiment")
    tau: float = step_size(0.5, "τ, step of the Neumann series", source="the paper's Omniglot experiment")
    neumann_order: int = count(10, "Q, order of the Neumann series, of Q + 1 terms", least=0)
    local_steps: int = count(5, "I, local steps between two averagings")

    @at_client
    def own_y(self, client: Client, y: Array) -> Array:
        """The client's first y, which stays at the client."""
        return y

    @at_client
    def local_point(self, client: Client, x: Array, y: Array) -> Pair:
        """The client's x and y after its local steps, which stay at the client."""

        def local_step(k: Any, z: Pair) -> Pair:
            d = local_direction(client, z, self.tau, self.neumann_order, k)
            return Pair(z.x - self.eta * d.x, z.y - self.gamma * d.y)

        return iterate(self.local_steps, local_step, Pair(x, y))

    @at_client
    def shared(self, client: Client, xy: Pair) -> Array:
        """x, the part that is averaged."""
        return xy.x

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        return State(x, clients.everyone().map(self.own_y, y))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        S = clients.draw()
        xy = S.map(self.local_point, state.x, S.take(state.y))
        x, drift = S.mean_and_drift(self.shared, xy, around=state.x)
        moved = jnp.linalg.norm(state.x - x) / (self.eta * self.local_steps)
        clients.report(hypergradient_norm=moved, drift=drift)
        return State(x, S.put(state.y, xy[1]))

    def rounds(self, key: Array, size: int) -> int:
        return 1
