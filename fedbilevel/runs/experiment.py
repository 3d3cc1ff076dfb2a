"""One run: an algorithm on a task, in compiled stretches of steps, with metrics every so many rounds.

The trajectory is a function of the experiment alone: step t takes its randomness from (seed, t), so where
stretches end, and whether the run was stopped and resumed in between, changes no bit of it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from fedbilevel.algorithms import called
from fedbilevel.algorithms.base import Algorithm, require_algorithm
from fedbilevel.core import randomness
from fedbilevel.core.clients import PerClient, server_floats
from fedbilevel.core.devices import out_of_memory
from fedbilevel.core.problem import LOSSES, Tree
from fedbilevel.core.randomness import fold_in
from fedbilevel.core.traffic import Totals, Traffic
from fedbilevel.engines.engine import ABSENCES, UNLIMITED, Engine, Limits, Stretch
from fedbilevel.errors import Diverged, InputError, NotFinite, in_one_line
from fedbilevel.runs.ending import Result
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.spending import EPSILON, Spending
from fedbilevel.runs.stretches import StretchLength
from fedbilevel.tasks.base import Task, unusable

COUNTERS = ("step", "rounds", "floats_up", "floats_down", "bytes_up", "bytes_down", "seconds")
Numbers = dict[str, float | None]  # by name; None: not finite


class Snapshot(NamedTuple):
    """A moment of a run: what the server holds, and what it took to get there; with metrics if they are due."""

    state: Any
    step: int
    totals: Totals
    seconds: float  # since the first step, without compilation
    metrics: Numbers | None = None
    reported: Numbers = {}  # noqa: RUF012 (never modified) what the algorithm reported about the last step

    def row(self) -> Numbers:
        """The numbers of this moment, by name."""
        counters = dict(zip(COUNTERS, (self.step, *self.totals, self.seconds), strict=True))
        return {**counters, **(self.metrics or {}), **self.reported}


BEFORE = Snapshot(None, 0, Totals(), 0.0)  # before the run starts


@dataclass(frozen=True)
class Experiment:
    """What to run, who takes its steps, and how."""

    task: Task
    algorithm: Algorithm
    engine: Engine
    options: RunOptions
    spending: Spending | None = None  # of the clients' privacy, if it is bounded

    def __post_init__(self) -> None:
        task, kind = self.task, type(self.algorithm)
        require_algorithm(self.algorithm)
        task.require_kind(self.algorithm)
        self.engine.require(task, self.algorithm)
        if self.options.keep_best and task.own_x:
            raise InputError("keep_best is for an x that all clients share, and here each has its own: leave it out")
        task.population.problem.check(task.x, task.y, task.population.some_rows())
        taken = {*COUNTERS, *Result.__annotations__, ABSENCES, EPSILON, *self.algorithm.diagnostics()}
        for name in taken.intersection(task.metric_names()):
            raise unusable(name, f"a run of {called(self.algorithm)} has that name for something else")
        start, first = kind.rounds_to_start, int(self.engine.rounds(self.algorithm, self._key(1)))
        rounds = self.options.rounds
        if rounds is not None and rounds < start + first:
            raise InputError(
                f"{rounds} rounds are too few for {called(self.algorithm)}: it starts with {start}, and a step takes {first}"
            )

    def varied(self, algorithm: Algorithm, seed: int) -> Experiment:
        """The same with other real numbers in its algorithm and another seed, which change nothing that was checked."""
        other = copy.copy(self)
        object.__setattr__(other, "algorithm", algorithm)
        object.__setattr__(other, "options", replace(self.options, seed=seed))
        return other

    def caveats(self) -> list[str]:
        """What the algorithm assumes but the run does not satisfy, a sentence each."""
        kind, bias = type(self.algorithm), self.algorithm.bias(self.task.population, self.engine.participation)
        found = [*self.task.notes, *([bias] if bias else [])]
        if kind.needs_strong_convexity and not self.task.strongly_convex:
            found.append(
                f"{called(self.algorithm)} assumes a lower level that is strongly convex in y, and this task's is not: "
                "its guarantees do not hold here."
            )
        return found

    def point(self, moment: Snapshot) -> dict[str, Tree]:
        """x and y at a moment, as the user's trees; without what the clients keep."""
        x, y = self.engine.point(moment.state)
        return self.trees(x, y)

    def trees(self, x: Any, y: Any) -> dict[str, Tree]:
        """The same from x and y as the engine holds them."""
        known = {"x": (self.task.x_tree, x), "y": (self.task.y_tree, y)}
        return {name: tree(at) for name, (tree, at) in known.items() if not isinstance(at, PerClient)}

    def saved(self, moment: Snapshot) -> list[np.ndarray]:
        """A moment's state as arrays, for a checkpoint."""
        return self.engine.save(moment.state, moment.step)

    def restored(self, arrays: list[np.ndarray]) -> Any:
        """The state from what `saved` returned; `InputError` if the arrays do not belong to this run. May raise `Diverged`."""
        with self._explained(BEFORE):
            return self.engine.restore(arrays, self.algorithm, self.task.x, self.task.y, self._key(0))

    def run(self, start: Snapshot | None = None) -> Iterator[Snapshot]:
        """The moments of the run up to its end; from `start` on if that is given.

        There is one about every quarter of a second, and one whenever metrics are due. Raises `Diverged`.
        """
        options = self.options
        if start is None:
            with self._explained(BEFORE):
                state, traffic, _ = self.engine.start(self.algorithm, self.task.x, self.task.y, self._key(0))
                first = Snapshot(state, 0, Totals().plus(Traffic.of(traffic)), 0.0)
                first = self.with_metrics(first, self.engine.evaluate(self.task, state))
            yield first
            start = first._replace(metrics=None)
        key, stretch = randomness.key(options.seed), StretchLength()
        last = UNLIMITED if options.steps is None else options.steps
        with self._explained(start):
            self.engine.advance(self.algorithm, start.state, start.step, key, Limits(1, 1, start.step, last))  # compiles
        moment, before, began, more = start, start.seconds, time.perf_counter(), True
        while more:
            called, rounds = time.perf_counter(), moment.totals.rounds
            due = (rounds // options.every + 1) * options.every
            budget = UNLIMITED if options.rounds is None else options.rounds - rounds
            limits = Limits(due - rounds, budget, stretch.end(moment.step, last), last)
            with self._explained(moment):
                made = self.engine.advance(self.algorithm, moment.state, moment.step, key, limits)
                step, more = int(made.step), bool(made.more)
            now = time.perf_counter()
            stretch.took(step - moment.step, now - called)
            reported = self.reported(made) if step > moment.step else moment.reported
            moment = Snapshot(made.state, step, moment.totals.plus(made.traffic), before + now - began, None, reported)
            if not made.finite:
                refused = self.engine.refusal(moment.state)
                raise self._diverged(moment, refused or f"{_not_finite(moment.state)} not finite")
            if not more or moment.totals.rounds >= due:
                with self._explained(moment):
                    moment = self.with_metrics(moment, self.engine.evaluate(self.task, moment.state))
            yield moment

    def require_finite_start(self) -> None:
        """Raise `InputError` if a loss is not finite at the task's own start."""
        _require_finite(numbers(self.task.evaluate(*self.task.start)))

    def _key(self, step: int) -> Array:
        return fold_in(randomness.key(self.options.seed), step)

    @contextlib.contextmanager
    def _explained(self, moment: Snapshot) -> Iterator[None]:
        """Inside, a value that is not finite on its way to or from clients is divergence, and a lack of memory is named."""
        try:
            yield
        except NotFinite as error:
            raise self._diverged(moment, str(error)) from None
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            raise InputError(
                f"{called(self.algorithm)} needs more memory here than the device has: compute fewer clients at once "
                f"(chunk_size), or give smaller minibatches ({in_one_line(error)})"
            ) from None

    def reported(self, made: Stretch) -> Numbers:
        """What the algorithm says about the last step of a stretch, and the numbers of its schedule there."""
        return numbers({**made.reported, **self.algorithm.scheduled_at(int(made.step))})

    def with_metrics(self, moment: Snapshot, values: Mapping[str, Any]) -> Snapshot:
        """The moment with these metrics; raises `Diverged` if a loss is above the bound."""
        metrics, bound = numbers(values), self.options.loss_bound
        if self.spending is not None:
            metrics[EPSILON] = self.spending.epsilon(moment.step, moment.totals.rounds)
        if moment.step == 0:
            _require_finite(metrics)
        for name in LOSSES:
            loss = float(values[name])
            if not loss <= bound:
                what = f"{name} is {loss:.3g}, above the bound of {bound:.3g}"
                if moment.step == 0:
                    raise Diverged(f"{what}, before the first step: raise the loss bound, scale the data or start elsewhere")
                raise self._diverged(moment, what)
        return moment._replace(metrics=metrics)

    def _diverged(self, moment: Snapshot, what: str) -> Diverged:
        return Diverged(self.advice(moment, what), moment.seconds)

    def advice(self, moment: Snapshot, what: str) -> str:
        """The message about a run that has diverged."""
        sizes = ", ".join(f"{name} = {value:g}" for name, value in self.algorithm.step_sizes(moment.step).items())
        return (
            f"{called(self.algorithm)} diverged at round {moment.totals.rounds} (step {moment.step}): {what}. "
            f"In force: {sizes}. Try steps three to ten times smaller, that of y first, or fewer local steps."
        )


def numbers(values: Mapping[str, Any]) -> Numbers:
    """The values as plain numbers; None where one is not finite."""
    return {name: float(value) if math.isfinite(value) else None for name, value in values.items()}


def _require_finite(metrics: Numbers) -> None:
    for name in LOSSES:
        if metrics[name] is None:
            raise InputError(
                f"{name} is not finite at the start: check the data for values that are not finite, or start elsewhere"
            )


def _not_finite(state: Any) -> str:
    names = [name for name, leaf in server_floats(state) if not np.isfinite(leaf).all()]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
