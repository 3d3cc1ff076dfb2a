"""Means of which the server learns the sum over the clients that answer, and nothing else.

A client sends its change h - z (see `Cohort.mean`), times M w_m where clients weigh differently, as whole numbers, in steps of
bound · cohort / 2³¹: so a sum over up to `cohort` clients fits into 32 bits, and is exact. What rounding leaves out is added to
the next change. In a federation the numbers are hidden by masks that cancel in the sum (Bonawitz et al., Practical Secure
Aggregation for Privacy-Preserving Machine Learning, CCS 2017); a simulation adds up the same numbers openly, so its trajectory
is the federation's.

An entry larger than the bound is an error, never a wrong sum: the run ends with a line. In a federation one more number of the
sum counts the clients that have such an entry, so that no client has to say so itself; all its other numbers are then random.
A round of a federation with fewer than `at_least` answers ends with a line too. Algorithms whose server needs single answers
are refused. The drift between clients, which only single answers show, is not reported.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core import randomness
from fedbilevel.core.aggregation import Aggregation, aggregation
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.settings import count, step_size

TOO_LARGE = -(2**31)  # instead of a number beyond the bound; no sum is as low


@dataclass(frozen=True, kw_only=True)
class HiddenSum(Aggregation):
    """A mean from a sum of whole numbers, each of which stands for `step`, whose terms stay hidden."""

    weighs: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    encodes: ClassVar[bool] = True
    hides: ClassVar[bool] = True

    at_least: int = count(3, "t, the fewest clients in a sum; fewer than t that collude with the server learn no more", least=2)
    cohort: int = count(16, "the most clients in a sum", least=2)

    def require(self, population: Population, participation: Participation) -> None:
        super().require(population, participation)
        n = participation.capacity(population.size)
        if n < self.at_least:
            raise InputError(f"at_least must be at most the {n} clients of a round; given: {self.at_least}")
        if population.size > self.cohort:
            raise InputError(f"cohort must be at least the number of clients, {population.size}; given: {self.cohort}")

    @property
    def most(self) -> int:
        """The largest whole number of a client."""
        return (2**31 - 1) // self.cohort

    @property
    @abc.abstractmethod
    def step(self) -> float:
        """What one whole number stands for."""

    def for_metrics(self, number: int) -> Self:
        """The rule for so many metrics, which are added up like changes."""
        return self

    def encode_metrics(self, metrics: Array) -> Array:
        """At a client: what crosses instead of its metrics."""
        message, _ = self.for_metrics(metrics.size).encode(randomness.key(0), metrics, jnp.zeros_like(metrics))
        return message

    def combine(self, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        n = (weights > 0).sum()

        def opened(r: Array) -> Array:
            usable = (n >= self.at_least) & (r != TOO_LARGE).all()
            return jnp.where(usable, r.sum(0, dtype=jnp.int32) * (self.step / n), jnp.nan).astype(float)

        mean = jax.tree.map(opened, rows)
        return mean if around is None else jax.tree.map(lambda z, h: z + h.astype(z.dtype), around, mean)


@aggregation
class SecureSum(HiddenSum):
    """The mean, from a sum whose terms stay hidden."""

    bound: float = step_size(1000.0, "the largest entry of a change, and the largest metric")

    @property
    def step(self) -> float:
        """See `HiddenSum`."""
        return self.bound / self.most

    def encode(self, key: Array, change: Tree, memory: Tree) -> tuple[Tree, Tree]:
        def added(c: Array, e: Array) -> Array:
            left = self.step + 4 * self.bound * jnp.finfo(c.dtype).eps  # the most that rounding leaves out
            return c + jnp.clip(e, -left, left)

        def whole(v: Array) -> Array:
            fits = jnp.abs(v) <= self.bound
            number = jnp.round(jnp.where(fits, v, 0) / self.step).astype(jnp.int32)
            return jnp.where(fits & (jnp.abs(number) <= self.most), number, TOO_LARGE)

        wanted = jax.tree.map(added, change, memory)
        message = jax.tree.map(whole, wanted)
        return message, jax.tree.map(lambda v, q: v - self.step * q.astype(v.dtype), wanted, message)

    def refusal(self, function: str, memory: Tree) -> str:
        for leaf in jax.tree.leaves(memory):
            left = np.asarray(leaf, float).reshape(len(leaf), -1)
            beyond = np.argwhere(np.abs(left) > self.bound)  # since `TOO_LARGE` was sent in place of an entry
            if len(beyond):
                entry = left[tuple(beyond[0])] + self.step * TOO_LARGE
                return (
                    f"client {beyond[0][0]} answered {function} with a change of {entry:.3g}, and secure sums hold entries "
                    f"up to bound = {self.bound:g}: raise it (--set-aggregate bound=...) if such changes are right"
                )
        return ""
