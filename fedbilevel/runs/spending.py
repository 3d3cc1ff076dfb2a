"""What a run costs its clients in privacy: ε after any step, from the calls that each step makes.

Which client functions a step calls, and at which clients, depends on its key alone, so it is the same for both engines. The
number is for the client that is asked most often, as if it had the fewest rows: no client's is larger, unless sites stand in
for others. Who takes part is taken to be known to everybody: to draw few clients makes them be asked less often, and no more.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.aggregations.private import PrivateClients
from fedbilevel.algorithms import called
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core import randomness
from fedbilevel.core.privacy import LOWER, MOST_NOISE, UPPER, RowPrivacy
from fedbilevel.core.privacy_accounting import Event, Events, calibrated_noise, epsilon, events_of, of_evaluations
from fedbilevel.core.private_tasks import require_private
from fedbilevel.core.randomness import fold_in, split
from fedbilevel.core.release_counts import Releases, most_released
from fedbilevel.engines.call_shapes import EVALUATING, call_shapes
from fedbilevel.engines.engine import recalled
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.runs.options import RunOptions
from fedbilevel.tasks.base import Task
from fedbilevel.user_files import naming

EPSILON = "epsilon"  # the metric
STEPS_AT_ONCE = 64


class Calls:
    """How often each client function has been called at the client that is called most, after any step of a run."""

    def __init__(self, task: Task, algorithm: Algorithm, engine: SimulatedEngine, seed: int):
        shapes = call_shapes(algorithm, engine.population, task.x, task.y)
        self.names = [name for name in shapes if name != EVALUATING]
        self.shapes = {name: [shape.arguments.empty() for shape in shapes[name]] for name in self.names}
        key = randomness.key(seed)
        state = engine.state_shapes(algorithm, task.x, task.y, key)

        def start() -> Array:
            return engine.calls(self.names, lambda clients: algorithm.init(task.x, task.y, clients), fold_in(key, 0))

        def step(number: Array) -> tuple[Array, Array]:
            server, clients = split(fold_in(key, number))
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), recalled(state)[0])
            made = engine.calls(self.names, lambda clients: algorithm.step(zeros, clients, server), clients)
            return made, jnp.asarray(engine.rounds(algorithm, fold_in(key, number)))

        self._steps = jax.jit(lambda first: lax.map(step, first + jnp.arange(STEPS_AT_ONCE)))
        self._each = np.asarray(jax.jit(start)(), np.int64)  # (functions, clients) so far
        self._most, self._rounds = [self._each.max(1)], [type(algorithm).rounds_to_start]

    def at(self, step: int) -> dict[str, int]:
        """The calls up to a step, by client function."""
        self._count_to(step)
        return dict(zip(self.names, map(int, self._most[step]), strict=True))

    def end(self, options: RunOptions) -> tuple[int, int]:
        """The last step of a run, and the rounds until then."""
        if options.steps is not None:
            self._count_to(options.steps)
            return options.steps, self._rounds[options.steps]
        assert options.rounds is not None
        while self._rounds[-1] <= options.rounds:
            self._count_to(len(self._rounds))
        last = next(step for step in range(len(self._rounds)) if self._rounds[step + 1] > options.rounds)
        return last, self._rounds[last]

    def _count_to(self, step: int) -> None:
        while len(self._most) <= step:
            for made, rounds in zip(*jax.tree.map(np.asarray, self._steps(len(self._most))), strict=True):
                self._each = self._each + made
                self._most.append(self._each.max(1))
                self._rounds.append(self._rounds[-1] + int(rounds))


class Spending(Protocol):
    """What a run costs in privacy."""

    def epsilon(self, step: int, rounds: int) -> float:
        """ε after a step and so many rounds."""

    def planned(self) -> dict[str, int]:
        """How often each client function is called in the whole run, and how often metrics are evaluated."""


@dataclass(frozen=True)
class ClientSpending:
    """The ε of a run whose means have noise, at the level of clients."""

    calls: Calls
    options: RunOptions
    wanted: PrivateClients

    @functools.cached_property
    def rule(self) -> PrivateClients:
        """The rule with the noise."""
        if self.wanted.epsilon is None:
            return self.wanted
        end = self.calls.end(self.options)

        def events(noise: float) -> Events:
            return self._events(min(noise, MOST_NOISE), *end)

        noise = calibrated_noise(self.wanted.epsilon, self.wanted.delta, events)
        return replace(self.wanted, epsilon=None, noise=min(noise, MOST_NOISE))

    def epsilon(self, step: int, rounds: int) -> float:
        """See `Spending`."""
        return epsilon(self._events(self.rule.multiplier, step, rounds), self.rule.delta)

    def planned(self) -> dict[str, int]:
        """See `Spending`."""
        return _planned(self.calls, self.options)

    def _events(self, noise: float, step: int, rounds: int) -> Events:
        events = Counter({Event(1.0, noise): sum(self.calls.at(step).values())})
        if self.wanted.counted_metric_noise is not None:
            events[Event(1.0, self.wanted.counted_metric_noise)] += _evaluations(self.options, rounds)
        return events


@dataclass(frozen=True)
class RowSpending:
    """The ε of a run whose clients have at least so many rows, with noise that is calibrated to its length."""

    calls: Calls
    releases: Mapping[str, Releases]  # of a call, by client function
    options: RunOptions
    batch_size: int | None
    rows: Mapping[str, int]

    @functools.cached_property
    def privacy(self) -> RowPrivacy:
        """How rows are kept private, with the noise."""
        wanted, end = self.options.row_privacy(), self.calls.end(self.options)
        assert wanted is not None
        if wanted.epsilon is None:
            return wanted

        def noisy(noise: float) -> RowPrivacy:
            return replace(wanted, epsilon=None, noise=min(noise, MOST_NOISE))

        return noisy(calibrated_noise(wanted.epsilon, wanted.delta, lambda noise: self._events(noisy(noise), *end)))

    def epsilon(self, step: int, rounds: int) -> float:
        """ε after a step and so many rounds."""
        return epsilon(self._events(self.privacy, step, rounds), self.privacy.delta)

    def planned(self) -> dict[str, int]:
        """See `Spending`."""
        return _planned(self.calls, self.options)

    def _events(self, privacy: RowPrivacy, step: int, rounds: int) -> Events:
        made = events_of(released(self.releases, self.calls.at(step)), privacy, self.rows, self.batch_size)
        return made + of_evaluations(privacy, _evaluations(self.options, rounds))


def _planned(calls: Calls, options: RunOptions) -> dict[str, int]:
    last, rounds = calls.end(options)
    return {**calls.at(last), EVALUATING: _evaluations(options, rounds)}


def _evaluations(options: RunOptions, rounds: int) -> int:
    return rounds // options.every + 2  # at the start, when due, and at the end


def released(each: Mapping[str, Releases], calls: Mapping[str, int]) -> Releases:
    """What so many calls of client functions release together."""
    made: Releases = Counter()
    for name, count in calls.items():
        for release, times in each.get(name, Counter()).items():
            made[release] += count * times
    return made


def with_privacy(
    task: Task, algorithm: Algorithm, engine: SimulatedEngine, options: RunOptions
) -> tuple[SimulatedEngine, Spending | None]:
    """The engine with noise that is calibrated to the run, and what the run costs; unchanged if nothing is to be private."""
    rows, rule = options.row_privacy(), engine.aggregation
    if options.keep_best and (rows is not None or isinstance(rule, PrivateClients)):
        raise InputError("keep_best chooses by rows without noise, which no ε covers: leave it out of a private run")
    if rows is not None and isinstance(rule, PrivateClients):
        raise InputError("a run is private at the level of rows or of clients: leave out either the privacy or the aggregation")
    if rows is not None:
        return _with_private_rows(task, algorithm, engine, options, rows)
    if isinstance(rule, PrivateClients):
        calls = Calls(task, algorithm, replace(engine, aggregation=replace(rule, epsilon=None, noise=1.0)), options.seed)
        spending = ClientSpending(calls, options, rule)
        return replace(engine, aggregation=spending.rule), spending
    return engine, None


def _with_private_rows(
    task: Task, algorithm: Algorithm, engine: SimulatedEngine, options: RunOptions, wanted: RowPrivacy
) -> tuple[SimulatedEngine, RowSpending]:
    population = engine.population
    if algorithm.pooled:
        name = called(algorithm)
        raise InputError(f"{name} pools all rows in one client, which privacy of rows does not cover: choose another algorithm")
    require_private(population, task.x, task.y)

    def private(how: RowPrivacy) -> SimulatedEngine:
        return replace(engine, population=replace(population, privacy=how))

    with naming(called(algorithm)):  # which the user may not have chosen
        calls = Calls(task, algorithm, private(replace(wanted, epsilon=None, noise=1.0)), options.seed)
        releases: dict[str, Releases] = {name: Counter() for name in calls.names}
        for name, shapes in calls.shapes.items():
            for arguments in shapes:
                function = getattr(algorithm, name)
                releases[name] |= most_released(function, arguments, population.size, population.batch_size is None)
    fewest = {UPPER: int(population.upper.size.min()), LOWER: int(population.lower.size.min())}
    spending = RowSpending(calls, releases, options, population.batch_size, fewest)
    return private(spending.privacy), spending
