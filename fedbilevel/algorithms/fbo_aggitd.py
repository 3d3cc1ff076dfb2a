"""FBO-AggITD: one communication loop for y and for the hypergradient.

P. Xiao and K. Ji, Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative
Differentiation, ICML 2023, Algorithms 1-4. With Q ~ U{0..N} and the participants S of the step, for t = 0..N:

    q = mean_S ∇_y g_m(x, y^t);    z = mean_S ∇_y f_m(x, y^t) if t = Q,    z ← mean_S (z - λ ∇²_yy g_m(x, y^t) z) if t > Q;
    y^{t+1} from y^t by the lower solver's local steps with q, if t < N.

Then h = mean_S (∇_x f_m(x, y^N) - λ (N + 1) ∇²_xy g_m(x, y^N) z), and x moves by the upper round of `double_loop`.

With lower solver fedsvrg that is 2N + 3 rounds: q and z travel together. With fedavg, plain local steps that need
no q, y^{t+1} and z travel together, and with sgd the server moves y along q itself: N + 3 rounds. (Line 6 of
Algorithm 1 lacks λ, which the closed form below it has; line 15's z^{N-1} is the last aggregated z.)

The paper's S is all clients. With a sampled S the step is biased, for equal weights too: y^{t+1}, z and h are products of
averages over one S, and the mean of a product is not the product of the means. On a heterogeneous quadratic h is off by
22, 10 and 5 % on average with 1, 2 and 3 of 7 clients. Each average by itself is right for any weights: q and h like gradients,
z ← z - λ Σ_{i∈S} (M/|S|) w_i ∇²_yy g_i z, y and x as in `double_loop`. So if everyone takes part,
the weighted problem is solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, BiasedBySampling, algorithm
from fedbilevel.algorithms.double_loop import LOWER_ROUNDS, DoubleLoop
from fedbilevel.core.clients import Client, Clients, Cohort, at_client
from fedbilevel.core.participation import Participation
from fedbilevel.core.problem import Pair
from fedbilevel.settings import choice, step_size


@algorithm
class FBOAggITD(DoubleLoop, BiasedBySampling):
    """Aggregated iterative differentiation: the hypergradient estimate rides along with the rounds on y."""

    reports: ClassVar[Mapping[str, str]] = {**HYPERGRADIENT_NORM}

    lower_solver: str = choice("fedsvrg", "how y moves within a round", LOWER_ROUNDS, source="the paper's experiments")
    neumann_step: float = step_size(0.5, "λ, step of the Neumann series")

    @at_client
    def local_z(self, client: Client, x: Array, y: Array, *z: Array) -> Array:
        """z_m: ∇_y f_m at t = Q, where there is no z yet, and z - λ ∇²_yy g_m z after that."""
        batch = client.batch(self.local_steps)
        return z[0] - self.neumann_step * client.problem.gyy(x, y, batch, z[0]) if z else client.problem.fy(x, y, batch)

    @at_client
    def lower_gradient_and_z(self, client: Client, x: Array, y: Array, *z: Array) -> tuple[Array, Array]:
        """q_m and z_m, sent together."""
        return self.lower_gradient(client, x, y), self.local_z(client, x, y, *z)

    @at_client
    def local_y_and_z(self, client: Client, x: Array, y: Array, *z: Array) -> tuple[Array, Array]:
        """y_m after τ plain local steps and z_m, sent together."""
        return self.local_y(client, x, y), self.local_z(client, x, y, *z)

    def aggregate(self, x: Array, y: Array, clients: Clients, S: Cohort, key: Array) -> tuple[Array, Array]:
        """AggITD, Algorithm 1: the hypergradient estimate and y^N."""
        N = self.lower_rounds
        Q = jax.random.randint(key, (), 0, N + 1)

        def before(_: Any, y: Array) -> Array:
            return self.lower_round(x, y, S)

        def with_z(y: Array, *z: Array) -> tuple[Array, Array]:
            nothing = jnp.zeros_like(y)
            around = z[0] if z else nothing
            if self.lower_solver == "fedavg":
                return S.mean(self.local_y_and_z, x, y, *z, around=(y, around))
            q, new_z = S.mean(self.lower_gradient_and_z, x, y, *z, around=(nothing, around))
            return y - self.beta * q if self.lower_solver == "sgd" else self.corrected_lower_round(x, y, q, S), new_z

        early = jnp.minimum(N - Q, 1)  # 1 if z begins before the last t, and 0 if it begins there
        y, z = clients.loop(Q, before, y), jnp.zeros_like(y)
        y, z = clients.loop(early, lambda _, yz: with_z(yz[0]), (y, z))
        y, z = clients.loop(N - Q - 1, lambda _, yz: with_z(*yz), (y, z))
        z = clients.loop(early, lambda _, z: S.mean(self.local_z, x, y, z, around=z), z)
        z = clients.loop(1 - early, lambda _, z: S.mean(self.local_z, x, y, around=z), z)
        return S.mean(self.hypergradient_part, x, y, self.neumann_step * (N + 1) * z), y

    def init(self, x: Array, y: Array, clients: Clients) -> Pair:
        return Pair(x, y)

    def step(self, state: Pair, clients: Clients, key: Array) -> Pair:
        S = clients.draw()
        h, y = self.aggregate(*state, clients, S, key)
        clients.report(hypergradient_norm=jnp.linalg.norm(h))
        return Pair(self.upper_round(state.x, y, h, S), y)

    def rounds(self, key: Array, size: int) -> int:
        return self.lower_cost() + 3

    def sampling_bias(self, participation: Participation, clients: int) -> str:
        if participation.is_everyone(clients):
            return ""
        return "FBO-AggITD draws one cohort for a whole step: unless everyone takes part, its hypergradient is biased."
