"""Experiments that differ in their algorithm's real numbers and in their seed alone, run as one vectorised program.

Each has the trajectory that it has alone, but for the rounding of sums in another order. One that diverges stands still
while the others go on. A CPU's cores, which one program of small runs does not keep busy, have a program each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core import randomness
from fedbilevel.core.traffic import Totals
from fedbilevel.engines.simulated import Simulator
from fedbilevel.errors import Diverged, InputError
from fedbilevel.runs.experiment import UNLIMITED, Experiment, Snapshot, advance, begin, revealed

COPIES = 16  # of a client's part of the state that a step may hold at once, for the estimate of memory
WORTH_A_PROGRAM = 4  # runs
FINISHED, DIVERGED = "finished", "diverged"


class Outcome(NamedTuple):
    """The numbers of a run along the way, and how it ended."""

    rows: list[dict[str, float | None]]
    status: str  # FINISHED or DIVERGED
    reason: str = ""  # of divergence


def bytes_of(experiment: Experiment) -> int:
    """A generous estimate of the memory that one experiment takes beside the data."""
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(experiment.state_shapes()))
    cohort = experiment.participation.capacity(experiment.task.population.size)
    return COPIES * state * min(cohort, experiment.chunk_size or cohort)


def run_together(experiments: Sequence[Experiment], observe: Callable[[int], None] = lambda rounds: None) -> list[Outcome]:
    """Run all to their ends; `observe` is told the fewest rounds that any still running in a program has made."""
    first = experiments[0]
    if len({(jax.tree.structure(e.algorithm), e.rounds, e.steps, e.every) for e in experiments}) > 1:
        raise InputError("experiments that run together may differ in their algorithm's real numbers and in their seed alone")
    if any(e.task is not first.task for e in experiments):
        raise InputError("experiments that run together must have one and the same task")
    cores = os.cpu_count() or 1 if jax.default_backend() == "cpu" else 1
    count = min(cores, -(-len(experiments) // WORTH_A_PROGRAM))
    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(lambda k: _one_program(experiments[k::count], observe), range(count)))
    return [parts[k % count][k // count] for k in range(len(experiments))]


def _one_program(experiments: Sequence[Experiment], observe: Callable[[int], None]) -> list[Outcome]:
    first = experiments[0]
    if len(experiments) == 1:
        return [_alone(first, observe)]
    simulator, task, began = first.simulator, first.task, time.perf_counter()
    algorithms = jax.tree.map(
        lambda *leaves: jnp.stack([jnp.asarray(v, float) for v in leaves]), *(e.algorithm for e in experiments)
    )
    keys = jnp.stack([randomness.key(e.seed) for e in experiments])

    states, traffic = _begin(simulator, algorithms, task.x, task.y, keys)
    traffic = jax.device_get(traffic)
    runs = [_Run(e, Totals().plus(_row(traffic, k))) for k, e in enumerate(experiments)]
    steps = np.zeros(len(runs), np.int32)
    while True:
        values = jax.device_get(task.evaluate_each(states.x, revealed(states.y)))
        for k, run in enumerate(runs):
            if run.due:
                run.note(Snapshot(None, int(steps[k]), run.totals, (time.perf_counter() - began) / len(runs)), _row(values, k))
        running = [run for run in runs if run.status is None]
        if not running:
            return [Outcome(run.rows, run.status or FINISHED, run.reason) for run in runs]
        observe(min(run.totals.rounds for run in running))
        due = jnp.asarray([run.rounds_until_due() for run in runs], jnp.int32)
        budget = jnp.asarray([run.budget() for run in runs], jnp.int32)
        last = jnp.int32(UNLIMITED if first.steps is None else first.steps)
        states, new_steps, traffic, finite, more = _advance(
            simulator, algorithms, states, jnp.asarray(steps), keys, due, budget, last
        )
        steps, traffic, finite, more = jax.device_get((new_steps, traffic, finite, more))
        for k, run in enumerate(runs):
            run.advanced(_row(traffic, k), int(steps[k]), bool(finite[k]), bool(more[k]))


def _alone(experiment: Experiment, observe: Callable[[int], None]) -> Outcome:
    rows = []
    try:
        for moment in experiment.run():
            observe(moment.totals.rounds)
            if moment.metrics is not None:
                rows.append(moment.row())
    except Diverged as error:
        return Outcome(rows, DIVERGED, str(error))
    return Outcome(rows, FINISHED)


class _Run:
    """One of the experiments under way."""

    def __init__(self, experiment: Experiment, totals: Totals):
        self.experiment, self.totals, self.due = experiment, totals, True
        self.rows: list[dict[str, float | None]] = []
        self.status: str | None = None
        self.reason = ""
        self._more = True

    def rounds_until_due(self) -> int:
        every = self.experiment.every
        return (self.totals.rounds // every + 1) * every - self.totals.rounds

    def budget(self) -> int:
        """The rounds that it may still make: none once it has ended."""
        if self.status is not None:
            return -1
        return UNLIMITED if self.experiment.rounds is None else self.experiment.rounds - self.totals.rounds

    def advanced(self, traffic: Any, step: int, finite: bool, more: bool) -> None:
        """Note what a stretch has done."""
        self.due = self.status is None
        if not self.due:
            return
        self.totals, self._more = self.totals.plus(traffic), more
        if not finite:
            self._diverge(self.experiment.advice(Snapshot(None, step, self.totals, 0.0), "a number is not finite"))

    def note(self, moment: Snapshot, values: dict[str, Any]) -> None:
        """Note the metrics of a moment."""
        if self.status is not None:
            return
        try:
            self.rows.append(self.experiment.with_metrics(moment, values).row())
        except Diverged as error:
            self._diverge(str(error))
        if self.status is None and not self._more:
            self.status = FINISHED

    def _diverge(self, reason: str) -> None:
        self.status, self.reason = DIVERGED, reason


@jax.jit
def _begin(simulator: Simulator, algorithms: Any, x: Array, y: Array, keys: Array) -> Any:
    one = lambda algorithm, key: begin(simulator, algorithm, x, y, jax.random.fold_in(key, 0))  # noqa: E731
    return jax.vmap(one)(algorithms, keys)


@jax.jit
def _advance(
    simulator: Simulator, algorithms: Any, states: Any, steps: Array, keys: Array, due: Array, budget: Array, last: Array
) -> Any:
    axes = (None, 0, 0, 0, 0, 0, 0, None, None)
    return jax.vmap(advance, axes)(simulator, algorithms, states, steps, keys, due, budget, last, last)


def _row(stacked: Any, k: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[k], stacked)
