"""What the server asks of a client: expressions of client functions by name, arrays, and values kept at the client."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedbilevel.core.problem import Tree
from fedbilevel.core.traffic import floats


class Call(NamedTuple):
    """function(client, *args), kept under `slot` unless that is None."""

    function: str
    key: np.ndarray
    args: tuple
    slot: int | None


class Store(NamedTuple):
    """A value of the server's, kept under `slot`."""

    value: Tree
    slot: int


class Kept(NamedTuple):
    """What is kept under `slot`."""

    slot: int


class Part(NamedTuple):
    """A part of the tuple that an expression gives."""

    of: Any
    path: tuple[int, ...]


class Evaluate(NamedTuple):
    """The problem's metrics at x and y on all of the client's rows."""

    x: Any
    y: Any


class Save(NamedTuple):
    """Put values on the client's disk as those of a step, and remove all but these and those of the step to `keep`."""

    step: int
    values: list
    keep: int


class Saved(NamedTuple):
    """The value in some place on the client's disk of those of a step, kept under `slot`."""

    step: int
    place: int
    slot: int


class Request(NamedTuple):
    """What a client is to compute, whether to send the result back, and the slots it may not forget before."""

    expression: Any
    reply: bool
    needed: list[int]


EXPRESSIONS = {t.__name__: t for t in (Call, Store, Kept, Part, Evaluate, Save, Saved, Request)}


def sent_floats(expression: Any) -> int:
    """The numbers that travel in an expression; keys and slots are part of the envelope."""
    match expression:
        case Call(args=inside) | list(inside):
            return sum(sent_floats(e) for e in inside)
        case Store(value=value):
            return floats(value)
        case Part(of=inside):
            return sent_floats(inside)
        case Kept() | Saved():
            return 0
        case _:
            return floats(expression)
