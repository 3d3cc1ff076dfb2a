"""The metrics that a server can compute without its clients' own values."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Literal

from fedbilevel.tasks.base import Metrics, Task


def known_at_server(task: Task) -> Callable[[Array, Array | None], dict[str, Array]]:
    """The task's metrics; if the server does not know y, only those that do not depend on it."""

    def known(x: Array, y: Array | None) -> dict[str, Array]:
        if y is not None:
            return task.metrics(x, y)
        rows = jnp.zeros((task.population.size, *task.y.shape), task.y.dtype)
        free = _independent_of_second(task.metrics, x, rows)
        return {name: value for name, value in task.metrics(x, rows).items() if name in free}

    return known


def _independent_of_second(metrics: Metrics, x: Array, y: Array) -> set[str]:
    """The names of the results that no operation connects to the second argument."""
    shapes = jax.eval_shape(metrics, x, y)
    program = jax.make_jaxpr(metrics)(x, y).jaxpr
    reached = set(program.invars[1:])
    for equation in program.eqns:
        if any(not isinstance(v, Literal) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    outputs = dict(zip(jax.tree.leaves({name: name for name in shapes}), program.outvars, strict=True))
    return {name for name, v in outputs.items() if isinstance(v, Literal) or v not in reached}
