"""Means of which the server learns the sum over the clients that answer, and nothing else.

A client sends its change h - z (see `Cohort.mean`) as whole numbers, in steps of bound · cohort / 2³¹: so a sum over up to
`cohort` clients fits into 32 bits, and is exact. What rounding leaves out is added to the next change. In a federation the
numbers are hidden by masks that cancel in the sum (Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine
Learning, CCS 2017); a simulation adds up the same numbers openly, so its trajectory is the federation's.

An entry larger than the bound is an error, never a wrong sum: the run ends with a line. So does a round of a federation with
fewer than `at_least` answers. Clients that weigh differently, and algorithms whose server needs single answers, are refused.
The drift between clients, which only single answers show, is not reported.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.aggregation import Aggregation, aggregation
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.settings import count, step_size

TOO_LARGE = -(2**31)  # instead of a number beyond the bound; no sum is as low


@aggregation
class SecureSum(Aggregation):
    """The mean, from a sum whose terms stay hidden."""

    encodes: ClassVar[bool] = True
    hides: ClassVar[bool] = True

    at_least: int = count(3, "t, the fewest clients in a sum; fewer than t that collude with the server learn no more", least=2)
    cohort: int = count(16, "the most clients in a sum", least=2)
    bound: float = step_size(1000.0, "the largest entry of a change, and the largest metric")

    def require(self, population: Population, participation: Participation) -> None:
        super().require(population, participation)
        n = participation.capacity(population.size)
        if n < self.at_least:
            raise InputError(f"at_least must be at most the {n} clients of a round; given: {self.at_least}")
        if population.size > self.cohort:
            raise InputError(f"cohort must be at least the number of clients, {population.size}; given: {self.cohort}")

    @property
    def step(self) -> float:
        """What one whole number stands for."""
        return self.bound / ((2**31 - 1) // self.cohort)

    def encode(self, key: Array, change: Tree, memory: Tree) -> tuple[Tree, Tree]:
        wanted = jax.tree.map(jnp.add, change, memory)

        def whole(v: Array) -> Array:
            fits = jnp.abs(v) <= self.bound
            return jnp.where(fits, jnp.round(jnp.where(fits, v, 0) / self.step).astype(jnp.int32), TOO_LARGE)

        message = jax.tree.map(whole, wanted)
        return message, jax.tree.map(lambda v, q: v - self.step * q.astype(v.dtype), wanted, message)

    def combine(self, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        n = (weights > 0).sum()

        def opened(r: Array) -> Array:
            usable = (n >= self.at_least) & (r != TOO_LARGE).all()
            return jnp.where(usable, r.sum(0, dtype=jnp.int32) * (self.step / n), jnp.nan).astype(float)

        mean = jax.tree.map(opened, rows)
        return mean if around is None else jax.tree.map(lambda z, h: z + h.astype(z.dtype), around, mean)
