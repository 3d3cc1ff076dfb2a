"""What the double-loop algorithms share: rounds that bring y closer to y*(x), and rounds that move x.

Lower solvers; an application draws a fresh S and takes one round except where noted:

    sgd        y ← y - β mean_S ∇_y g_m(x, y)
    fedavg     τ local steps y_m ← y_m - β ∇_y g_m(x, y_m), then their average
    fedsvrg    q = mean_S ∇_y g_m(x, y), then τ local steps y_m ← y_m - β (∇_y g_m(x, y_m) - ∇_y g_m(x, y) + q),
               then their average: two rounds with one S (FedNest's FedInn, FBO-AggITD's Algorithm 2)

Upper round (FedNest's FedOut, FBO-AggITD's Algorithm 4), given the hypergradient estimate h:

    τ local steps x_m ← x_m - α (h - ∇_x f_m(x, y) + ∇_x f_m(x_m, y)), then their average

Averages estimate the weighted sum over all clients from those in S (`Cohort.mean`), so that weights keep their meaning for
any S. Gradients count (M/|S|) w_i times, and so do the distances of iterates from their start. For corrected steps the start
is y - τ β q (x - τ α h), where q (h), already averaged, would lead on its own. A corrected round with τ = 1 is then right on
average; with τ > 1 it is right up to order β², for equal weights too, since q and the corrections to it come from one S.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

from jax import Array

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.estimators import corrected_descent
from fedbilevel.core.clients import Client, Clients, Cohort, at_client, iterate
from fedbilevel.settings import count, step_size

LOWER_ROUNDS = {"sgd": 1, "fedavg": 1, "fedsvrg": 2}


class WithGradients(Algorithm):
    """An algorithm whose server asks for the gradients on y and on x apart."""

    @at_client
    def lower_gradient(self, client: Client, x: Array, y: Array) -> Array:
        """∇_y g_m"""
        return client.problem.gy(x, y, client.batch())

    @at_client
    def hypergradient_part(self, client: Client, x: Array, y: Array, p: Array) -> Array:
        """∇_x f_m - ∇²_xy g_m p, a client's part of the hypergradient where p estimates [∇²_yy g]⁻¹ ∇_y f"""
        batch = client.batch()
        return client.problem.fx(x, y, batch) - client.problem.gxy(x, y, batch, p)


@dataclass(frozen=True, kw_only=True)
class DoubleLoop(WithGradients):
    """An algorithm that in every step first runs a lower solver for some rounds."""

    alpha: float = step_size(0.1, "α, step on x")
    beta: float = step_size(0.5, "β, step on y")
    lower_rounds: int = count(5, "T (FBO-AggITD's N), applications of the lower solver in a step")
    local_steps: int = count(1, "τ, local steps of fedavg, of fedsvrg and of a local upper round")

    @property
    @abc.abstractmethod
    def lower_solver(self) -> str:
        """One of `LOWER_ROUNDS`: a hyperparameter of every such algorithm, each with its own default."""

    @at_client
    def local_y(self, client: Client, x: Array, y: Array) -> Array:
        """y_m after τ plain local steps."""
        return iterate(self.local_steps, lambda k, y: y - self.beta * client.problem.gy(x, y, client.batch(k)), y)

    @at_client
    def corrected_y(self, client: Client, x: Array, y: Array, q: Array) -> Array:
        """y_m after τ corrected local steps."""

        def gradient(v: Array, k: Any) -> Array:
            return client.problem.gy(x, v, client.batch(k))

        return corrected_descent(gradient, y, q, self.beta, self.local_steps)

    @at_client
    def corrected_x(self, client: Client, x: Array, y: Array, h: Array) -> Array:
        """x_m after τ corrected local steps."""

        def gradient(v: Array, k: Any) -> Array:
            return client.problem.fx(v, y, client.batch(k))

        return corrected_descent(gradient, x, h, self.alpha, self.local_steps)

    def lower_round(self, x: Array, y: Array, S: Cohort) -> Array:
        """One application of the lower solver."""
        match self.lower_solver:
            case "sgd":
                return y - self.beta * S.mean(self.lower_gradient, x, y)
            case "fedavg":
                return S.mean(self.local_y, x, y, around=y)
            case _:
                return self.corrected_lower_round(x, y, S.mean(self.lower_gradient, x, y), S)

    def corrected_lower_round(self, x: Array, y: Array, q: Array, S: Cohort) -> Array:
        """The second round of fedsvrg."""
        return S.mean(self.corrected_y, x, y, q, around=y - self.local_steps * self.beta * q)

    def upper_round(self, x: Array, y: Array, h: Array, S: Cohort) -> Array:
        """x after corrected local steps."""
        return S.mean(self.corrected_x, x, y, h, around=x - self.local_steps * self.alpha * h)

    def solve_lower(self, x: Array, y: Array, clients: Clients) -> Array:
        """T applications of the lower solver."""
        return clients.loop(self.lower_rounds, lambda _, y: self.lower_round(x, y, clients.draw()), y)

    def lower_cost(self) -> int:
        """The communication rounds of `solve_lower`."""
        return self.lower_rounds * LOWER_ROUNDS[self.lower_solver]
