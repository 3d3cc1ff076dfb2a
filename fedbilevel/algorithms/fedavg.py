"""FedAvg: trains y on the lower loss alone and leaves x as it is, to show what the upper level gains.

B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas, Communication-Efficient Learning of Deep
Networks from Decentralized Data, AISTATS 2017, Algorithm 1.

    I local steps y_m ← y_m - γ ∇_y g_m(x, y_m),    then y ← y + Σ_{i∈S} (M/|S|) w_i (y_i - y),

which is the average of the y_i if weights are equal. If they are not, it is still right on average over S, unlike an average
whose weights are normalised over S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jax import Array

from fedbilevel.algorithms.base import DRIFT, Algorithm, algorithm
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.problem import Pair
from fedbilevel.settings import count, step_size


@algorithm
class FedAvg(Algorithm):
    """Local SGD on the lower loss; x stays as it is."""

    needs_strong_convexity: ClassVar[bool] = False
    reports: ClassVar[Mapping[str, str]] = {**DRIFT}
    late_answers: ClassVar[bool] = True

    gamma: float = step_size(0.1, "γ, step on y")
    local_steps: int = count(5, "I, local steps between two averagings")

    @at_client
    def local_y(self, client: Client, x: Array, y: Array) -> Array:
        """y_m after I local steps."""

        def local_step(k: Any, y: Array) -> Array:
            return y - self.gamma * client.problem.gy(x, y, client.batch(k))

        return iterate(self.local_steps, local_step, y)

    def init(self, x: Array, y: Array, clients: Clients) -> Pair:
        return Pair(x, y)

    def step(self, state: Pair, clients: Clients, key: Array) -> Pair:
        y, drift = clients.draw().mean_and_drift(self.local_y, state.x, state.y, around=state.y)
        clients.report(drift=drift)
        return Pair(state.x, y)

    def rounds(self, key: Array, size: int) -> int:
        return 1
