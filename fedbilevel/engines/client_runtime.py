"""The client's side of a deployed federation: answers requests with its own data, and keeps values on request."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.aggregations.secure import HiddenSum
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core import ground_truth
from fedbilevel.core.aggregation import Aggregation, Mean, change_from, scaled
from fedbilevel.core.clients import is_client_function
from fedbilevel.core.population import Population
from fedbilevel.core.privacy import of_metrics, private_metrics
from fedbilevel.core.problem import Tree
from fedbilevel.core.randomness import fold_in, wrapped
from fedbilevel.engines import wire
from fedbilevel.engines.answer_times import AnswerTimes
from fedbilevel.engines.call_shapes import (
    EVALUATING,
    CallShapes,
    check_argument,
    check_arguments,
    check_finite,
    check_like,
    check_sent,
    largest_call,
)
from fedbilevel.engines.kept_values import MOST_KEPT, KeptValues, size
from fedbilevel.engines.messages import (
    EXPRESSIONS,
    SECURE,
    Call,
    Encode,
    Evaluate,
    Kept,
    Masked,
    Part,
    Request,
    Save,
    Saved,
    Store,
    is_encoded,
    is_held,
)
from fedbilevel.engines.secure_exchange import AnsweredSums, SecureClient
from fedbilevel.errors import InputError

ROUNDING = 1e-6  # of a weight


class ValueStore(Protocol):
    """Storage in which a client's values outlive its process."""

    def save(self, step: int, data: bytes, keep: int) -> None:
        """Store the data of a step, and of older steps keep only that of the step `keep`."""

    def load(self, step: int) -> bytes:
        """The data of a step; `InputError` if it is missing."""


class OwnRandomness(Protocol):
    """Where a client that keeps something private has its random keys from."""

    def key(self, name: str, key: np.ndarray, args: Tree) -> np.ndarray:
        """A random key of the client's own for the answer to a call, or to an evaluation; `InputError` if it refuses."""


class ClientRuntime:
    """One client. Where call shapes are given, calls of any other shape are refused."""

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        m: int,
        weight: float = 1.0,
        call_shapes: CallShapes | None = None,
        store: ValueStore | None = None,
        aggregation: Aggregation = Mean(),  # noqa: B008 (frozen)
        identity: Any = None,  # for secure sums, an `Identity`
        own: OwnRandomness | None = None,  # where rows are private
        noise: OwnRandomness | None = None,  # where the aggregation has clients add noise to what they send
        observe: Callable[[Array, Array], None] | None = None,  # is shown x and y whenever metrics are due
        answered: AnsweredSums | None = None,  # for secure sums, whose answers are the same whenever they are asked for
        memory: float = math.inf,  # bytes that values may take
        times: AnswerTimes | None = None,
    ):
        if aggregation.clients_add_noise != (noise is not None):
            raise ValueError("a client has keys for its own noise where the aggregation has it add noise, and nowhere else")
        self._algorithm, self._population, self._m, self._weight = algorithm, population, m, weight
        self._call_shapes, self._store, self._aggregation = call_shapes, store, aggregation
        self._secure = SecureClient(m, aggregation, identity, answered) if isinstance(aggregation, HiddenSum) else None
        self._own, self._noise, self._observe = own, noise, observe
        self._named = wire.named_tuples(type(algorithm)) | {kind.__name__: kind for kind in algorithm.private}
        self._files: dict[int, list] = {}  # by step, what the present request has read of this client's disk
        self._times = times or AnswerTimes()
        self._kept = KeptValues(None if call_shapes is None else largest_call(call_shapes), memory)

    def answer(self, data: bytes) -> bytes:
        """The reply to a request; `InputError` or `NotFinite` if it asks for something that a client does not do."""
        private = self._algorithm.private
        public = {name: kind for name, kind in self._named.items() if kind not in private}
        request = wire.decode(data, EXPRESSIONS | public)
        if not isinstance(request, Request) or not _whole(request.needed):
            raise InputError("a message is not a request: refused")
        if request.reply and self._secure is not None and not isinstance(request.expression, SECURE):
            raise InputError("what this client computes leaves it in secure sums alone: refused")
        if request.reply and self._secure is None and not isinstance(request.expression, (Call, Encode, Evaluate)):
            raise InputError("values kept here do not leave this client: ask for a client function or for metrics")
        self._kept.begin(set(request.needed))
        self._times.begin()
        try:
            result = self._summed(request.expression) if request.reply and self._secure else self._evaluate(request.expression)
        finally:
            self._files.clear()
        return wire.encode(jax.tree.map(np.asarray, self._leaving(result)) if request.reply else None)

    def _leaving(self, result: Tree) -> Tree:
        """What a client function has returned; `InputError` if it holds what the algorithm's clients keep to themselves."""
        if any(map(self._is_private, jax.tree.leaves(result, is_leaf=self._is_private))):
            raise InputError("what this client keeps to itself does not leave it: refused")
        return result

    def _is_private(self, value: Any) -> bool:
        """Whether a value is of a type that clients keep to themselves."""
        return isinstance(value, self._algorithm.private)

    def _summed(self, request: Any) -> Tree:
        """The reply to a request of a secure sum."""
        assert self._secure is not None
        match request:
            case Masked(expression=Encode(call=Call(function=str(name), args=tuple(args))) as inside):
                message = self._noised(self._aggregation, self._evaluate(inside), name, inside.key, args)
                return self._secure.answer(request, message)
            case Masked(expression=Evaluate(x=x, y=y) as inside):
                metrics = self._evaluate(inside)
                if self._scale is not None:  # of rows that are held out, each counts the same
                    known = len(self._population.problem.metric_names)
                    metrics = jnp.concatenate([metrics[:known] * self._scale, metrics[known:]])
                assert isinstance(self._aggregation, HiddenSum)
                rule = self._aggregation.for_metrics(metrics.size)
                message = self._aggregation.encode_metrics(metrics)
                return self._secure.answer(request, self._noised(rule, message, EVALUATING, np.zeros(2, np.uint32), (x, y)))
            case Masked():
                raise InputError("values kept here do not leave this client: ask for a client function or for metrics")
            case _:
                return self._secure.answer(request)

    def _evaluate(self, expression: Any) -> Tree:
        match expression:
            case Kept(slot=int(slot)):
                return self._kept.recall(slot)
            case Store(value=value, slot=int(slot)):
                check_finite("a value to keep", value)
                if self._call_shapes is not None:
                    check_argument(self._call_shapes, value)
                self._kept.count(size(value))
                return self._kept.add(slot, jax.tree.map(np.array, value))  # a copy, which does not keep the message alive
            case Part(of=of, path=tuple(path)) if _whole(path):
                value = self._evaluate(of)
                for place in path:
                    value = self._part(value, place)
                return value
            case Call(function=str(name), key=key, args=tuple(args), slot=int() | None as slot):
                return self._kept.add(slot, self._call(name, key, [self._evaluate(a) for a in args], _held(args)))
            case Encode(call=Call(args=args) as call, around=around, memory=memory, key=key, slot=int(slot)):
                check_finite("a point that answers are near", around)
                sent = jax.tree.leaves([self._evaluate(a) for a in args if not is_held(a)])
                if not {leaf for leaf in around if isinstance(leaf, int)} <= set(range(len(sent))):
                    raise InputError("a point that answers are near is none that the server sends: refused")
                near = [sent[leaf] if isinstance(leaf, int) else leaf for leaf in around]
                before, answer = self._evaluate(memory), self._leaving(self._evaluate(call))
                if near:
                    check_like("a point that answers are near", near, jax.tree.leaves(answer))
                if before is not None:
                    check_like("what was left out before", before, answer)
                self._kept.count(2 * size(answer))  # the message, and what it leaves out
                message, left = encoded(self._aggregation, key, answer, near, before, self._scale)
                self._kept.add(slot, left)
                return message
            case Evaluate(x=x, y=y):
                point = self._own_x(x) if self._algorithm.own_x else self._evaluate(x), self._evaluate(y)
                if self._call_shapes is not None:
                    self._kept.count(check_arguments(self._call_shapes, EVALUATING, point, _held((x, y))).result.nbytes)
                self._times.count(EVALUATING, point)
                if self._observe is not None:
                    self._observe(*point)
                if self._own is None:
                    return _metrics(self._population, *point)
                return _private_metrics(self._population, *point, self._own.key(EVALUATING, np.zeros(2, np.uint32), point))
            case Save(step=int(step), values=list(values), keep=int(keep)):
                if len(values) > MOST_KEPT or not all(isinstance(v, (Kept, Part, Call, Store, Saved)) for v in values):
                    raise InputError("only values kept here are saved here: refused")
                kept = [self._evaluate(v) for v in values]
                self._kept.count(size(kept))
                self._disk.save(step, wire.encode(jax.tree.map(np.asarray, kept)), keep)
                return None
            case Saved(step=int(step), place=int(place), slot=int(slot)):
                saved = self._read(step)
                if not 0 <= place < len(saved):
                    raise InputError(f"of step {step} {len(saved)} values are saved here, and none at {place}: refused")
                self._kept.count(size(saved[place]))
                return self._kept.add(slot, jax.tree.map(np.array, saved[place]))  # a copy, without the rest of the file
            case _ if isinstance(expression, tuple(EXPRESSIONS.values())) and not is_encoded(expression):
                raise InputError(f"a {type(expression).__name__} has entries of another type than it should: refused")
            case list():
                return [self._evaluate(e) for e in expression]
            case _:
                value = jax.tree.map(self._decoded, expression, is_leaf=is_encoded)
                check_finite("an argument", value)
                return value

    def _part(self, value: Any, place: int) -> Any:
        """One part of a tuple; `InputError` if the algorithm's clients keep the tuple to themselves, and so its parts."""
        if self._is_private(value):
            raise InputError("what this client keeps to itself is not taken apart: refused")
        if not isinstance(value, tuple):
            raise InputError("only tuples have parts: refused")
        if not 0 <= place < len(value):
            raise InputError(f"a tuple of {len(value)} has no part {place}: refused")
        return value[place]

    def _own_x(self, expression: Any) -> Array:
        """An x that this client has arrived at itself; `InputError` if it is anything else, or could come from the server."""
        match expression:
            case Part(of=of, path=(*outer, int(place))):
                kept = self._evaluate(Part(of, tuple(outer)))
                if self._is_private(kept) and (place, "x") in enumerate(kept._fields):
                    return kept.x
        raise InputError("metrics are computed at this client's own x alone: refused")

    def _read(self, step: int) -> list:
        """The values of a step on this client's disk, read once for a request."""
        if step not in self._files:
            data = self._disk.load(step)
            self._kept.count(len(data))
            self._files[step] = wire.decode(data, self._named)
        return self._files[step]

    def _decoded(self, value: Any) -> Any:
        """An array as the server meant it."""
        if not is_encoded(value):
            return value
        if not _whole(value.shape) or min(value.shape, default=0) < 0 or value.dtype not in wire.KINDS:
            raise InputError("an encoded array has no usable shape: refused")
        meant = jax.ShapeDtypeStruct(tuple(value.shape), value.dtype)
        self._kept.count(8 * math.prod(meant.shape))
        check_sent(value.message, meant, self._aggregation)
        return self._aggregation.decode_sent(value.message, meant)

    def _call(self, name: str, key: np.ndarray, args: list[Tree], held: tuple[bool, ...]) -> Tree:
        if not is_client_function(getattr(self._algorithm, name, None)):
            raise InputError(f"{name!r} is not a client function of {type(self._algorithm).__name__}: refused")
        if self._call_shapes is not None:
            self._kept.count(check_arguments(self._call_shapes, name, tuple(args), held).result.nbytes)
        self._times.count(name, tuple(args))
        if self._own is not None:
            key = self._own.key(name, key, args)
        return _compute(self._algorithm, name, (self._population, self._m, self._weight), key, args)

    def _noised(self, rule: Aggregation, message: Tree, name: str, key: np.ndarray, args: Tree) -> Tree:
        """An answer of that function, or metrics, with this client's own noise if the rule has clients add it."""
        return message if self._noise is None else _with_noise(rule, wrapped(self._noise.key(name, key, args)), message)

    @property
    def _scale(self) -> float | None:
        """M w_m, if clients weigh their changes themselves and this one's weight is not that of all."""
        return self._weight if self._aggregation.scales and abs(self._weight - 1) > ROUNDING else None

    @property
    def _disk(self) -> ValueStore:
        if self._store is None:
            raise InputError("this client has nowhere to save values: give it a store")
        return self._store


def _held(args: tuple) -> tuple[bool, ...]:
    """For each argument whether this client has it already, or computes it first."""
    return tuple(map(is_held, args))


def _whole(numbers: Any) -> bool:
    """Whether these are whole numbers."""
    return isinstance(numbers, (list, tuple)) and all(type(n) is int for n in numbers)


@partial(jax.jit, static_argnames="name")
def _compute(algorithm: Algorithm, name: str, own: tuple[Population, Array, Array], key: Array, args: list[Tree]) -> Tree:
    population, m, weight = own
    client = population.alone(fold_in(wrapped(key), m), weight, m)
    return getattr(algorithm, name)(client, *args)


@partial(jax.jit, static_argnums=0)
def encoded(
    rule: Aggregation, key: Array, answer: Tree, near: list[Array], memory: Tree, scale: float | None
) -> tuple[Tree, Tree]:
    """What leaves a client instead of its answer, weighed if it has to be, and what that leaves out."""
    around = jax.tree.unflatten(jax.tree.structure(answer), near) if near else None
    memory = jax.tree.map(jnp.zeros_like, answer) if memory is None else memory
    change = change_from(around, answer)
    return rule.encode(wrapped(key), change if scale is None else scaled(change, scale), memory)


@partial(jax.jit, static_argnums=0)
def _with_noise(rule: Aggregation, key: Array, message: Tree) -> Tree:
    return rule.with_noise(key, message)


@jax.jit
def _metrics(population: Population, x: Array, y: Array) -> Array:
    return jnp.concatenate([ground_truth.metrics(population, x, y), ground_truth.tests(population, x, y)])


@jax.jit
def _private_metrics(population: Population, x: Array, y: Array, key: Array) -> Array:
    assert population.privacy is not None
    test = None if population.test is None else population.test.rows
    asked = of_metrics(population.problem, population.upper.rows, population.lower.rows, test)
    told = private_metrics(asked, x, y, population.privacy, wrapped(key))
    return told if test is not None else jnp.concatenate([told, jnp.zeros(len(population.problem.tests), told.dtype)])
