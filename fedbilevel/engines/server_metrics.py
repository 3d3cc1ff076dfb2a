"""The metrics that a server can compute without its clients' own values."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array
from jax.extend.core import Literal

from fedbilevel.tasks.base import Metrics, Task


def known_at_server(task: Task) -> Callable[[Array | None, Array | None], dict[str, Array]]:
    """The task's metrics; if the server does not know x or y, only those that do not depend on it."""

    def known(x: Array | None, y: Array | None) -> dict[str, Array]:
        if x is not None and y is not None:
            return task.metrics(x, y)
        at = [any_ if v is None else v for v, any_ in zip((x, y), task.start, strict=True)]
        free = _independent_of(task.metrics, at, [k for k, v in enumerate((x, y)) if v is None])
        return {name: value for name, value in task.metrics(*at).items() if name in free}

    return known


def _independent_of(metrics: Metrics, at: list[Array], unknown: list[int]) -> set[str]:
    """The names of the results that no operation connects to these arguments."""
    shapes = jax.eval_shape(metrics, *at)
    program = jax.make_jaxpr(metrics)(*at).jaxpr
    reached = {program.invars[k] for k in unknown}
    for equation in program.eqns:
        if any(not isinstance(v, Literal) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    outputs = dict(zip(jax.tree.leaves({name: name for name in shapes}), program.outvars, strict=True))
    return {name for name, v in outputs.items() if isinstance(v, Literal) or v not in reached}
