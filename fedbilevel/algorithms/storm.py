"""What the algorithms with STORM momenta share: the schedule, and the round that averages points and momenta.

Iteration t, with α_t = δ / (u₀ + t)^⅓, moves the point z along the momentum d and refreshes d,

    z⁺ = z - (steps) α_t d,                                    averaged over the clients if I divides t;
    d⁺ = D(z⁺; B) + (1 - c α_t²) (d - D(z; B)),                likewise,

z the client's own point before the averaging, and B the same minibatches at both points.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.estimators import storm
from fedbilevel.core.clients import Client, Clients, at_client, iterate
from fedbilevel.core.problem import Tree
from fedbilevel.settings import count, step_size


class State(NamedTuple):
    """The averaged point and momentum, what scales the steps, and the iteration to come."""

    z: Any
    d: Any
    scaling: Tree
    t: Array

    @property
    def x(self) -> Array:
        return self.z.x

    @property
    def y(self) -> Array:
        return self.z.y


@dataclass(frozen=True, kw_only=True)
class Storm(Algorithm):
    """An algorithm with STORM momenta: their schedule and their refreshing."""

    delta: float = step_size(0.5, "δ, in α_t = δ / (u₀ + t)^⅓")
    offset: float = step_size(8.0, "u₀, in α_t")
    local_steps: int = count(5, "I, local steps between two averagings", source="the paper's data cleaning")

    def alpha(self, t: Array | int) -> Array:
        """α_t"""
        return jnp.asarray(self.delta / (self.offset + t) ** (1 / 3))

    @abc.abstractmethod
    def direction(self, client: Client, z: Any, k: Any, times: int = 1) -> Any:
        """D at z on the k-th minibatches of this call, `times` as large as usual."""

    @abc.abstractmethod
    def forgetting(self) -> tuple[Array | float, ...]:
        """c, for each part of the momentum."""

    def correct(self, client: Client, d: Any, old: Any, new: Any, t: Array, k: Any) -> Any:
        """The refreshed momentum."""
        at_new, at_old = self.direction(client, new, k), self.direction(client, old, k)
        keep = [1 - c * self.alpha(t) ** 2 for c in self.forgetting()]
        return type(d)(*map(storm, at_new, d, at_old, keep))

    def step_sizes(self, step: int) -> dict[str, float]:
        return {**super().step_sizes(step), "alpha_t": float(self.alpha(step * self.local_steps))}


@dataclass(frozen=True, kw_only=True)
class AveragedStorm(Storm):
    """An algorithm that averages its whole point, and its whole momentum, every I iterations."""

    rounds_to_start: ClassVar[int] = 1

    @abc.abstractmethod
    def start(self, x: Array, y: Array) -> Any:
        """The first point: a named tuple with fields x, y, ..."""

    @abc.abstractmethod
    def moved(self, z: Any, d: Any, alpha: Array, scaling: Tree) -> Any:
        """The point after a step of an iteration."""

    @abc.abstractmethod
    def rescaled(self, scaling: Tree, d: Any) -> Tree:
        """What scales the steps, given the averaged momentum; `scaling` is None at first."""

    @at_client
    def begin(self, client: Client, z: Any) -> Any:
        """The first momentum, from a minibatch I times the usual."""
        return self.direction(client, z, 0, self.local_steps)

    @at_client
    def iterate(self, client: Client, z: Any, d: Any, scaling: Tree, t: Array) -> tuple[Any, Any]:
        """I - 1 iterations; their result stays here."""

        def local_step(k: Any, zd: tuple[Any, Any]) -> tuple[Any, Any]:
            z, d = zd
            new = self.moved(z, d, self.alpha(t + k), scaling)
            return new, self.correct(client, d, z, new, t + k, k)

        return iterate(self.local_steps - 1, local_step, (z, d))

    @at_client
    def arrive(self, client: Client, zd: tuple[Any, Any], scaling: Tree, t: Array) -> Any:
        """The point of the I-th iteration."""
        return self.moved(*zd, self.alpha(t), scaling)

    @at_client
    def refresh(self, client: Client, zd: tuple[Any, Any], new: Any, t: Array) -> Any:
        """The momentum of the I-th iteration, at the averaged point."""
        z, d = zd
        return self.correct(client, d, z, new, t, 0)

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        z = self.start(x, y)
        d = clients.draw().mean(self.begin, z)
        return State(z, d, self.rescaled(None, d), jnp.int32(1))

    def step(self, state: State, clients: Clients, key: Array) -> State:
        z, d, scaling, t = state
        last = t + self.local_steps - 1
        S = clients.draw()
        zd = S.map(self.iterate, z, d, scaling, t)
        z = S.mean(self.arrive, zd, scaling, last)
        d = S.mean(self.refresh, zd, z, last)
        return State(z, d, self.rescaled(scaling, d), last + 1)

    def rounds(self, key: Array, size: int) -> int:
        return 2
