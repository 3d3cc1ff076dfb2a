"""The one interface between an experiment and what runs its steps: simulated clients, or deployed ones behind a transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.clients import server_floats
from fedbilevel.core.participation import Participation
from fedbilevel.core.randomness import fold_in
from fedbilevel.core.traffic import Totals, Traffic
from fedbilevel.errors import InputError
from fedbilevel.tasks.base import Task

UNLIMITED = 2**31 - 1  # rounds or steps
ABSENCES = "absences"  # the metric in which deployed clients' missing answers are counted

Reported = dict[str, Array]  # by name, what an algorithm reports about its last step


class Step(NamedTuple):
    """The result of a start or a step: the state, the traffic it took, and what the algorithm reports."""

    state: Any
    traffic: Traffic | Totals
    reported: Reported


class Remembering(NamedTuple):
    """An algorithm's state, and what encoding has left out of clients' answers, at the clients, and of what the server sent."""

    state: Any
    memory: dict[str, Any]

    @property
    def x(self) -> Any:
        """The state's."""
        return self.state.x

    @property
    def y(self) -> Any:
        """The state's."""
        return self.state.y


def remembering(state: Any, memory: dict[str, Any]) -> Any:
    """The state with a memory, if there is one."""
    return Remembering(state, memory) if memory else state


def recalled(state: Any) -> tuple[Any, dict[str, Any]]:
    """The algorithm's own state, and the memory."""
    return state if isinstance(state, Remembering) else (state, {})


class Limits(NamedTuple):
    """Where a stretch of steps ends."""

    due: Array | int  # after this many rounds, when metrics are due
    budget: Array | int  # before a step that would take more rounds than this
    pause: Array | int  # at this step, for a check on the run
    last: Array | int  # at this step, the run's last


class Stretch(NamedTuple):
    """The result of a stretch of steps."""

    state: Any
    step: Array  # the number of the last step
    traffic: Traffic
    reported: Reported  # by the last step
    finite: Array  # whether all numbers of the state are finite
    more: Array  # whether another step fits


class Engine(Protocol):
    """Runs the steps of an experiment. It returns pytrees that the experiment hands back without looking into them."""

    @property
    def participation(self) -> Participation:
        """How cohorts are drawn."""

    @property
    def aggregation(self) -> Aggregation:
        """How answers are aggregated."""

    def require(self, task: Task, algorithm: Algorithm) -> None:
        """Raise `InputError` unless this engine can run the algorithm on the task."""

    def rounds(self, algorithm: Algorithm, key: Array) -> Array | int:
        """The rounds that the step with this key takes, by the algorithm's own formula."""

    def init(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> Step:
        """The algorithm's first state."""

    def step(self, algorithm: Algorithm, state: Any, key: Array) -> Step:
        """One outer step."""

    def repeat(self, goes_on: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
        """Apply `body` to `carry` while `goes_on` holds."""

    def start(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> Step:
        """Like `init`, as fast as this engine can."""

    def advance(self, algorithm: Algorithm, state: Any, step: int, key: Array, limits: Limits) -> Stretch:
        """Like the function `advance`, as fast as this engine can."""

    def point(self, state: Any) -> tuple[Any, Any]:
        """x and y of a state, with a row per client where each has its own; `PerClient` where clients keep theirs."""

    def evaluate(self, task: Task, state: Any) -> Mapping[str, Any]:
        """The metrics of a state: those on the clients' data, and those that the task computes from (x, y)."""

    def refusal(self, state: Any) -> str:
        """What the aggregation could not encode, if that is why a state is not finite; empty if it is not."""

    def save(self, state: Any, step: int) -> list[np.ndarray]:
        """The state as arrays for a checkpoint, once the clients have made their own parts durable."""

    def restore(self, arrays: list[np.ndarray], algorithm: Algorithm, x: Array, y: Array, key: Array) -> Any:
        """The state from what `save` returned; `InputError` if the arrays are not this run's.

        The other arguments are those of `init`, for clients that never saved their parts.
        """


def advance(engine: Engine, algorithm: Algorithm, state: Any, step: Array | int, key: Array, limits: Limits) -> Stretch:
    """Take steps up to `limits`: step t takes its randomness from (key, t), so where stretches end changes no bit."""

    def fits(step: Array, traffic: Traffic) -> Array:
        return (step < limits.last) & (engine.rounds(algorithm, fold_in(key, step + 1)) <= limits.budget - traffic.rounds)

    def goes_on(made: Stretch) -> Array:
        within = made.finite & (made.step < limits.pause) & (made.traffic.rounds < limits.due)
        return within & fits(made.step, made.traffic)

    def one_step(made: Stretch) -> Stretch:
        state, traffic, reported = engine.step(algorithm, made.state, fold_in(key, made.step + 1))
        finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for _, leaf in server_floats(state)]))
        return Stretch(state, made.step + 1, made.traffic.plus(Traffic.of(traffic)), reported, finite, made.more)

    nothing = {name: jnp.full((), jnp.nan) for name in algorithm.reports}
    start = Stretch(state, jnp.int32(step), Traffic.zero(), nothing, jnp.bool(True), jnp.bool(True))
    made = engine.repeat(goes_on, one_step, start)
    return made._replace(more=fits(made.step, made.traffic))


def complete_report(algorithm: Algorithm, given: Mapping[str, Array | float]) -> Reported:
    """What a step reports, under all names that the algorithm declares; NaN where it reports nothing."""
    unknown = given.keys() - algorithm.reports.keys()
    if unknown:
        raise TypeError(f"{type(algorithm).__name__}.reports does not declare {', '.join(sorted(unknown))}")
    return {name: jnp.asarray(given.get(name, jnp.nan), float) for name in algorithm.reports}


def unflattened(arrays: list[np.ndarray], shapes: Any) -> Any:
    """The tree of these shapes from its arrays; `InputError` if their shapes or dtypes differ."""
    wanted, structure = jax.tree.flatten(shapes)
    if [(a.shape, a.dtype) for a in arrays] != [(s.shape, s.dtype) for s in wanted]:
        raise InputError("arrays whose shapes or precision differ from this run's: set up JAX as it was")
    return jax.tree.unflatten(structure, [jnp.asarray(a) for a in arrays])
