"""The shapes and dtypes that an algorithm's client functions take and return, by which both ends check messages.

They are read off the algorithm itself: one abstract step, on the client's own losses and the task's x and y, computes
nothing and makes every call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core import ground_truth, randomness
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.clients import PerClient
from fedbilevel.core.participation import Everyone
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.engines.simulated_clients import ClientCall, Rehearsed
from fedbilevel.errors import InputError, NotFinite


class Shape(NamedTuple):
    """A tree of arrays without its numbers."""

    structure: Any
    arrays: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tree: Tree) -> Shape:
        """The shape of a tree."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple((jnp.result_type(leaf).name, tuple(jnp.shape(leaf))) for leaf in leaves))

    def empty(self) -> Tree:
        """A tree of this shape, without numbers."""
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in self.arrays])

    def size(self) -> int:
        """How many numbers there are in all arrays."""
        return sum(math.prod(shape) for _, shape in self.arrays)

    def filled(self, numbers: np.ndarray) -> Tree:
        """The tree of these numbers, in the order of the arrays and of their entries."""
        parts = np.split(numbers, np.cumsum([math.prod(shape) for _, shape in self.arrays])[:-1])
        leaves = [part.reshape(shape) for part, (_, shape) in zip(parts, self.arrays, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(jnp.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.arrays)

    def __str__(self) -> str:
        return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.arrays) or "nothing"


class CallShape(NamedTuple):
    """What one call takes and returns."""

    arguments: Shape
    result: Shape
    held: tuple[bool, ...]  # by argument, whether clients hold it; the server sends the others


CallShapes = Mapping[str, frozenset[CallShape]]
EVALUATING = "evaluate"  # listed with the client functions, for the problem's metrics at x and y


def call_shapes(algorithm: Algorithm, population: Population, x: Array, y: Array) -> CallShapes:
    """The call shapes, by name, of all client functions that the algorithm's start or step calls, and of evaluation."""
    seen: dict[str, set[CallShape]] = {}

    def watch(call: ClientCall) -> Rehearsed:
        result = call.result()
        held = tuple(isinstance(argument, PerClient) for argument in call.arguments)
        shape = CallShape(Shape.of(call.arguments_of_one()), Shape.of(result), held)
        seen.setdefault(call.function.__name__, set()).add(shape)
        return Rehearsed(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), result))

    def start_and_step(population: Population, x: Array, y: Array, key: Array) -> Any:
        engine = SimulatedEngine(population, Everyone())
        state, _ = engine.rehearse_init(watch, algorithm, x, y, key)
        metrics = Shape.of(jax.eval_shape(ground_truth.metrics, population, x, y))
        held = tuple(isinstance(value, PerClient) for value in (state.x, state.y))
        seen[EVALUATING] = {CallShape(Shape.of((x, y)), metrics, held)}
        return engine.rehearse_step(watch, algorithm, state, key)

    jax.eval_shape(start_and_step, population, x, y, randomness.key(0))
    return {name: frozenset(found) for name, found in seen.items()}


def largest_call(known: CallShapes) -> int:
    """The bytes of the call that has the most, with its result."""
    return max(s.arguments.nbytes + s.result.nbytes for found in known.values() for s in found)


def check_arguments(known: CallShapes, name: str, args: tuple, held: tuple[bool, ...]) -> CallShape:
    """The call of that function with these arguments, some of them held; `InputError` if the algorithm makes none like it."""
    given = Shape.of(args)
    calls = [s for s in known.get(name, ()) if s.arguments == given]
    if not calls:
        wanted = " or ".join(sorted({str(s.arguments) for s in known.get(name, ())})) or "no call at all"
        raise InputError(f"{name} was called with {given}, but in this algorithm it takes {wanted}: refused")
    found = next((s for s in calls if s.held == held), None)
    if found is None:
        where = "with values kept here where this algorithm sends them, or sent where it keeps them"
        raise InputError(f"{name} is asked {where}: refused")
    return found


def check_argument(known: CallShapes, value: Tree) -> None:
    """Raise `InputError` unless every array of a value has a shape and dtype that some call takes, and no more arrays."""
    calls = [s.arguments for found in known.values() for s in found]
    taken = {array for arguments in calls for array in arguments.arrays}
    leaves = jax.tree.leaves(value)
    if len(leaves) > max(len(arguments.arrays) for arguments in calls):
        raise InputError(f"no call of this algorithm takes a value of {len(leaves):,} arrays: refused")
    given = Shape.of(value)
    if not set(given.arrays) <= taken:
        raise InputError(f"no call of this algorithm takes a value of {given}: refused")


def check_result(known: CallShapes, name: str, value: Tree) -> None:
    """Raise `InputError` unless that function returns values of this shape."""
    given = Shape.of(value)
    if not any(s.result == given for s in known.get(name, ())):
        wanted = " or ".join(sorted({str(s.result) for s in known.get(name, ())})) or "nothing"
        raise InputError(f"{name} returned {given}, but in this algorithm it returns {wanted}: refused")


def check_message(known: CallShapes, name: str, message: Tree, rule: Aggregation) -> None:
    """Raise `InputError` unless the rule encodes what that function returns as a message of this shape."""
    answers = [s.result.empty() for s in known.get(name, ())]
    wanted = {Shape.of(jax.eval_shape(rule.encode, randomness.key(0), one, one)[0]) for one in answers}
    given = Shape.of(message)
    if given not in wanted:
        raise InputError(f"{name} was encoded as {given}, but here it is {' or '.join(map(str, wanted)) or 'nothing'}: refused")


def check_sent(message: Tree, meant: jax.ShapeDtypeStruct, rule: Aggregation) -> None:
    """Raise `InputError` unless this is the shape of the message that the rule makes of such an array of the server's."""
    wanted = Shape.of(jax.eval_shape(rule.encode_sent, meant)) if rule.shrinks(meant) else None
    if Shape.of(message) != wanted:
        raise InputError("an array is not encoded as the run's aggregation does: refused")


def check_like(what: str, value: Tree, answer: Tree) -> None:
    """Raise `InputError` unless a value has the shape of the answer that it is added to or subtracted from."""
    if Shape.of(value) != Shape.of(answer):
        raise InputError(f"{what} has another shape than the answer: refused")


def check_finite(what: str, tree: Tree) -> None:
    """Raise `NotFinite` if a number in the tree is not finite."""
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and not _all_finite(np.asarray(leaf)):
            raise NotFinite(f"{what} holds a value that is not finite")


def _all_finite(array: np.ndarray) -> bool:
    """Whether all numbers are finite: first by their sum, which is fast, and then one by one."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())
