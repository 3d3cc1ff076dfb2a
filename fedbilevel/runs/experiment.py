"""One run: an algorithm on a task, in compiled stretches of steps, with metrics every so many rounds.

The trajectory is a function of the experiment alone: step t takes its randomness from (seed, t), so where
stretches end, and whether the run was stopped and resumed in between, changes no bit of it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.base import Algorithm, require_algorithm
from fedbilevel.core import randomness
from fedbilevel.core.clients import PerClient
from fedbilevel.core.devices import copied_everywhere
from fedbilevel.core.participation import Everyone, Participation
from fedbilevel.core.problem import LOSSES
from fedbilevel.core.randomness import fold_in
from fedbilevel.core.sets import UNCONSTRAINED
from fedbilevel.core.traffic import Totals, Traffic
from fedbilevel.engines.simulated import PRODUCTS, Rows, Simulator
from fedbilevel.errors import Diverged, InputError, NotFinite
from fedbilevel.tasks.base import Task

CACHED = 16_000_000  # bytes: a hundred clients of 600 KB each take 1.6 times as long at once as in four parts
STRETCH_SECONDS = 0.25  # how long a compiled stretch runs before the host looks at it
UNLIMITED = 2**31 - 1
COUNTERS = ("step", "rounds", "floats_up", "floats_down", "seconds")


class Engine(Protocol):
    """Who takes an experiment's steps: simulated clients, in compiled stretches, or real ones behind a transport."""

    def init(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> tuple[Any, Traffic | Totals]:
        """The algorithm's first state, and what it took to communicate."""

    def step(self, algorithm: Algorithm, state: Any, key: Array) -> tuple[Any, Traffic | Totals]:
        """The state after one outer step, and what it took to communicate."""

    def rounds(self, algorithm: Algorithm, key: Array) -> Array | int:
        """The rounds that the step with this key takes, by the algorithm's own formula."""

    def repeat(self, goes_on: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
        """`carry` after `body` was applied while `goes_on`."""


class Federation(Engine, Protocol):
    """Real clients, whose data and own values the server cannot see."""

    def evaluate(self, state: Any) -> dict[str, float]:
        """The losses at a state on the clients' data, and what else is to be said about the rounds since the last time."""

    def save(self, state: Any, step: int) -> Any:
        """The state as arrays for a checkpoint, once the clients have made their own parts durable."""

    def saved_shapes(self, shapes: Any) -> Any:
        """The shapes of what `save` gives, from those of a simulated state."""

    def restored(self, saved: Any, shapes: Any, start: Callable[[], Any]) -> Any:
        """The state from what `save` gave; `start()` is the run's first one, for clients that never saved theirs."""


class Snapshot(NamedTuple):
    """A run between two steps; `metrics` where they were due."""

    state: Any
    step: int
    totals: Totals
    seconds: float
    metrics: dict[str, float | None] | None = None

    def row(self) -> dict[str, float | None]:
        """The numbers of this moment, by name."""
        return {**dict(zip(COUNTERS, (self.step, *self.totals, self.seconds), strict=True)), **(self.metrics or {})}


@dataclass(frozen=True)
class Experiment:
    """What to run. Exactly one of `rounds`, a budget of round trips, and `steps`, of outer steps, is given."""

    task: Task
    algorithm: Algorithm
    rounds: int | None = None
    steps: int | None = None
    participation: Participation = Everyone()
    seed: int = 0
    every: int = 10  # rounds between two metrics
    chunk_size: int | None = None  # clients computed at once; None: all of a round, on a CPU as many as its cache holds
    products: str = "default"  # the arithmetic of matrix products in simulated steps, one of `simulate.PRODUCTS`
    loss_bound: float = 1e6
    federation: Federation | None = None  # takes the steps; they are simulated if there is none

    def __post_init__(self) -> None:
        if (self.rounds is None) == (self.steps is None):
            raise InputError("give either a budget of rounds or a number of steps")
        for name in ("rounds", "steps", "every", "chunk_size"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and 1 <= value <= UNLIMITED):
                raise InputError(f"{name} must be a whole number from 1 to {UNLIMITED}; given: {value}")
        if self.products not in PRODUCTS:
            raise InputError(f"products must be one of {', '.join(PRODUCTS)}; given: {self.products}")
        if self.products != "default" and (self.federation is not None or self.task.x.dtype != jnp.float32):
            raise InputError(f"products={self.products} is for simulated clients in single precision: leave it out")
        if not self.loss_bound > 0:
            raise InputError(f"the loss bound must be above 0; given: {self.loss_bound}")
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**32):
            raise InputError(f"seed must be a whole number from 0 to 2³² - 1; given: {self.seed}")
        task, kind = self.task, type(self.algorithm)
        require_algorithm(self.algorithm)
        if kind.lower_level != task.lower_level:
            raise InputError(
                f"{kind.__name__} is for a {kind.lower_level} lower level and the task has a {task.lower_level} one: choose "
                f"one of {', '.join(n for n, e in ALGORITHMS.items() if e.load().lower_level == task.lower_level)}"
            )
        if task.population.problem.sets != UNCONSTRAINED and not kind.constrained:
            raise InputError(
                f"{kind.__name__} does not keep x and y in given sets: choose an algorithm that projects (MeFBO), "
                "or drop the constraints"
            )
        self.participation.capacity(task.population.size)
        task.population.problem.check(task.x, task.y, task.population.first_rows())
        start, first = kind.rounds_to_start, int(self.simulator.rounds(self.algorithm, self._key(1)))
        if self.federation is not None and getattr(self.algorithm, "pooled", False):
            raise InputError(
                f"{kind.__name__} pools the data of all clients, and a federation's stay where they are: simulate it"
            )
        if self.rounds is not None and self.rounds < start + first:
            raise InputError(
                f"{self.rounds} rounds are too few for {kind.__name__}: it starts with {start}, and a step takes {first}"
            )

    @property
    def simulator(self) -> Simulator:
        """The federation that the run simulates: of one client with all data, for a centralised method."""
        if getattr(self.algorithm, "pooled", False):
            return Simulator(self.task.population.pooled(), Everyone(), products=self.products)
        return Simulator(self.task.population, self.participation, self.chunk_size or self._chunk(), self.products)

    def _chunk(self) -> int | None:
        """As many clients at once as a CPU's cache holds points of; other devices take all at once."""
        if jax.default_backend() != "cpu":
            return None
        return max(1, CACHED // ((self.task.x.size + self.task.y.size) * self.task.x.dtype.itemsize))

    def caveats(self) -> list[str]:
        """What the algorithm assumes and the task does not fulfil, a sentence each."""
        kind = type(self.algorithm)
        if kind.needs_strong_convexity and not self.task.strongly_convex:
            return [
                f"{kind.__name__} assumes a lower level that is strongly convex in y, and this task's is not: "
                "its guarantees do not hold here."
            ]
        return []

    def state_shapes(self) -> Any:
        """Shapes and dtypes of the run's states, without computing one."""
        return jax.eval_shape(begin, self.simulator, self.algorithm, self.task.x, self.task.y, self._key(0))[0]

    def saved(self, state: Any, step: int) -> list[np.ndarray]:
        """A state's arrays, for a checkpoint."""
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.federation.save(state, step) if self.federation else state)]

    def restored(self, arrays: list[np.ndarray]) -> Any:
        """The state from what `saved` gave; `InputError` if those are not arrays of this run's. May raise `Diverged`."""
        federation, simulated = self.federation, self.state_shapes()
        shapes, structure = jax.tree.flatten(federation.saved_shapes(simulated) if federation else simulated)
        if [(a.shape, a.dtype) for a in arrays] != [(s.shape, s.dtype) for s in shapes]:
            raise InputError("arrays of other shapes or precision than this run's: set JAX up as it was")
        state = jax.tree.unflatten(structure, [jnp.asarray(a) for a in arrays])
        if federation is None:
            return state
        init = partial(federation.init, self.algorithm, self.task.x, self.task.y, self._key(0))
        with self._finite(Snapshot(None, 0, Totals(), 0.0)):
            return federation.restored(state, simulated, lambda: init()[0])

    def run(self, start: Snapshot | None = None) -> Iterator[Snapshot]:
        """The moments of the run, the last one at its end; from `start` on if that is given.

        There is one about every quarter of a second, and one wherever metrics are due. Raises `Diverged`.
        """
        engine: Engine = self.federation or copied_everywhere(self.simulator)
        start_with, go_on = (begin, advance) if self.federation else (_begin, _advance)
        evaluate = self._evaluation()
        began = time.perf_counter()
        if start is None:
            with self._finite(Snapshot(None, 0, Totals(), 0.0)):
                state, traffic = start_with(engine, self.algorithm, self.task.x, self.task.y, self._key(0))
                first = Snapshot(state, 0, Totals().plus(traffic), time.perf_counter() - began)
                first = self.with_metrics(first, evaluate(state))
            yield first
            start = Snapshot(state, 0, Totals().plus(traffic), 0.0)
        state, step, totals, before, _ = start
        alone = jax.process_count() == 1  # several processes must all make the same calls, however long those take
        key, stretch, calls = randomness.key(self.seed), 1 if alone else UNLIMITED, 0
        while True:
            called = time.perf_counter()
            due = (totals.rounds // self.every + 1) * self.every
            budget = UNLIMITED if self.rounds is None else self.rounds - totals.rounds
            last = UNLIMITED if self.steps is None else self.steps
            with self._finite(Snapshot(state, step, totals, before)):
                state, new_step, traffic, finite, more = go_on(
                    engine, self.algorithm, state, step, key, due - totals.rounds, budget, min(step + stretch, last), last
                )
            new_step, more = int(new_step), bool(more)
            now = time.perf_counter()
            totals = totals.plus(traffic)
            moment = Snapshot(state, new_step, totals, before + now - began)
            if not finite:
                raise Diverged(self.advice(moment, f"{_not_finite(state)} not finite"))
            if calls and alone:  # the first call compiles
                pace = (new_step - step) / (now - called + 1e-6)
                stretch = max(1, min(2 * stretch, int(pace * STRETCH_SECONDS)))
            calls, ended, step = calls + 1, not more, new_step
            if ended or totals.rounds >= due:
                with self._finite(moment):
                    moment = self.with_metrics(moment, evaluate(state))
            yield moment
            if ended:
                return

    def _key(self, step: int) -> Array:
        return fold_in(randomness.key(self.seed), step)

    def _evaluation(self) -> Callable[[Any], Mapping[str, Any]]:
        """The metrics of a state: what its clients' data says, and what the task says about (x, y)."""
        task, federation = self.task, self.federation
        if federation is None:
            return lambda state: task.evaluate(state.x, revealed(state.y))
        known = jax.jit(known_at_server(task))
        return lambda state: {**federation.evaluate(state), **known(state.x, None if held(state.y) else state.y)}

    @contextlib.contextmanager
    def _finite(self, moment: Snapshot) -> Iterator[None]:
        """Within it, a value that is not finite on its way to or from clients is divergence."""
        try:
            yield
        except NotFinite as error:
            raise Diverged(self.advice(moment, str(error))) from None

    def with_metrics(self, moment: Snapshot, values: Mapping[str, Any]) -> Snapshot:
        """The moment with these metrics; raises `Diverged` where a loss is above the bound."""
        metrics: dict[str, float | None] = {}
        for name, value in values.items():
            if np.shape(value) != () or name in COUNTERS:
                raise InputError(f"the metric {name!r} must be one number, under a name that is not a counter's")
            number = float(value)
            metrics[name] = number if math.isfinite(number) else None
            if name in LOSSES and metrics[name] is None and moment.step == 0:
                raise InputError(f"{name} is not finite at the start: look for such values in the data, or start elsewhere")
            if name in LOSSES and not number <= self.loss_bound:
                raise Diverged(self.advice(moment, f"{name} is {number:.3g}, above the bound of {self.loss_bound:.3g}"))
        return moment._replace(metrics=metrics)

    def advice(self, moment: Snapshot, what: str) -> str:
        """What to say of a run that diverges."""
        sizes = ", ".join(f"{name} = {value:g}" for name, value in self.algorithm.step_sizes(moment.step).items())
        return (
            f"{type(self.algorithm).__name__} diverged at round {moment.totals.rounds} (step {moment.step}): {what}. "
            f"In force: {sizes}. Try steps three to ten times smaller, that of y first, or fewer local steps."
        )


def begin(engine: Engine, algorithm: Algorithm, x: Array, y: Array, key: Array) -> tuple[Any, Traffic]:
    """The first state, and what it took to communicate."""
    state, traffic = engine.init(algorithm, x, y, key)
    return state, Traffic.of(traffic)


def advance(
    engine: Engine,
    algorithm: Algorithm,
    state: Any,
    step: Array | int,
    key: Array,
    due: Array | int,
    budget: Array | int,
    pause: Array | int,
    last: Array | int,
) -> tuple[Any, Array, Traffic, Array, Array]:
    """Steps until `due` rounds, step `pause` or the end.

    Returns the state, the step, the traffic, whether all is finite, and whether another step fits.
    """

    def fits(step: Array, traffic: Traffic) -> Array:
        return (step < last) & (engine.rounds(algorithm, fold_in(key, step + 1)) <= budget - traffic.rounds)

    def goes_on(carry: Any) -> Array:
        _, step, traffic, finite = carry
        return finite & (step < pause) & (traffic.rounds < due) & fits(step, traffic)

    def one_step(carry: Any) -> Any:
        state, step, before, _ = carry
        state, traffic = engine.step(algorithm, state, fold_in(key, step + 1))
        finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for _, leaf in _server_floats(state)]))
        return state, step + 1, before.plus(*Traffic.of(traffic)), finite

    start = (state, jnp.int32(step), Traffic.zero(), jnp.bool(True))
    state, reached, traffic, finite = engine.repeat(goes_on, one_step, start)
    return state, reached, traffic, finite, fits(reached, traffic)


_begin, _advance = jax.jit(begin), jax.jit(advance)


def revealed(y: Any) -> Any:
    """y, with a row per client if the clients hold it."""
    return y.rows if isinstance(y, Rows) else y


def held(y: Any) -> bool:
    """Whether y is the clients' own and the server has not seen it."""
    return isinstance(y, PerClient) and not isinstance(y, Rows)


def known_at_server(task: Task) -> Callable[[Array, Array | None], dict[str, Array]]:
    """The task's metrics where the server may not know y: then those alone that do not depend on it."""

    def known(x: Array, y: Array | None) -> dict[str, Array]:
        if y is not None:
            return task.metrics(x, y)
        rows = jnp.zeros((task.population.size, *task.y.shape), task.y.dtype)
        free = _independent_of_second(task.metrics, x, rows)
        return {name: value for name, value in task.metrics(x, rows).items() if name in free}

    return known


def _independent_of_second(metrics: Callable[[Any, Any], dict[str, Array]], x: Array, y: Array) -> set[str]:
    """The names of the results that no operation connects with the second argument."""
    shapes = jax.eval_shape(metrics, x, y)
    program = jax.make_jaxpr(metrics)(x, y).jaxpr
    reached = set(program.invars[1:])
    for equation in program.eqns:
        if any(not isinstance(v, Literal) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    outputs = dict(zip(jax.tree.leaves({name: name for name in shapes}), program.outvars, strict=True))
    return {name for name, v in outputs.items() if isinstance(v, Literal) or v not in reached}


def _server_floats(state: Any) -> list[tuple[str, Array]]:
    """The real numbers in a state that the server holds, with their names."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, PerClient))
    named = [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves if not isinstance(leaf, PerClient)]
    return [(name, leaf) for name, leaf in named if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _not_finite(state: Any) -> str:
    names = [name for name, leaf in _server_floats(state) if not np.isfinite(leaf).all()]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
