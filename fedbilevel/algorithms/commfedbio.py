"""CommFedBiO: the linear system of the hypergradient by compressed federated gradient steps.

J. Li, J. Pei and H. Huang, Communication-Efficient Robust Federated Learning with Noisy Labels, KDD 2022. Every
step has T lower rounds on y, then K rounds on u of

    u ← u - τ mean_S C_m,    C_m the largest entries of e_m + ∇²_yy g_m u - ∇_y f_m,    e_m ← what C_m left out,

then one averaged step x ← x - α mean_S (∇_x f_m - ∇²_xy g_m u). A client sends the values and positions of its entries;
e_m stays with it from step to step. For the weighted problem a client multiplies its gradient by M w_m before compressing
it, since entries that clients compress differently cannot be weighted later; the other averages are those of `double_loop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, U_NORM, algorithm
from fedbilevel.algorithms.double_loop import LOWER_ROUNDS, DoubleLoop
from fedbilevel.algorithms.estimators import Sparse, compressed
from fedbilevel.core.clients import Client, Clients, PerClient, at_client
from fedbilevel.settings import choice, count, step_size


class State(NamedTuple):
    """x, y and u at the server, and what each client's compression has left out so far."""

    x: Array
    y: Array
    u: Array
    residual: PerClient


@algorithm
class CommFedBiO(DoubleLoop):
    """Lower rounds, compressed rounds on the linear system with error feedback, then one averaged step on x."""

    reports: ClassVar[Mapping[str, str]] = {**HYPERGRADIENT_NORM, **U_NORM}
    gathers: ClassVar[bool] = True  # clients send unlike entries

    lower_solver: str = choice("fedavg", "how y approaches y*(x)", LOWER_ROUNDS)
    tau: float = step_size(0.2, "τ, step on u")
    system_rounds: int = count(5, "K, rounds on u in a step")
    one_in: int = count(4, "a client sends one in this many entries")

    @at_client
    def first_residual(self, client: Client, u: Array) -> Array:
        """The first e_m: nothing has been left out yet."""
        return u

    @at_client
    def compressed_gradient(self, client: Client, x: Array, y: Array, u: Array, residual: Array) -> tuple[Sparse, Array]:
        """C_m and the new e_m, which stay at the client."""
        gradient = client.problem.gyy(x, y, client.batch(0), u) - client.problem.fy(x, y, client.batch(1))
        return compressed(client.weight * gradient, residual, self.one_in)

    @at_client
    def shared(self, client: Client, result: tuple[Sparse, Array]) -> Sparse:
        """C_m, the part that is sent."""
        return result[0]

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        u = jnp.zeros_like(y)
        return State(x, y, u, clients.everyone().map(self.first_residual, u))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        x, y, u, residual = state
        y = self.solve_lower(x, y, clients)

        def system_round(_: Any, carry: tuple[Array, PerClient]) -> tuple[Array, PerClient]:
            u, residual = carry
            S = clients.draw()
            result = S.map(self.compressed_gradient, x, y, u, S.take(residual))
            entries = S.gather(self.shared, result)
            return u - self.tau * entries.dense(u.size) / S.active.sum(), S.put(residual, result[1])

        u, residual = clients.loop(self.system_rounds, system_round, (u, residual))
        h = clients.draw().mean(self.hypergradient_part, x, y, u)
        clients.report(u_norm=jnp.linalg.norm(u), hypergradient_norm=jnp.linalg.norm(h))
        return State(x - self.alpha * h, y, u, residual)

    def rounds(self, key: Array, size: int) -> int:
        return self.lower_cost() + self.system_rounds + 1
