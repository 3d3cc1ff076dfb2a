"""MeFBO: first-order derivatives only, one round per step, and a lower level that need not be convex.

MeFBO: A Moreau Envelope Based First-Order Stochastic Gradient Method for Nonconvex Federated Bilevel Optimization,
anonymous authors, submitted to ICLR 2025, Algorithm 1.

The lower level becomes a penalty: with the Moreau envelope v_γ(x, y) = min_{θ∈Y} g(x, θ) + |θ - y|²/2γ, Eq. (3),
which is at most g(x, y) and equals it only where y is stationary,

    min_{x∈X, y∈Y}  Υ_c(x, y) = f(x, y)/c + g(x, y) - v_γ(x, y).        Eq. (4)

Each sampled client makes τ local steps η on x, y and θ at once, Eq. (8), along, Eq. (9),

    h_θ = ∇_y g(x, θ) + (θ - y)/γ
    h_y = ∇_y f(x, y)/c_t + ∇_y g(x, y) - (y - θ)/γ
    h_x = ∇_x f(x, y)/c_t + ∇_x g(x, y) - ∇_x g(x, θ),        c_t = c (t + 1)^p,

with one minibatch for f and one for g, and sends up the mean of its τ directions, Eq. (10). The server takes
h = Σ_{i∈S} (M/|S|) w_i h_i, Eq. (11), makes its own steps λ and projects x on X, y and θ on Y, Eq. (12).

For a given c the method finds a stationary point of Υ_c, not of the bilevel problem: y stays about 1/c away from y*(x)
and x as far from the solution. A larger c, or a growing one (p > 0), brings it closer, and slows x down by the
same factor. γ must be below 1/ρ, where g + ½ρ|y|² is convex in y; the theorems need γ < 1/(2L), with L the smoothness of g.

Apart from what g does, the difference y - θ grows by the factor 1 + (λ_y - λ_θ)/γ in a step, and the step on θ overshoots
if λ_θ > 2γ: take λ_θ at least λ_y, and below 2γ. The paper's experiments do neither (B.1: γ = 0.015, λ_y = 0.1,
λ_θ = 0.07) and diverge as written; with 1/γ in γ's place they run, so that is how those numbers are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, Penalised, Scheduled, algorithm
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.settings import choice, count, real, step_size


class Triple(NamedTuple):
    """A point, or a direction, in x, y and θ."""

    x: Array
    y: Array
    theta: Array

    def moved(self, h: Triple, steps: Triple) -> Triple:
        """The point after a step along -h."""
        return Triple(*(z - step * d for z, d, step in zip(self, h, steps, strict=True)))


class State(NamedTuple):
    """The server's point and the number of steps taken."""

    x: Array
    y: Array
    theta: Array
    t: Array


@algorithm
class MeFBO(Scheduled, Penalised):
    """Simultaneous local steps on the Moreau-envelope penalty problem in x, y and θ, one aggregation per step."""

    constrained: ClassVar[bool] = True
    needs_strong_convexity: ClassVar[bool] = False
    reports: ClassVar[Mapping[str, str]] = {**HYPERGRADIENT_NORM}
    late_answers: ClassVar[bool] = True

    eta_x: float = step_size(0.5, "η_x, local step on x", tied_to="lambda_x")
    eta_y: float = step_size(0.3, "η_y, local step on y", tied_to="lambda_y")
    eta_theta: float = step_size(0.3, "η_θ, local step on θ", tied_to="lambda_theta")
    lambda_x: float = step_size(0.5, "λ_x, server step on x")
    lambda_y: float = step_size(0.3, "λ_y, server step on y")
    lambda_theta: float = step_size(0.3, "λ_θ, server step on θ")
    penalty: float = real(30.0, "c, in the penalty parameter c_t = c (t + 1)^p", above=0, decades=2)
    growth: float = real(0.1, "p, in c_t", least=0, most=0.25, source="the paper's loss tuning; its theorem: p < 1/4")
    proximal: float = real(0.5, "γ, of the Moreau envelope", above=0, decades=2)
    schedule: str = choice("fixed", "steps as given, or decreasing as in Theorem C.1", ("fixed", "decreasing"))
    decay: float = real(
        0.6, "q, if decreasing: λ falls as (t + 1)^-q and η as (t + 1)^-¼; p < (1 - q)/2", above=0.5, most=1, source="ours"
    )
    local_steps: int = count(1, "τ, local steps in a round", source="the paper's data cleaning")

    def penalty_at(self, t: Array | int) -> Array:
        """c_t"""
        return jnp.asarray(self.penalty * (t + 1.0) ** self.growth)

    def client_steps(self, t: Array | int) -> Triple:
        """η_x, η_y and η_θ at step t."""
        factor = (t + 1.0) ** -0.25 if self.schedule == "decreasing" else 1.0
        return Triple(*(jnp.asarray(eta * factor) for eta in (self.eta_x, self.eta_y, self.eta_theta)))

    def server_steps(self, t: Array | int) -> Triple:
        """λ_x, λ_y and λ_θ at step t."""
        factor = (t + 1.0) ** -self.decay if self.schedule == "decreasing" else 1.0
        return Triple(*(jnp.asarray(step * factor) for step in (self.lambda_x, self.lambda_y, self.lambda_theta)))

    def direction(self, problem: Problem, z: Triple, c: Array, batch: Batch) -> Triple:
        """Eq. (9)"""
        x, y, theta = z
        return Triple(
            x=problem.fx(x, y, batch) / c + problem.gx(x, y, batch) - problem.gx(x, theta, batch),
            y=problem.fy(x, y, batch) / c + problem.gy(x, y, batch) - (y - theta) / self.proximal,
            theta=problem.gy(x, theta, batch) + (theta - y) / self.proximal,
        )

    @at_client
    def mean_direction(self, client: Client, z: Triple, t: Array) -> Triple:
        """The mean of the client's local directions, Eq. (8) and (10)."""
        c, eta = self.penalty_at(t), self.client_steps(t)

        def local_step(k: Any, carry: tuple[Triple, Triple]) -> tuple[Triple, Triple]:
            z, total = carry
            h = self.direction(client.problem, z, c, client.batch(k))
            return z.moved(h, eta), jax.tree.map(jnp.add, total, h)

        _, total = iterate(self.local_steps, local_step, (z, jax.tree.map(jnp.zeros_like, z)))
        return jax.tree.map(lambda h: h / self.local_steps, total)

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        y = clients.sets.y.project(y)
        return State(clients.sets.x.project(x), y, y, jnp.int32(0))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        z, t = Triple(*state[:3]), state.t
        h = clients.draw().unbiased_mean(self.mean_direction, z, t)
        clients.report(hypergradient_norm=self.penalty_at(t) * jnp.linalg.norm(h.x))
        x, y, theta = z.moved(h, self.server_steps(t))
        X, Y = clients.sets
        return State(X.project(x), Y.project(y), Y.project(theta), t + 1)

    def led_by_g(self, state: State) -> Array:
        return state.theta

    def rounds(self, key: Array, size: int) -> int:
        return 1

    def scheduled(self, step: int) -> dict[str, float]:
        t = max(step - 1, 0)  # step number t + 1 uses the values at t
        eta, server = self.client_steps(t), self.server_steps(t)
        return {
            **{f"eta_{name}": float(value) for name, value in eta._asdict().items()},
            **{f"lambda_{name}": float(value) for name, value in server._asdict().items()},
            "c_t": float(self.penalty_at(t)),
        }
