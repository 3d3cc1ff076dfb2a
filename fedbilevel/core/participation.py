"""Who takes part in a round. Both engines draw here, so that their draws agree.

`draw(key, population)` returns the members' numbers in random order and, if some may be absent, a mask of those
present. A cohort is never empty: if chance leaves nobody, one member stays.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.core import randomness
from fedbilevel.core.randomness import permutation, split
from fedbilevel.errors import InputError, require
from fedbilevel.settings import REQUIRED, check_all, count, real


class Participation(abc.ABC):
    """How cohorts are drawn."""

    @abc.abstractmethod
    def capacity(self, population: int) -> int:
        """The largest size of a cohort; raises `InputError` if none can be drawn from the population."""

    @abc.abstractmethod
    def draw(self, key: Array, population: int) -> tuple[Array, Array | None]:
        """The members' numbers, and which of them are present (None: all)."""

    def is_everyone(self, population: int) -> bool:
        """Whether all clients are in every cohort."""
        members, there = jax.eval_shape(lambda: self.draw(randomness.key(0), population))
        return len(members) == population and there is None


@dataclass(frozen=True)
class Everyone(Participation):
    """All clients."""

    def capacity(self, population: int) -> int:
        return population

    def draw(self, key: Array, population: int) -> tuple[Array, Array | None]:
        return without_replacement(key, population, population), None


@dataclass(frozen=True)
class Uniform(Participation):
    """`size` clients, uniformly without replacement."""

    size: int = count(REQUIRED, "members of a cohort")

    def __post_init__(self) -> None:
        check_all(self)

    def capacity(self, population: int) -> int:
        if self.size > population:
            raise InputError(f"clients per round must be between 1 and the number of clients, {population}; given: {self.size}")
        return self.size

    def draw(self, key: Array, population: int) -> tuple[Array, Array | None]:
        return without_replacement(key, population, self.size), None


@dataclass(frozen=True)
class Bernoulli(Participation):
    """Each client independently with the given probability.

    Room is kept for six standard deviations more than expected; a larger draw, fewer than one in 10⁸, is cut
    to that.
    """

    probability: float = real(REQUIRED, "of taking part", above=0, most=1)

    def __post_init__(self) -> None:
        check_all(self)

    def capacity(self, population: int) -> int:
        p = self.probability
        return min(population, math.ceil(population * p + 6 * math.sqrt(population * p * (1 - p)) + 6))

    def draw(self, key: Array, population: int) -> tuple[Array, Array | None]:
        members, coins = split(key)
        capacity = self.capacity(population)
        count = jax.random.bernoulli(coins, self.probability, (population,)).sum()
        return without_replacement(members, population, capacity), jnp.arange(capacity) < jnp.maximum(count, 1)


@dataclass(frozen=True)
class Dropouts(Participation):
    """Members of another draw, each of whom drops out before answering with the given probability."""

    among: Participation
    probability: float = real(REQUIRED, "of dropping out", least=0, below=1)

    def __post_init__(self) -> None:
        require_participation("Dropouts: among", self.among)
        check_all(self)

    def capacity(self, population: int) -> int:
        return self.among.capacity(population)

    def draw(self, key: Array, population: int) -> tuple[Array, Array | None]:
        members, coins = split(key)
        ids, active = self.among.draw(members, population)
        luck = jax.random.uniform(coins, ids.shape)
        luck = luck if active is None else jnp.where(active, luck, -1.0)
        return ids, (luck >= self.probability) | (jnp.arange(len(ids)) == jnp.argmax(luck))


def require_participation(name: str, value: object) -> None:
    """Raise `InputError` unless it says how cohorts are drawn."""
    require(isinstance(value, Participation), name, "an instance such as Uniform(5) or Everyone()", value)


def present(wanted: Array | None, there: Array | None) -> Array | None:
    """Which members of a cohort take part: those wanted and present, or all wanted if none is present; None: all."""
    if wanted is None or there is None:
        return there if wanted is None else wanted
    both = wanted & there
    return jnp.where(both.any(), both, wanted)


def without_replacement(key: Array, population: int, size: int) -> Array:
    """`size` different numbers below `population` in uniformly random order.

    Small samples of large populations are drawn by Floyd's algorithm, whose cost does not grow with the
    population (Bentley and Floyd, 1987).
    """
    if population <= 32 * size:
        return permutation(key, population)[:size]
    chosen_key, order_key = split(key)
    tops = population - size + jnp.arange(size)
    candidates = jax.random.randint(chosen_key, (size,), 0, tops + 1)

    def choose(j: Array, chosen: Array) -> Array:
        return chosen.at[j].set(jnp.where((chosen == candidates[j]).any(), tops[j], candidates[j]))

    chosen = lax.fori_loop(0, size, choose, jnp.full(size, -1, candidates.dtype))
    return jax.random.permutation(order_key, chosen)
