"""Experiments whose clients are simulated in this process."""

from __future__ import annotations

from typing import Any

import jax

from fedbilevel.algorithms.base import Algorithm, require_algorithm
from fedbilevel.core.participation import Everyone, Participation
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.options import RunOptions
from fedbilevel.tasks.base import Task

CACHED = 16_000_000  # bytes: a hundred clients of 600 KB each take 1.6 times as long at once as in four parts


def simulation(task: Task, algorithm: Algorithm, *, participation: Participation | None = None, **options: Any) -> Experiment:
    """An experiment on simulated clients: one with all rows for a centralised method.

    The options are those of `RunOptions`; any `Participation` may stand in for its three that say who takes part.
    """
    require_algorithm(algorithm)
    checked = RunOptions(**options)
    drawn = participation or checked.participation()
    drawn.capacity(task.population.size)
    if algorithm.pooled:
        engine = SimulatedEngine(task.population.pooled(), Everyone(), products=checked.products)
    else:
        engine = SimulatedEngine(task.population, drawn, checked.chunk_size or _chunk(task), checked.products)
    return Experiment(task, algorithm, engine, checked)


def simulated(experiment: Experiment) -> SimulatedEngine:
    """The experiment's engine; `InputError` if its clients are not simulated."""
    if not isinstance(experiment.engine, SimulatedEngine):
        raise InputError("only simulated experiments can be counted or run together")
    return experiment.engine


def _chunk(task: Task) -> int | None:
    """As many clients at once as a CPU's cache holds points of; other devices take all at once."""
    if jax.default_backend() != "cpu":
        return None
    return max(1, CACHED // ((task.x.size + task.y.size) * task.x.dtype.itemsize))
