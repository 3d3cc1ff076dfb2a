"""How many releases of a client's rows a call of a client function makes, found without rows and without numbers.

A draw on which k derivatives are asked is one release with k times the square of the reach: those k share the rows that were
drawn, so they may not be counted as if each had drawn its own. Which derivatives are asked must not depend on numbers:
a client function with such a condition is refused. So is one that asks about many values at once (`jax.vmap`), since they are
seen as one question: a loop (`lax.scan`, `lax.map` without `batch_size`) is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.population import Client
from fedbilevel.core.privacy import LOWER, UPPER, PrivateProblem
from fedbilevel.core.problem import Batch, FiveBatches, Tree
from fedbilevel.errors import InputError

MARK = "release"  # the name of what stands for a derivative in a traced program
MOST_OPERATIONS = 100_000  # of a call whose releases are counted, which takes about 0.1 ms for each


class Release(NamedTuple):
    """Derivatives that are asked on one draw."""

    level: str  # of the rows: upper or lower
    times: int  # the usual size of a minibatch; 0: all rows
    derivatives: int


Releases = Counter[Release]


class _Token(NamedTuple):
    """In place of a draw: which one it is."""

    level: str
    times: int
    k: int
    j: int


class CountingClient:
    """Stands in for a `Client` with privacy: its draws are tokens, and its derivatives are zeros and are counted."""

    def __init__(self, number: int, full_batches: bool):
        self._number, self._full_batches = number, full_batches
        self.differs = False  # whether the function looked at which client this is
        self.traced = False  # whether it asked about traced values, of which there may be many
        self.weight, self.rows = jnp.ones(()), (jnp.int32(1), jnp.int32(1))
        self.asked: Counter[_Token] = Counter()
        self.problem = PrivateProblem(self._ask)

    @property
    def number(self) -> np.int32:
        """See `Client.number`."""
        self.differs = True
        return np.int32(self._number)

    def _ask(self, name: str, x: Array, y: Array, draw: _Token, v: Array | None) -> Array:
        self.asked[draw] += 1
        self.traced |= _is_traced(x, y, v)

        def release(like: Array) -> Array:
            return jnp.zeros_like(like)

        return jax.jit(release)((x, y)["xy".index(name[1])])

    def releases(self) -> Releases:
        """What has been asked so far."""
        return Counter(Release(token.level, token.times, asked) for token, asked in self.asked.items())

    def batch(self, k: Any = 0, times: int = 1) -> Batch:
        """See `Client.batch`."""
        return self._draws(1, k, times)[0]

    def five_batches(self, k: Any = 0, times: int = 1, shared: bool = False) -> FiveBatches:
        """See `Client.five_batches`."""
        return FiveBatches(*self._draws(1, k, times) * 5) if shared else FiveBatches(*self._draws(5, k, times))

    def order(self, n: int, k: Any = 0) -> Array:
        """See `Client.order`."""
        return jnp.arange(n, dtype=jnp.int32)

    def whole(self) -> Batch:
        """See `Client.whole`."""
        return Batch(_Token(UPPER, 0, 0, 0), _Token(LOWER, 0, 0, 0))

    def _draws(self, batches: int, k: Any, times: int) -> list[Batch]:
        if self._full_batches:
            times = 0
        self.traced |= _is_traced(k)
        number = -1 if _is_traced(k) else int(k)
        return [Batch(_Token(UPPER, times, number, j), _Token(LOWER, times, number, j)) for j in range(batches)]


def releases_of(function: Callable[..., Tree], arguments: tuple, number: int, full_batches: bool) -> Releases:
    """What a call of a client function with arguments of these shapes releases at that client; `InputError` if that varies."""
    return _counted(function, arguments, number, full_batches).releases()


def most_released(function: Callable[..., Tree], arguments: tuple, clients: int, full_batches: bool) -> Releases:
    """The same, at most, at any of so many clients."""
    first = _counted(function, arguments, 0, full_batches)
    most = first.releases()
    for m in range(1, clients) if first.differs else ():
        most |= _counted(function, arguments, m, full_batches).releases()
    return most


def _counted(function: Callable[..., Tree], arguments: tuple, number: int, full_batches: bool) -> CountingClient:
    at: list[CountingClient] = []

    def call(*args: Tree) -> Tree:
        at.append(CountingClient(number, full_batches))
        return function(cast(Client, at[-1]), *args)

    program, name = jax.make_jaxpr(call)(*arguments).jaxpr, getattr(function, "__name__", "a client function")
    if (operations := _operations(program)) > MOST_OPERATIONS:
        raise InputError(
            f"with privacy of rows a call of {name} may take {MOST_OPERATIONS:,} operations, and here it takes {operations:,}: "
            "lower the hyperparameters that say how much clients compute"
        )
    varies = any(_marked(inside) for inside in _varying(program))
    if not varies:
        with jax.ensure_compile_time_eval(), jax.disable_jit():
            call(*jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), arguments))
    if varies or at[-1].traced:
        raise InputError(
            f"how much {name} asks of a client's rows depends on numbers, or it asks in jax.vmap, which privacy of rows does "
            "not allow: choose another algorithm"
        )
    return at[-1]


def _is_traced(*values: Any) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def _varying(program: Any) -> Iterator[Any]:
    """The parts of a traced program that are run a number of times that is not known from it."""
    for equation in program.eqns:
        for inside in _inside(equation):
            yield from [inside] if equation.primitive.name in ("cond", "while") else _varying(inside)


def _marked(program: Any) -> bool:
    return any(equation.params.get("name") == MARK or any(map(_marked, _inside(equation))) for equation in program.eqns)


def _operations(program: Any) -> int:
    """How many operations a traced program takes, those in loops as often as these go round."""
    return sum(max(1, e.params.get("length", 1) * sum(map(_operations, _inside(e)))) for e in program.eqns)


def _inside(equation: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(list(equation.params.values())):
        program = getattr(value, "jaxpr", value)
        if hasattr(program, "eqns"):
            yield program
