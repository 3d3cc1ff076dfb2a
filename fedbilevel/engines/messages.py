"""What the server asks of a client: expressions built from client functions by name, arrays, and values kept there."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.core.problem import Tree


class Call(NamedTuple):
    """function(client, *args), kept under `slot` unless that is None."""

    function: str
    key: np.ndarray
    args: tuple
    slot: int | None


class Encode(NamedTuple):
    """The answer to a call, encoded as the run's aggregation does; what that leaves out is kept under `slot`."""

    call: Call
    around: list  # the arrays of the point that answers are near, or their places among the arrays of the call's arguments
    memory: Any  # what was left out before, or None if this is the first time
    key: np.ndarray
    slot: int


class Advertise(NamedTuple):
    """The client's keys for a secure sum to come."""


class ShareKeys(NamedTuple):
    """The keys of all clients that can be in a secure sum, by client: the shares for each of them."""

    adverts: dict


class Masked(NamedTuple):
    """The shares that other members of a secure sum sent: what the expression, an `Encode` or `Evaluate`, results in, masked.

    With it come the client's keys for the next sum.
    """

    shares: tuple[np.ndarray, np.ndarray]  # the members, and a row of bytes for each
    expression: Any


class Unmask(NamedTuple):
    """The members whose masked numbers arrived: the shares that unmask their sum, and those for the next one.

    `adverts` are the keys for the next one, with which each member has signed the sum that it is in.
    """

    arrived: list[int]
    adverts: dict


SECURE = (Advertise, ShareKeys, Masked, Unmask)


class Encoded(NamedTuple):
    """An array of the server's, encoded as the run's aggregation does."""

    message: Tree
    shape: list[int]
    dtype: str


class Store(NamedTuple):
    """A value from the server, kept under `slot`."""

    value: Tree
    slot: int


class Kept(NamedTuple):
    """The value kept under `slot`."""

    slot: int


class Part(NamedTuple):
    """A part of the tuple that an expression results in."""

    of: Any
    path: tuple[int, ...]


class Evaluate(NamedTuple):
    """The problem's metrics at x and y on all of the client's rows."""

    x: Any
    y: Any


class Save(NamedTuple):
    """Save values on the client's disk under a step, and remove all but these and those of the step `keep`."""

    step: int
    values: list
    keep: int


class Saved(NamedTuple):
    """The value at `place` among those of a step on the client's disk, kept under `slot`."""

    step: int
    place: int
    slot: int


class Request(NamedTuple):
    """What a client should compute, whether to send the result back, and the slots that it must still keep."""

    expression: Any
    reply: bool
    needed: list[int]


EXPRESSIONS = {t.__name__: t for t in (Call, Encode, Encoded, Store, Kept, Part, Evaluate, Save, Saved, Request, *SECURE)}


def sent(expression: Any) -> list[Tree]:
    """The values that an expression carries; keys and slots are part of the envelope."""
    match expression:
        case Call(args=inside) | list(inside):
            return [value for e in inside for value in sent(e)]
        case Encode(call=call, around=around, memory=memory):
            return [*sent(call), *(leaf for leaf in around if not isinstance(leaf, int)), *sent(memory)]
        case Store(value=value):
            return [value]
        case Part(of=inside):
            return sent(inside)
        case Kept() | Saved():
            return []
        case _:
            return [jax.tree.map(lambda leaf: leaf.message if is_encoded(leaf) else leaf, expression, is_leaf=is_encoded)]


HELD = (Call, Store, Kept, Part, Saved)  # expressions whose results are at the client


def is_held(argument: Any) -> bool:
    """Whether a client has an argument, or a part of it, from an expression and not from this request."""
    return any(isinstance(node, HELD) for node in jax.tree.leaves(argument, is_leaf=lambda node: isinstance(node, HELD)))


def in_common(expression: Encode | Evaluate) -> Encode | Evaluate:
    """What all clients of a cohort are asked alike: the expression without slots, and without what each client holds."""

    def arguments(given: tuple) -> tuple:
        return tuple(None if is_held(argument) else argument for argument in given)

    if isinstance(expression, Evaluate):
        return Evaluate(*arguments(expression))
    call = expression.call
    return expression._replace(call=call._replace(args=arguments(call.args), slot=None), memory=None, slot=0)


def is_encoded(node: Any) -> bool:
    """Whether it stands for an array."""
    return isinstance(node, Encoded)
