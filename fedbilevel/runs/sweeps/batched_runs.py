"""Experiments that differ only in their algorithm's real numbers and their seed, run as one vectorised program.

Each has the trajectory that it would have alone, except for rounding, since sums are taken in another order. One that
diverges stands still while the others continue. On a CPU each core has its own program, since one program of small runs
does not keep all cores busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core import randomness
from fedbilevel.core.traffic import Totals
from fedbilevel.engines.engine import UNLIMITED, Limits, Step, Stretch, advance
from fedbilevel.engines.simulated import SimulatedEngine, revealed
from fedbilevel.errors import Diverged, InputError
from fedbilevel.runs.experiment import Experiment, Numbers, Snapshot
from fedbilevel.runs.simulation import simulated

COPIES = 16  # of a client's part of the state: what a step may hold at once, to estimate memory
WORTH_A_PROGRAM = 4  # runs
FINISHED, DIVERGED = "finished", "diverged"


class Outcome(NamedTuple):
    """The numbers of a run along the way, and how it ended."""

    rows: list[dict[str, float | None]]
    status: str  # FINISHED or DIVERGED
    reason: str = ""  # of divergence


def bytes_of(experiment: Experiment) -> int:
    """A generous estimate of the memory that one experiment takes besides the data."""
    task, engine = experiment.task, simulated(experiment)
    shapes = engine.state_shapes(experiment.algorithm, task.x, task.y, randomness.key(0))
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    cohort = engine.participation.capacity(engine.population.size)
    return COPIES * state * min(cohort, experiment.options.chunk_size or cohort)


def run_together(experiments: Sequence[Experiment], observe: Callable[[int], None] = lambda rounds: None) -> list[Outcome]:
    """Run all to their ends; `observe` is called with the fewest rounds of the runs in a program that have not ended."""
    first = experiments[0]
    if len({(jax.tree.structure(e.algorithm), replace(e.options, seed=0)) for e in experiments}) > 1:
        raise InputError("experiments that run together may differ only in their algorithm's real numbers and their seeds")
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
    engine, task = simulated(first), first.task
    algorithms = jax.tree.map(  # weakly typed, as a number is in a run alone, so that x and y keep their precision
        lambda *leaves: jnp.stack([jnp.asarray(float(v)) for v in leaves]), *(e.algorithm for e in experiments)
    )
    keys = jnp.stack([randomness.key(e.options.seed) for e in experiments])

    states, traffic, _ = _start(engine, algorithms, task.x, task.y, keys)
    traffic = jax.device_get(traffic)
    runs = [_Run(e, Totals().plus(_row(traffic, k))) for k, e in enumerate(experiments)]
    steps = np.zeros(len(runs), np.int32)
    last = jnp.int32(UNLIMITED if first.options.steps is None else first.options.steps)

    def advanced(pause: Array) -> Stretch:
        due = jnp.asarray([run.rounds_until_due() for run in runs], jnp.int32)
        budget = jnp.asarray([run.budget() for run in runs], jnp.int32)
        return _advance(engine, algorithms, states, jnp.asarray(steps), keys, Limits(due, budget, pause, last))

    task.evaluate_each(states.x, revealed(states.y))
    advanced(jnp.int32(0))  # both compile
    began = time.perf_counter()
    while True:
        values = jax.device_get(task.evaluate_each(states.x, revealed(states.y)))
        for k, run in enumerate(runs):
            if run.due:
                run.note(int(steps[k]), (time.perf_counter() - began) / len(runs), _row(values, k))
        running = [run for run in runs if run.status is None]
        if not running:
            return [Outcome(run.rows, run.status or FINISHED, run.reason) for run in runs]
        observe(min(run.totals.rounds for run in running))
        made = advanced(last)
        states, made = made.state, jax.device_get(made._replace(state=None))
        steps = made.step
        for k, run in enumerate(runs):
            run.advanced(_row(made, k))


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
    """One of the experiments in progress."""

    def __init__(self, experiment: Experiment, totals: Totals):
        self.experiment, self.totals, self.due = experiment, totals, True
        self.rows: list[dict[str, float | None]] = []
        self.status: str | None = None
        self.reason = ""
        self._more = True
        self._reported: Numbers = {}

    def rounds_until_due(self) -> int:
        every = self.experiment.options.every
        return (self.totals.rounds // every + 1) * every - self.totals.rounds

    def budget(self) -> int:
        """The rounds that it may still take: none once it has ended."""
        if self.status is not None:
            return -1
        rounds = self.experiment.options.rounds
        return UNLIMITED if rounds is None else rounds - self.totals.rounds

    def advanced(self, made: Stretch) -> None:
        """Note what a stretch has done."""
        self.due = self.status is None
        if not self.due:
            return
        self.totals, self._more, self._reported = (
            self.totals.plus(made.traffic),
            bool(made.more),
            self.experiment.reported(made),
        )
        if not made.finite:
            moment = Snapshot(None, int(made.step), self.totals, 0.0)
            self._diverge(self.experiment.advice(moment, "a number is not finite"))

    def note(self, step: int, seconds: float, values: dict[str, Any]) -> None:
        """Note the metrics of a moment."""
        if self.status is not None:
            return
        moment = Snapshot(None, step, self.totals, seconds, reported=self._reported)
        try:
            self.rows.append(self.experiment.with_metrics(moment, values).row())
        except Diverged as error:
            self._diverge(str(error))
        if self.status is None and not self._more:
            self.status = FINISHED

    def _diverge(self, reason: str) -> None:
        self.status, self.reason = DIVERGED, reason


@jax.jit
def _start(engine: SimulatedEngine, algorithms: Any, x: Array, y: Array, keys: Array) -> Step:
    return jax.vmap(lambda algorithm, key: engine.init(algorithm, x, y, jax.random.fold_in(key, 0)))(algorithms, keys)


@jax.jit
def _advance(engine: SimulatedEngine, algorithms: Any, states: Any, steps: Array, keys: Array, limits: Limits) -> Stretch:
    each = Limits(due=0, budget=0, pause=cast(Any, None), last=cast(Any, None))
    return jax.vmap(advance, (None, 0, 0, 0, 0, each))(engine, algorithms, states, steps, keys, limits)


def _row(stacked: Any, k: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[k], stacked)
