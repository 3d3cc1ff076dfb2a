"""Count the matrix products that an algorithm's step requires: those in its client functions, without repeats.

A step runs without numbers but with its own keys, so random chains and loops have their true lengths. What a client function
must compute is read from its trace: equal operations count once, as do results that several derivatives share, and unused
operations do not count. Only matrix products count, since the machine's rate is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Literal
from peak import Shape

from fedbilevel.core.traffic import Totals, Traffic
from fedbilevel.engines.simulated_clients import ClientCall, Rehearsed
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.simulation import simulated

THOUSAND = 1000  # since the counts of a call are words of 32 bits
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}


def of_steps(experiment: Experiment, count: int) -> int:
    """The floating-point operations in matrix products of the first so many steps."""
    engine, algorithm, task = simulated(experiment), experiment.algorithm, experiment.task
    state = engine.state_shapes(algorithm, task.x, task.y, jax.random.key(0))

    @jax.jit
    def of_step(key: Array) -> Traffic:
        return engine.rehearse_step(counted, algorithm, state, key)

    keys = [jax.random.fold_in(jax.random.key(experiment.options.seed), t) for t in range(count)]
    return THOUSAND * sum(Totals().plus(of_step(key)).up for key in keys)


def counted(call: ClientCall) -> Rehearsed:
    """Thousands of operations that the active members of a call would do."""
    each = products(jax.make_jaxpr(call.compute)(call.row()).jaxpr)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), call.result())
    return Rehearsed(zeros, (call.active.sum(dtype=jnp.uint32) * round(each / THOUSAND), 0))


def largest(experiment: Experiment) -> Shape:
    """The largest product of a client in a step, for as many clients as are computed together."""
    engine, algorithm, task = simulated(experiment), experiment.algorithm, experiment.task
    state = engine.state_shapes(algorithm, task.x, task.y, jax.random.key(0))
    found: list[Shape] = []

    def watch(call: ClientCall) -> Rehearsed:
        program = jax.make_jaxpr(call.compute)(call.row()).jaxpr
        found.extend(shape._replace(batch=shape.batch * len(call.members)) for shape in _shapes(program))
        return Rehearsed(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), call.result()))

    jax.eval_shape(lambda key: engine.rehearse_step(watch, algorithm, state, key), jax.random.key(0))
    return max(found, key=lambda shape: shape.operations)


def _shapes(program: Any) -> Iterator[Shape]:
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            (summed, other), (batch, _) = equation.params["dimension_numbers"]
            left, right = (v.aval.shape for v in equation.invars)
            each, inner = (math.prod(left[k] for k in axes) for axes in (batch, summed))
            sides = math.prod(left) // (each * inner), math.prod(right) // (each * math.prod(right[k] for k in other))
            yield Shape(each, sides[0], inner, sides[1])
        for inside in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(inside, "eqns") or hasattr(inside, "jaxpr"):
                yield from _shapes(getattr(inside, "jaxpr", inside))


def products(program: Any) -> int:
    """The operations in the matrix products that a program's results need."""
    graph = Graph()
    needed = graph.results(program, [graph.node(("argument", k)) for k in range(len(program.invars))])
    return graph.operations(needed)


class Graph:
    """A program's operations, each different one once."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._inputs: list[tuple[int, ...]] = []
        self._costs: list[int] = []

    def node(self, what: Any, inputs: tuple[int, ...] = (), cost: int = 0) -> int:
        """The number of an operation on others' results."""
        if (what, inputs) not in self._numbers:
            self._numbers[what, inputs] = len(self._costs)
            self._inputs.append(inputs)
            self._costs.append(cost)
        return self._numbers[what, inputs]

    def results(self, program: Any, arguments: Sequence[int]) -> list[int]:
        """The nodes of a program's results, from those of its arguments."""
        known = dict(zip(program.invars, arguments, strict=True))
        known |= {constant: self.node(("constant", id(constant))) for constant in program.constvars}

        def read(variable: Any) -> int:
            return self.node(("literal", str(variable.val))) if isinstance(variable, Literal) else known[variable]

        for equation in program.eqns:
            inputs = tuple(map(read, equation.invars))
            name = equation.primitive.name
            if name in INLINED:
                inner = equation.params[INLINED[name]]
                results = self.results(getattr(inner, "jaxpr", inner), inputs)
            else:
                one = self.node((name, str(equation.params)), inputs, _cost(equation))
                results = [self.node(("result", k), (one,)) for k in range(len(equation.outvars))]
            known |= dict(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in program.outvars]

    def operations(self, needed: Sequence[int]) -> int:
        """What the needed nodes cost, with all that they need."""
        reached, waiting = set(needed), list(needed)
        while waiting:
            more = set(self._inputs[waiting.pop()]) - reached
            reached |= more
            waiting += more
        return sum(self._costs[k] for k in reached)


def _cost(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[k] for k in contracted)
    if name == "scan":
        return params["length"] * products(params["jaxpr"].jaxpr)
    inner = [p for p in jax.tree.leaves(list(params.values())) if hasattr(p, "jaxpr")]
    if any(products(p.jaxpr) for p in inner):
        raise NotImplementedError(f"matrix products inside {name}, whose number of times is not known")
    return 0
