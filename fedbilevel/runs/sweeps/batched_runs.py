"""Experiments that differ only in their algorithm's real numbers and their seed, run as one vectorised program.

Each has the trajectory that it would have alone, except for rounding, since sums are taken in another order. One that
diverges stands still while the others continue. On a CPU each core has its own program, since one program of small runs
does not keep all cores busy.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core import randomness
from fedbilevel.core.devices import out_of_memory
from fedbilevel.core.traffic import Totals
from fedbilevel.engines.engine import UNLIMITED, Limits, Step, Stretch, advance
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import Diverged, InputError
from fedbilevel.runs.experiment import Experiment, Numbers, Snapshot
from fedbilevel.runs.simulation import simulated
from fedbilevel.runs.stretches import StretchLength

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


class Ended(NamedTuple):
    """How a run ended, and where, so that it can go on with more rounds; nowhere if it diverged."""

    outcome: Outcome
    at: Snapshot | None
    seconds: float  # of computing since its start: its share of its program's, however early it diverged


Observe = Callable[[int], None]
Starts = Sequence[Snapshot | None]  # for each run the moment that it continues from; None: its beginning


def run_together(experiments: Sequence[Experiment], observe: Observe = lambda rounds: None) -> list[Outcome]:
    """Run all to their ends; `observe` is called with the fewest rounds of the runs that have not ended."""
    return [ended.outcome for ended in continue_together(experiments, [None] * len(experiments), observe)]


def continue_together(experiments: Sequence[Experiment], starts: Starts, observe: Observe = lambda rounds: None) -> list[Ended]:
    """Run all from their starts to their ends; the outcomes have the rows from there on.

    What is too large for the device's memory is run in halves.
    """
    first = experiments[0]
    if len({(jax.tree.structure(e.algorithm), replace(e.options, seed=0)) for e in experiments}) > 1:
        raise InputError("experiments that run together may differ only in their algorithm's real numbers and their seeds")
    if any(e.task is not first.task for e in experiments):
        raise InputError("experiments that run together must have one and the same task")
    try:
        return in_programs(experiments, starts, observe)
    except jax.errors.JaxRuntimeError as error:
        if len(experiments) == 1 or not out_of_memory(error):
            raise
    count, reached = len(experiments), 0  # outside of the handler, since the error holds on to what was in memory
    half = count // 2

    def first_half(rounds: int) -> None:
        nonlocal reached
        reached = rounds
        observe(rounds * half // count)

    ended = continue_together(experiments[:half], starts[:half], first_half)
    return ended + continue_together(
        experiments[half:], starts[half:], lambda rounds: observe((reached * half + rounds * (count - half)) // count)
    )


def in_programs(experiments: Sequence[Experiment], starts: Starts, observe: Observe) -> list[Ended]:
    """The same at once, in a program for each core of a CPU, and in one on other devices."""
    cores = available_cores() if jax.default_backend() == "cpu" else 1
    count = min(cores, -(-len(experiments) // WORTH_A_PROGRAM))
    reached: list[float] = [0] * count

    def observed(k: int, rounds: float) -> None:
        reached[k] = rounds
        if (least := min(reached)) < math.inf:
            observe(int(least))

    def program(k: int) -> list[Ended]:
        ended = _one_program(experiments[k::count], starts[k::count], partial(observed, k))
        reached[k] = math.inf
        return ended

    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(program, range(count)))
    return [parts[k % count][k // count] for k in range(len(experiments))]


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_program(experiments: Sequence[Experiment], starts: Starts, observe: Observe) -> list[Ended]:
    first = experiments[0]
    if len(experiments) == 1:
        return [_alone(first, starts[0], observe)]
    engine, task = simulated(first), first.task
    algorithms = jax.tree.map(  # weakly typed, as a number is in a run alone, so that x and y keep their precision
        lambda *leaves: jnp.stack([jnp.asarray(float(v)) for v in leaves]), *(e.algorithm for e in experiments)
    )
    keys = jnp.stack([randomness.key(e.options.seed) for e in experiments])
    runs, states = _begun(engine, experiments, starts, algorithms, keys)
    steps = np.asarray([0 if start is None else start.step for start in starts], np.int32)
    last = UNLIMITED if first.options.steps is None else first.options.steps

    def advanced(pause: int) -> Stretch:
        due = jnp.asarray([run.rounds_until_due() for run in runs], jnp.int32)
        budget = jnp.asarray([run.budget() for run in runs], jnp.int32)
        limits = Limits(due, budget, jnp.int32(pause), jnp.int32(last))
        return _advance(engine, algorithms, states, jnp.asarray(steps), keys, limits)

    def note(seconds: float) -> None:
        """Evaluate all, and note the metrics of those that are due."""
        values = jax.device_get(task.evaluate_each(*engine.point(states)))
        for k, run in enumerate(runs):
            run.note(int(steps[k]), seconds / len(runs), _row(values, k))

    note(0.0)
    advanced(0)  # both have been compiled
    began, spent, stretch = time.perf_counter(), 0.0, StretchLength()
    while running := [run for run in runs if run.status is None]:
        observe(min(run.totals.rounds for run in running))
        moving = [k for k, run in enumerate(runs) if run.status is None and not run.due]
        called, least = time.perf_counter(), int(steps[moving].min())
        made = advanced(stretch.end(least, last))
        states, made = made.state, jax.device_get(made._replace(state=None))
        stretch.took(int(made.step[moving].min()) - least, time.perf_counter() - called)
        steps = made.step
        for k, run in enumerate(runs):
            run.advanced(_row(made, k))
        if all(
            run.due for run in running if run.status is None
        ):  # who is due waits for the last, so that all are evaluated once
            note(time.perf_counter() - began)
        spent = time.perf_counter() - began
    states = jax.device_get(states)
    return [run.ended(_row(states, k), int(steps[k]), spent / len(runs)) for k, run in enumerate(runs)]


def _begun(
    engine: SimulatedEngine, experiments: Sequence[Experiment], starts: Starts, algorithms: Any, keys: Array
) -> tuple[list[_Run], Any]:
    """The runs, and their states stacked: those of the starts, and the first states where there is no start."""
    task = experiments[0].task
    known = {k: start for k, start in enumerate(starts) if start is not None}
    if len(known) == len(starts):
        states: Any = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(start.state for start in known.values()))
        return [_Run(e, known[k].totals, known[k]) for k, e in enumerate(experiments)], states
    states, traffic, _ = _start(engine, algorithms, task.x, task.y, keys)
    traffic = jax.device_get(traffic)
    runs = [_Run(e, Totals().plus(_row(traffic, k)), known.get(k)) for k, e in enumerate(experiments)]
    for k, start in known.items():
        states = jax.tree.map(lambda leaf, own: leaf.at[k].set(own), states, start.state)
    return runs, states


def _alone(experiment: Experiment, start: Snapshot | None, observe: Observe) -> Ended:
    rows, moment, before = [], start, start.seconds if start else 0.0
    try:
        for moment in experiment.run(start):
            observe(moment.totals.rounds)
            if moment.metrics is not None:
                rows.append(moment.row())
    except Diverged as error:
        return Ended(Outcome(rows, DIVERGED, str(error)), None, error.seconds - before)
    assert moment is not None
    return Ended(Outcome(rows, FINISHED), moment, moment.seconds - before)


class _Run:
    """One of the experiments in progress."""

    def __init__(self, experiment: Experiment, totals: Totals, start: Snapshot | None):
        self.experiment, self.totals, self.due = experiment, start.totals if start else totals, start is None
        self.rows: list[dict[str, float | None]] = []
        self.status: str | None = None
        self.reason = ""
        self._before = self._seconds = start.seconds if start else 0.0
        self._more = True
        self._reported: Numbers = dict(start.reported) if start else {}

    def rounds_until_due(self) -> int:
        """The rounds up to its next row: none while that waits to be evaluated."""
        every = self.experiment.options.every
        return 0 if self.due else (self.totals.rounds // every + 1) * every - self.totals.rounds

    def budget(self) -> int:
        """The rounds that it may still take: none once it has ended."""
        if self.status is not None:
            return -1
        rounds = self.experiment.options.rounds
        return UNLIMITED if rounds is None else rounds - self.totals.rounds

    def advanced(self, made: Stretch) -> None:
        """Note what a stretch has done."""
        if self.status is not None or self.due:
            return
        until_due = self.rounds_until_due()
        self.totals, self._more = self.totals.plus(made.traffic), bool(made.more)
        if made.traffic.rounds:
            self._reported = self.experiment.reported(made)
        self.due = not self._more or int(made.traffic.rounds) >= until_due
        if not made.finite:
            moment = Snapshot(None, int(made.step), self.totals, 0.0)
            self._diverge(self.experiment.advice(moment, "a number is not finite"))

    def note(self, step: int, seconds: float, values: dict[str, Any]) -> None:
        """Note the metrics of a moment, if they are due."""
        if self.status is not None or not self.due:
            return
        self.due, self._seconds = False, self._before + seconds
        try:
            self.rows.append(self.experiment.with_metrics(self._moment(None, step), values).row())
        except Diverged as error:
            self._diverge(str(error))
        if self.status is None and not self._more:
            self.status = FINISHED

    def ended(self, state: Any, step: int, seconds: float) -> Ended:
        """How it ended, where, and in how many seconds of computing."""
        outcome = Outcome(self.rows, self.status or FINISHED, self.reason)
        return Ended(outcome, None if self.status == DIVERGED else self._moment(state, step), seconds)

    def _moment(self, state: Any, step: int) -> Snapshot:
        return Snapshot(state, step, self.totals, self._seconds, reported=self._reported)

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
