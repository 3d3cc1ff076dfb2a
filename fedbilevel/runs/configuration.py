"""The full, resolved description of a run: what its folder stores, and what repeats or resumes it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax

from fedbilevel.aggregations import AGGREGATIONS
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.devices import require_devices
from fedbilevel.errors import InputError
from fedbilevel.own_code import is_ours, label
from fedbilevel.registry import find, in_full, require_known
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.simulation import simulation
from fedbilevel.settings import configure
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.base import Task, TaskSettings, suited_to
from fedbilevel.tasks.client_data import ClientData, built
from fedbilevel.tasks.data.datasets import SETS, folder_of
from fedbilevel.tasks.validation import with_validation
from fedbilevel.user_files import Scalar, fitted

ROUND_TIMEOUT = 300.0  # seconds
# by name, the value that runs of version 0.1 had
NEWER_OPTIONS = {"aggregate": "mean", "attack": "", "privacy": "", "arrivals": ""}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Names and plain values only, so that it can be stored and read back."""

    task: str
    knobs: Mapping[str, Scalar]
    algorithm: str
    hyperparameters: Mapping[str, Scalar]
    options: RunOptions
    data: str = ""  # folder of the data set, if it is not bundled
    federation: str = ""  # folder of the federation that runs it; simulated if there is none
    round_timeout: float = ROUND_TIMEOUT  # seconds after which a federation continues without a site that has not answered
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.federation and self.options.chunk_size is not None:
            raise InputError("a chunk size is for simulated clients: leave it out with a federation")
        if self.federation and self.options.products != "default":
            raise InputError("products is for simulated clients: leave it out with a federation")
        if self.federation and self.options.attack:
            raise InputError("an attack is for simulated clients: leave it out with a federation")
        if self.federation and self.options.arrivals:
            raise InputError("arrivals are for simulated clients: leave them out with a federation")
        if self.federation and self.options.keep_best:
            raise InputError("keep_best needs rows that only simulated clients hold out: leave it out with a federation")
        if self.federation and self.options.validation:
            raise InputError("validation rows are for simulated clients: leave them out with a federation")

    @classmethod
    def resolve(
        cls,
        task: str,
        knobs: Mapping[str, Any],
        algorithm: str,
        hyperparameters: Mapping[str, Any],
        options: RunOptions,
        *,
        data: str = "",
        federation: str = "",
        round_timeout: float = ROUND_TIMEOUT,
    ) -> Configuration:
        """A configuration with every default filled in; a task's settings for an algorithm override its defaults."""
        task, algorithm = in_full(TASKS, task), in_full(ALGORITHMS, algorithm)
        entry = find(TASKS, "task", task)
        suited = suited_to(entry.load().suited, label(task), label(algorithm))
        knobs = dataclasses.asdict(entry.configure(label(task), knobs))
        chosen = find(ALGORITHMS, "algorithm", algorithm).configure(label(algorithm), {**suited.values, **hyperparameters})
        hyperparameters = dataclasses.asdict(chosen)
        data = _data_folder(knobs.get("dataset", ""), data)
        options = options.otherwise(entry.run)
        return cls(task, knobs, algorithm, hyperparameters, options, data, federation, round_timeout, _precision())

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Configuration:
        """The configuration from what `plain` returned; `InputError` if it is anything else."""
        own = {field.name for field in dataclasses.fields(cls)} - {"options"}
        options = {name: value for name, value in values.items() if name not in own}
        read = fitted({**{name: values[name] for name in own & values.keys()}, "options": options}, cls)
        require_known(TASKS, read.task)
        require_known(ALGORITHMS, read.algorithm)
        if read.task in TASKS.bundled:
            TASKS[read.task].configure(read.task, read.knobs)
        if read.algorithm in ALGORITHMS.bundled:
            read.configured_algorithm()
        return read

    def plain(self) -> dict[str, Any]:
        """A flat dictionary for JSON, run options included."""
        values = dataclasses.asdict(self)
        options = values.pop("options")
        if options["weights"] is None:
            del options["weights"]  # as in runs from before there was a choice, whose checkpoints name this description
        for newer in ("validation", "keep_best"):
            if not options[newer]:
                del options[newer]  # likewise
        return {**options, **values}

    def fingerprint(self) -> str:
        """A hash that is equal exactly when configurations are; options newer than version 0.1 count if they are in use."""
        values = {name: value for name, value in self.plain().items() if (name, value) not in NEWER_OPTIONS.items()}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def experiment(self, data: ClientData | None = None) -> Experiment:
        """The simulated experiment that it describes; where the clients' data is elsewhere, `data` says so."""
        if self.precision != _precision():
            raise InputError(
                f"this run is in {self.precision} and JAX is set up for {_precision()}: set JAX_ENABLE_X64 as it was"
            )
        return simulation(self.built_task(data), self.configured_algorithm(), **vars(self.options))

    def built_task(self, data: ClientData | None = None) -> Task:
        """The task with its knobs, its data, the run's weights and its validation rows."""
        cls = self.task_class()
        where = self.data if data is None or (is_ours(cls) and self.task_settings().columns is None) else data
        make = _validated if self.options.validation else _built
        return make(cls, label(self.task), tuple(self.knobs.items()), where, self.options.weights)

    def configured_algorithm(self) -> Algorithm:
        """The algorithm with its hyperparameters."""
        return find(ALGORITHMS, "algorithm", self.algorithm).configure(label(self.algorithm), self.hyperparameters)

    def names(self) -> tuple[str, str, str]:
        """The names of its task, its algorithm and its aggregation."""
        return self.task, self.algorithm, self.options.rule()

    def task_class(self) -> type[TaskSettings]:
        """The class of its task, whose fields are the knobs."""
        return find(TASKS, "task", self.task).load()

    def task_settings(self) -> Any:
        """Its task with the knobs."""
        return configure(self.task_class(), label(self.task), self.knobs)

    def packages(self) -> list[str]:
        """The other packages that offer its task, its algorithm or its aggregation."""
        tables = TASKS, ALGORITHMS, AGGREGATIONS
        entries = (table.get(name) for table, name in zip(tables, self.names(), strict=True))
        return [entry.package for entry in entries if entry is not None and entry.package]


def _data_folder(name: str, given: str) -> str:
    """The full path of a task's data set, so that a resumed run finds it whatever the environment is then."""
    return str(folder_of(name, given)) if name in SETS and SETS[name].get else given


def _precision() -> str:
    require_devices()
    return jax.numpy.zeros(()).dtype.name


@functools.lru_cache(maxsize=1)
def _built(
    cls: type[TaskSettings], name: str, knobs: tuple[tuple[str, Any], ...], data: str | ClientData, weights: str | None
) -> Task:
    """The task, built once for all algorithms that are compared on it."""
    settings = configure(cls, name, dict(knobs))
    task = settings.build(data) if isinstance(data, str) else built(settings, data)
    return task if weights is None else dataclasses.replace(task, population=task.population.weighted(weights))


@functools.lru_cache(maxsize=1)
def _validated(cls: type[TaskSettings], *how: Any) -> Task:
    """The task with validation rows, likewise."""
    return with_validation(_built(cls, *how), cls.headline, cls.better)
