"""What a site insists on, whatever a server asks of it: the `[policy]` of its `site.toml`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.algorithms import called
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core import ground_truth, randomness
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.devices import require_memory
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.engines.answer_times import AnswerTimes
from fedbilevel.engines.call_shapes import EVALUATING, CallShapes, Shape
from fedbilevel.errors import InputError
from fedbilevel.runs.duration import in_words, largest_array, work
from fedbilevel.settings import nearest

REFUSABLE = ("gather",)


@dataclass(frozen=True)
class SitePolicy:
    """The conditions on which a site takes part."""

    secure_sum: bool = False  # what leaves the site does so in secure sums alone
    at_least: int = 0  # the fewest sites in such a sum
    most_weight: float = 0.75  # the largest share of the weights that one site has in such a sum
    refuse: Sequence[str] = ()  # gather: algorithms whose server needs single answers
    least_batch_size: int = 0  # rows in a minibatch; without minibatches all rows count
    least_rows: int = 0  # behind any answer: those of each loss, of what is held out, and of a minibatch
    epsilon: float | None = None  # of all that its rows are ever asked for: then runs must keep them private
    delta: float = 1e-5
    ledger: str = "../privacy"  # the folder of what they have been asked for, and of the secret; relative to site.toml
    colluding: int | None = None  # members whose noise an attacker may know, where the noise of sums is the sites' own
    memory: float = 4.0  # GB that the data may take which a run's knobs ask for, any array of an answer, and values kept
    seconds: float = 600.0  # that answers to one request may take by an optimistic estimate, whatever hyperparameters ask for

    def __post_init__(self) -> None:
        for name, unit in (("memory", "gigabytes"), ("seconds", "seconds")):
            if not getattr(self, name) > 0:
                raise InputError(f"policy: {name} must be a number of {unit} above 0; given: {getattr(self, name):g}")
        if self.epsilon is not None and not (self.epsilon > 0 and 0 < self.delta < 1):
            raise InputError(f"policy: epsilon must be above 0 and delta between 0 and 1; given: {self.epsilon}, {self.delta}")
        for name in ("at_least", "least_batch_size", "least_rows", "colluding"):
            if (getattr(self, name) or 0) < 0:
                raise InputError(f"policy: {name} must be a whole number of at least 0; given: {getattr(self, name)}")
        if self.at_least and self._least_colluding >= self.at_least:
            raise InputError(f"policy: at_least must be above the {self._least_colluding} colluding; given: {self.at_least}")
        if not 0 < self.most_weight <= 1:
            raise InputError(f"policy: most_weight must be above 0 and at most 1; given: {self.most_weight:g}")
        for name in self.refuse:
            if name not in REFUSABLE:
                raise InputError(f"policy: there is nothing to refuse called {name!r}{nearest(name, REFUSABLE)}")

    def agree_to_open_sums(self) -> None:
        """Raise `InputError` if the site's own sums, from which tables are preprocessed alike, must not be seen alone."""
        if self.secure_sum or self.at_least:
            raise InputError("this site insists on secure sums, but tables are preprocessed from each site's own sums: refused")
        if self.epsilon is not None:
            raise InputError("this site insists on privacy, but tables are preprocessed from its exact sums: refused")

    def agree(self, algorithm: Algorithm, rule: Aggregation, private_rows: bool = False) -> None:
        """Raise `InputError` unless a run of this algorithm with this aggregation, its rows private or not, is as agreed."""
        if self.epsilon is not None and not private_rows:
            self._agree_noise_in_sums(rule, self.epsilon)
        if (self.secure_sum or self.at_least) and not rule.hides:
            raise InputError(f"this site insists on secure sums, but the run's aggregation is {type(rule).__name__}: refused")
        least = rule.settings().get("at_least", 0)
        if least < self.at_least:
            raise InputError(
                f"this site insists on sums over at least {self.at_least} sites, but the run's are over {least}: refused"
            )
        if rule.clients_add_noise and (known := rule.settings()["colluding"]) < self._least_colluding:
            raise InputError(
                f"this site insists on noise that is enough if colluding = {self._least_colluding} members know theirs, but "
                f"the run has {known}: refused"
            )
        if "gather" in self.refuse and algorithm.single_answers:
            raise InputError(
                f"this site refuses gather, but the server of {called(algorithm)} needs what each site sends: refused"
            )

    def agree_weights(self, rule: Aggregation, weights: Sequence[float]) -> None:
        """Raise `InputError` if a secure sum can be over so few sites that it nearly is the answer of one that weighs much."""
        if not (self.secure_sum or self.at_least) or not rule.hides or not weights:
            return
        *others, largest = sorted(weights)
        least = rule.settings()["at_least"]
        whole = largest + sum(others[: least - 1])
        share = largest / whole if whole else math.nan
        if min(weights) < 0 or not share <= self.most_weight:
            raise InputError(
                f"this site allows one site {self.most_weight:g} of a secure sum's weights, and in the run's one of {least} "
                f"can have {share:.3g}: refused"
            )

    @property
    def _least_colluding(self) -> int:
        """With a budget, at least one member knows its own noise."""
        return self.colluding if self.colluding is not None else int(self.epsilon is not None)

    def _agree_noise_in_sums(self, rule: Aggregation, wanted: float) -> None:
        """Raise `InputError` unless the noise in a run's sums, which others add as well, is the privacy that the site wants."""
        insists = f"this site insists on privacy of its rows (ε = {wanted:g} in all)"
        if not rule.clients_add_noise:
            raise InputError(f"{insists}, which the run does not have: add --epsilon, or use private-sum if it takes that")
        if not (self.secure_sum and self.at_least):
            raise InputError(
                f"{insists}, and takes noise in sums for it only where its owner has set secure_sum and "
                "at_least too: add --epsilon instead"
            )

    def agree_fewest(self, rows: int) -> None:
        """Raise `InputError` unless so many rows suffice behind an answer."""
        if rows < self.least_rows:
            raise InputError(f"this site insists on at least {self.least_rows} rows behind an answer: refused")

    def agree_rows(self, own: Population) -> None:
        """Raise `InputError` unless answers from this population of one meet the conditions."""
        batch, levels = own.batch_size, [shards for shards in (own.upper, own.lower, own.test) if shards is not None]
        if batch is not None and batch < self.least_batch_size:
            raise InputError(f"this site insists on batch_size >= {self.least_batch_size}, but the run has {batch}: refused")
        if min(int(shards.size[0]) for shards in (own.upper, own.lower)) < self.least_batch_size:
            raise InputError(f"this site insists on minibatches of {self.least_batch_size} rows, but a loss has fewer: refused")
        self.agree_fewest(min([int(shards.size[0]) for shards in levels] + ([] if batch is None else [batch])))
        for shards in levels:
            require_memory("a minibatch", (batch or 0) * shards.row_bytes(), "lower batch_size")

    def agree_work(self, algorithm: Algorithm, own: Population, shapes: CallShapes, number: int) -> AnswerTimes:
        """How long answers of client `number` take; `InputError` if one would take too long, or an array too much memory.

        Nothing is computed.
        """
        seconds: dict[tuple[str, Shape], float] = {}
        for name, found in shapes.items():
            answer = _metrics if name == EVALUATING else partial(_answer, algorithm, name, np.int32(number))
            for shape in found:
                program = jax.make_jaxpr(answer)(own, randomness.key(0), shape.arguments.empty()).jaxpr
                needed = work(program, rounds=1 if name == EVALUATING else None).seconds()
                self._agree_seconds(name, needed)
                if name != EVALUATING:
                    require_memory(f"an array of {name}", largest_array(program), "lower the hyperparameters")
                seconds[name, shape.arguments] = needed
        return AnswerTimes(self.seconds, seconds)

    def _agree_seconds(self, name: str, needed: float) -> None:
        """Raise `InputError` if an answer would take too long."""
        if needed <= self.seconds:
            return
        if needed == math.inf:
            raise InputError(
                f"{name} has a loop whose length is not known before it runs, and this site allows answers of "
                f"{in_words(self.seconds)}: give the loop a bound, or have the site's policy say seconds = inf"
            )
        raise InputError(
            f"an answer of {name} would take {in_words(needed)} or more here, and this site allows {in_words(self.seconds)}: "
            "lower the hyperparameters or the knobs that say how much clients compute"
        )


def _answer(algorithm: Algorithm, name: str, number: Any, own: Population, key: Array, args: tuple) -> Tree:
    """The client's number is no traced value: the lengths of loops may follow from it."""
    return getattr(algorithm, name)(own.alone(key, jnp.ones(()), number), *args)


def _metrics(own: Population, key: Array, point: tuple) -> tuple[Array, Array]:
    return ground_truth.metrics(own, *point), ground_truth.tests(own, *point)
