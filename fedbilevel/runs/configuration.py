"""The full, resolved description of a run: what its folder stores, and what repeats or resumes it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.participation import Bernoulli, Dropouts, Everyone, Participation, Uniform
from fedbilevel.errors import InputError
from fedbilevel.registry import find
from fedbilevel.runs.experiment import Experiment
from fedbilevel.settings import configure
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.base import Task, suited_to
from fedbilevel.tasks.data.datasets import SETS, folder_of


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Names and plain values only, so that it can be written down and read back."""

    task: str
    knobs: Mapping[str, Any]
    algorithm: str
    hyperparameters: Mapping[str, Any]
    rounds: int | None = None
    steps: int | None = None
    clients_per_round: int | None = None
    bernoulli: float | None = None
    dropout: float | None = None
    seed: int = 0
    every: int = 10
    chunk_size: int | None = None
    products: str = "default"
    loss_bound: float = 1e6
    data: str = ""  # folder of the data set, if it is not bundled
    federation: str = ""  # folder of the federation that runs it; simulated if there is none
    round_timeout: float = 300.0  # seconds after which a federation goes on without a site that has not answered
    precision: str = "float32"

    @classmethod
    def resolve(
        cls, task: str, knobs: Mapping[str, Any], algorithm: str, hyperparameters: Mapping[str, Any], **rest: Any
    ) -> Configuration:
        """With every default filled in; a task's own settings for an algorithm go before the algorithm's defaults."""
        entry = find(TASKS, "task", task)
        suited = suited_to(entry.load().suited, task, algorithm)
        knobs = dataclasses.asdict(entry.configure(task, knobs))
        hyperparameters = dataclasses.asdict(
            find(ALGORITHMS, "algorithm", algorithm).configure(algorithm, {**suited.values, **hyperparameters})
        )
        if rest.get("bernoulli") is None:
            rest = {**rest, **{name: value for name, value in entry.run.items() if rest.get(name) is None}}
        rest["data"] = _data_folder(knobs.get("dataset", ""), rest.get("data", ""))
        return cls(task, knobs, algorithm, hyperparameters, precision=_precision(), **rest)

    def plain(self) -> dict[str, Any]:
        """As a dictionary for JSON."""
        return dataclasses.asdict(self)

    def fingerprint(self) -> str:
        """Equal for equal configurations alone."""
        return hashlib.sha256(json.dumps(self.plain(), sort_keys=True).encode()).hexdigest()

    def participation(self) -> Participation:
        """How cohorts are drawn."""
        if self.clients_per_round is not None and self.bernoulli is not None:
            raise InputError("give either clients per round or a probability to take part, not both")
        chosen: Participation = Everyone()
        if self.clients_per_round is not None:
            chosen = Uniform(self.clients_per_round)
        if self.bernoulli is not None:
            chosen = Bernoulli(self.bernoulli)
        return chosen if self.dropout is None else Dropouts(chosen, self.dropout)

    def experiment(self) -> Experiment:
        """What it describes, ready to run."""
        if self.precision != _precision():
            raise InputError(
                f"this run is in {self.precision} and JAX is set up for {_precision()}: set JAX_ENABLE_X64 as it was"
            )
        return Experiment(
            _built(self.task, tuple(self.knobs.items()), self.data),
            find(ALGORITHMS, "algorithm", self.algorithm).configure(self.algorithm, self.hyperparameters),
            rounds=self.rounds,
            steps=self.steps,
            participation=self.participation(),
            seed=self.seed,
            every=self.every,
            chunk_size=self.chunk_size,
            products=self.products,
            loss_bound=self.loss_bound,
        )


def _data_folder(name: str, given: str) -> str:
    """Where a task's data set is now, in full, so that a run finds it whatever the environment is when it goes on."""
    return str(folder_of(name, given)) if name in SETS and SETS[name].get else given


def _precision() -> str:
    return jax.numpy.zeros(()).dtype.name


@functools.lru_cache(maxsize=1)
def _built(name: str, knobs: tuple[tuple[str, Any], ...], data: str) -> Task:
    """One task for all algorithms that are compared on it."""
    return configure(find(TASKS, "task", name).load(), name, dict(knobs)).build(data)
