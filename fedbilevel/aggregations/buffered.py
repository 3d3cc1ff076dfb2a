"""A mean that does not wait for slow sites: of the first k answers, with late ones counted in a later mean by their age.

J. Nguyen, K. Malik, H. Zhan, A. Yousefpour, M. Rabbat, M. Malek and D. Huba, Federated Learning with Buffered Asynchronous
Aggregation (FedBuff), AISTATS 2022, for exchanges of any algorithm that bears it.

An exchange asks the clients of a cohort that have nothing else to do, and goes on when k of them have answered, or all. The
others are no longer in the cohort. Their answers come when they come, and the next mean of the same client function takes
them in. If an answer h_i was asked for a exchanges of that function ago, when answers were near a point z_i, and they are near
z now, it counts as z + h_i - z_i (a direction, which is near no point, as it is), with s_i = 1 / √(1 + a) times the weight of
one that is in time: with all that came, in time or late, the mean is

    z + Σ_i (M / Σ_j s_j) w_i s_i (h_i - z_i),    for equal weights with factors s_i / Σ_j s_j.

Answers older than `oldest` are dropped. If k is the size of the cohort, this is the mean that waits for all, to the last bit.
"""

from __future__ import annotations

import math
from typing import ClassVar

from jax import Array

from fedbilevel.core.aggregation import Aggregation, Mean, aggregation
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.settings import count


@aggregation
class Buffered(Aggregation):
    """The mean of the first answers, and of late ones."""

    streams: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    buffers: ClassVar[bool] = True

    first: int = count(2, "k, answers that an exchange waits for")
    oldest: int = count(10, "a late answer's greatest age, in exchanges of its client function; an older one is dropped")

    def share(self, age: int) -> float:
        """s, how much an answer of that age counts."""
        return 1 / math.sqrt(1 + age)

    def require(self, population: Population, participation: Participation) -> None:
        super().require(population, participation)
        size = participation.capacity(population.size)
        if self.first > size:
            raise InputError(f"first must be at most {size}, the clients of a round; given: {self.first}")

    def require_algorithm(self, algorithm: str, single_answers: bool, late_answers: bool) -> None:
        if not late_answers:
            raise InputError(
                f"{algorithm} needs the answers of an exchange together, and Buffered counts late ones in another: choose mean"
            )

    def combine(self, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        return Mean().combine(weights, rows, around, key)
