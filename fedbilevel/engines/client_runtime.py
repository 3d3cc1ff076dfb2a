"""The client's side of a deployed federation: answers requests with its own data, and keeps values on request."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.aggregations.secure import SecureSum
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core import ground_truth, randomness
from fedbilevel.core.aggregation import Aggregation, Mean, change_from
from fedbilevel.core.clients import is_client_function
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.core.randomness import fold_in, wrapped
from fedbilevel.engines import wire
from fedbilevel.engines.call_shapes import EVALUATING, CallShapes, check_argument, check_arguments, check_finite, largest_call
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
)
from fedbilevel.engines.secure_exchange import SecureClient
from fedbilevel.errors import InputError

HELD = (Call, Store, Kept, Part, Saved)  # expressions whose results are here


class ValueStore(Protocol):
    """Storage in which a client's values outlive its process."""

    def save(self, step: int, data: bytes, keep: int) -> None:
        """Store the data of a step, and of older steps keep only that of the step `keep`."""

    def load(self, step: int) -> bytes:
        """The data of a step; `InputError` if it is missing."""


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
    ):
        self._algorithm, self._population, self._m, self._weight = algorithm, population, m, weight
        self._call_shapes, self._store, self._aggregation = call_shapes, store, aggregation
        self._secure = SecureClient(m, aggregation, identity) if isinstance(aggregation, SecureSum) else None
        self._named = wire.named_tuples(type(algorithm))
        self._kept = KeptValues(None if call_shapes is None else largest_call(call_shapes))

    def answer(self, data: bytes) -> bytes:
        """The reply to a request; `InputError` or `NotFinite` if it asks for something that a client does not do."""
        request = wire.decode(data, EXPRESSIONS | self._named)
        if not isinstance(request, Request) or not _whole(request.needed):
            raise InputError("a message is not a request: refused")
        if request.reply and self._secure is not None and not isinstance(request.expression, SECURE):
            raise InputError("what this client computes leaves it in secure sums alone: refused")
        if request.reply and self._secure is None and not isinstance(request.expression, (Call, Encode, Evaluate)):
            raise InputError("values kept here do not leave this client: ask for a client function or for metrics")
        self._kept.begin(set(request.needed))
        result = self._summed(request.expression) if request.reply and self._secure else self._evaluate(request.expression)
        return wire.encode(jax.tree.map(np.asarray, result) if request.reply else None)

    def _summed(self, request: Any) -> Tree:
        """The reply to a request of a secure sum."""
        assert self._secure is not None
        match request:
            case Masked(expression=Encode() as inside):
                return self._secure.answer(request, self._evaluate(inside))
            case Masked(expression=Evaluate() as inside):
                metrics = self._evaluate(inside)
                message, _ = self._aggregation.encode(randomness.key(0), metrics, jnp.zeros_like(metrics))
                return self._secure.answer(request, message)
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
                return self._kept.add(slot, jax.tree.map(np.array, value))  # a copy, which does not keep the message alive
            case Part(of=of, path=tuple(path)) if _whole(path):
                value = self._evaluate(of)
                for index in path:
                    if not isinstance(value, tuple):
                        raise InputError("only tuples have parts: refused")
                    value = value[index]
                return value
            case Call(function=str(name), key=key, args=tuple(args), slot=int() | None as slot):
                return self._kept.add(slot, self._call(name, key, [self._evaluate(a) for a in args]))
            case Encode(call=Call(args=args) as call, around=around, memory=memory, key=key, slot=int(slot)):
                check_finite("a point that answers are near", around)
                sent = jax.tree.leaves([self._evaluate(a) for a in args if not isinstance(a, HELD)])
                near = [sent[leaf] if isinstance(leaf, int) else leaf for leaf in around]
                message, left = _encoded(self._aggregation, key, self._evaluate(call), near, self._evaluate(memory))
                self._kept.add(slot, left)
                return message
            case Evaluate(x=x, y=y):
                point = self._evaluate(x), self._evaluate(y)
                if self._call_shapes is not None:
                    check_arguments(self._call_shapes, EVALUATING, point)
                return _metrics(self._population, *point)
            case Save(step=int(step), values=list(values), keep=int(keep)):
                if len(values) > MOST_KEPT or not all(isinstance(v, (Kept, Part, Call, Store, Saved)) for v in values):
                    raise InputError("only values kept here are saved here: refused")
                kept = [self._evaluate(v) for v in values]
                self._kept.require_room(size(kept))
                self._disk.save(step, wire.encode(jax.tree.map(np.asarray, kept)), keep)
                return None
            case Saved(step=int(step), place=int(place), slot=int(slot)):
                return self._kept.add(slot, wire.decode(self._disk.load(step), self._named)[place])
            case _ if isinstance(expression, tuple(EXPRESSIONS.values())):
                raise InputError(f"a {type(expression).__name__} has entries of another type than it should: refused")
            case list():
                return [self._evaluate(e) for e in expression]
            case _:
                value = jax.tree.map(self._decoded, expression, is_leaf=is_encoded)
                check_finite("an argument", value)
                return value

    def _decoded(self, value: Any) -> Any:
        """An array as the server meant it."""
        if not is_encoded(value):
            return value
        if not _whole(value.shape) or min(value.shape, default=0) < 0 or value.dtype not in wire.KINDS:
            raise InputError("an encoded array has no usable shape: refused")
        self._kept.require_room(8 * math.prod(value.shape))
        return self._aggregation.decode_sent(value.message, jax.ShapeDtypeStruct(tuple(value.shape), value.dtype))

    def _call(self, name: str, key: np.ndarray, args: list[Tree]) -> Tree:
        if not is_client_function(getattr(self._algorithm, name, None)):
            raise InputError(f"{name!r} is not a client function of {type(self._algorithm).__name__}: refused")
        if self._call_shapes is not None:
            check_arguments(self._call_shapes, name, tuple(args))
        return _compute(self._algorithm, name, (self._population, self._m, self._weight), key, args)

    @property
    def _disk(self) -> ValueStore:
        if self._store is None:
            raise InputError("this client has nowhere to save values: give it a store")
        return self._store


def _whole(numbers: Any) -> bool:
    """Whether these are whole numbers."""
    return isinstance(numbers, (list, tuple)) and all(type(n) is int for n in numbers)


@partial(jax.jit, static_argnames="name")
def _compute(algorithm: Algorithm, name: str, own: tuple[Population, Array, Array], key: Array, args: list[Tree]) -> Tree:
    population, m, weight = own
    client = population.alone(fold_in(wrapped(key), m), weight, m)
    return getattr(algorithm, name)(client, *args)


@partial(jax.jit, static_argnums=0)
def _encoded(rule: Aggregation, key: Array, answer: Tree, near: list[Array], memory: Tree) -> tuple[Tree, Tree]:
    around = jax.tree.unflatten(jax.tree.structure(answer), near) if near else None
    memory = jax.tree.map(jnp.zeros_like, answer) if memory is None else memory
    return rule.encode(wrapped(key), change_from(around, answer), memory)


@jax.jit
def _metrics(population: Population, x: Array, y: Array) -> Array:
    return jnp.concatenate([ground_truth.metrics(population, x, y), ground_truth.tests(population, x, y)])
