"""How long a step takes, estimated before it starts: a compiled step can be neither stopped nor saved halfway.

The operations are counted in the step's trace, which has the lengths of loops; no number is computed. The rates are optimistic,
so a step that is refused would take even longer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Literal

from fedbilevel.algorithms import called
from fedbilevel.core import randomness
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.runs.experiment import Experiment
from fedbilevel.settings import settings

LONGEST = 300.0  # seconds of a step
FEW = 10_000  # turns of loops in a step: with so few, a step that fits into memory does not take long
OF_A_CORE, OF_A_GPU = 2e10, 1e15  # operations per second; a core reached 4e9 to 1e10 on small tasks
SMALL = 1e5  # operations: anything up to this is computed by one core
A_TURN, LAUNCH = 3e-7, 2e-6  # seconds that a turn of a loop takes at least, on a CPU and on a GPU


def require_time(experiment: Experiment, engine: SimulatedEngine) -> None:
    """Raise `InputError` if a single step takes longer than anybody would wait."""
    algorithm, task, key = experiment.algorithm, experiment.task, randomness.key(experiment.options.seed)
    known = settings(type(algorithm))
    counts = {name: getattr(algorithm, name) or 0 for name, setting in known.items() if setting.kind is int}
    if math.prod(max(1, n) for n in counts.values()) <= FEW:
        return
    shapes = engine.state_shapes(algorithm, task.x, task.y, key)

    def step(engine: SimulatedEngine, state: Any, key: Array) -> Any:
        return engine.step(algorithm, state, key)

    program = jax.make_jaxpr(step)(engine, shapes, key).jaxpr
    needed = work(program, int(engine.rounds(algorithm, key)))
    if (seconds := needed.seconds()) > LONGEST:
        largest = max(counts, key=counts.__getitem__)
        raise InputError(
            f"a step of {called(algorithm)} has about {needed.small + needed.large:.1g} operations and takes "
            f"{in_words(seconds)} or more here, during which it can be neither stopped nor saved: lower {largest}, which is "
            f"{counts[largest]}"
        )


def in_words(seconds: float) -> str:
    """A duration in its largest unit."""
    for unit, size in (("years", 365.25 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


class Work(NamedTuple):
    """The work that a program does."""

    small: float = 0.0  # operations in parts that are too small to be split among cores
    large: float = 0.0  # operations in other parts
    turns: float = 0.0  # turns of loops

    def plus(self, other: Work, times: float = 1) -> Work:
        """This work, and the other so many times."""
        return Work(*(mine + times * more if more else mine for mine, more in zip(self, other, strict=True)))

    def seconds(self) -> float:
        """How long it takes on the available devices."""
        if jax.default_backend() == "cpu":
            return (self.small + self.large / (os.cpu_count() or 1)) / OF_A_CORE + self.turns * A_TURN
        return (self.small + self.large) / (OF_A_GPU * jax.device_count()) + self.turns * LAUNCH


def work(program: Any, rounds: int | None) -> Work:
    """The work of a traced program; a loop of unknown length is taken to communicate once in every turn.

    Without `rounds` nothing communicates, and such a loop is taken to turn as often as it can, for ever if nothing bounds it.
    """
    total = Work()
    for equation in program.eqns:
        inner, turns = list(_inner(equation)), 1.0
        if equation.primitive.name == "while":
            turns = most_turns(equation) if rounds is None else rounds
        elif equation.primitive.name == "scan":
            turns = equation.params["length"]
        if equation.primitive.name in ("scan", "while"):
            total = total.plus(Work(turns=turns))
        for within in inner:
            total = total.plus(work(within, rounds), turns)
        if not inner:
            operations = _operations(equation)
            total = total.plus(Work(large=operations) if operations > SMALL else Work(small=operations))
    return total


def largest_array(program: Any) -> int:
    """The bytes of the largest array that a traced program makes."""
    made = [0]
    for equation in program.eqns:
        made += [getattr(result.aval, "size", 0) * result.aval.dtype.itemsize for result in equation.outvars]
        made += map(largest_array, _inner(equation))
    return max(made)


def most_turns(loop: Any) -> float:
    """The most turns of a `while` that goes on only below a number, and counts up to it; infinity for any other."""
    goes_on, body = loop.params["cond_jaxpr"].jaxpr, loop.params["body_jaxpr"].jaxpr
    given, passed = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    start, carried = loop.invars[given + passed :], goes_on.invars[given:]
    found = [math.inf]
    for below in _conditions(goes_on, goes_on.outvars[0]):
        if below.primitive.name != "lt" or not isinstance(below.invars[1], Literal) or below.invars[0] not in carried:
            continue
        place = carried.index(below.invars[0])
        counted = [e for e in body.eqns if body.outvars[place] in e.outvars and e.primitive.name == "add"]
        steps = [e.invars[1] for e in counted if e.invars[0] is body.invars[passed + place]]
        numbers = [start[place], below.invars[1], *steps]
        if len(numbers) == 3 and all(
            isinstance(n, Literal) and jnp.issubdtype(jnp.result_type(n.val), jnp.integer) for n in numbers
        ):
            first, end, step = (int(n.val) for n in numbers)
            found += [max(0.0, math.ceil((end - first) / step))] if step > 0 else []
    return min(found)


def _conditions(program: Any, result: Any) -> Iterator[Any]:
    """The equations all of whose results must hold for a truth value of the program to hold."""
    for equation in program.eqns:
        if result in equation.outvars:
            if equation.primitive.name in ("and", "convert_element_type"):
                for operand in equation.invars:
                    yield from _conditions(program, operand)
            else:
                yield equation


def _inner(equation: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(list(equation.params.values())):
        program = getattr(value, "jaxpr", value)
        if hasattr(program, "eqns"):
            yield program


def _operations(equation: Any) -> float:
    """One for each number in the result; in a matrix product, two for each pair of factors."""
    size = sum(float(math.prod(getattr(result.aval, "shape", ()))) for result in equation.outvars)
    if equation.primitive.name != "dot_general":
        return size
    (contracted, _), _ = equation.params["dimension_numbers"]
    return 2 * size * math.prod(equation.invars[0].aval.shape[k] for k in contracted)
