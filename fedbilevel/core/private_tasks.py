"""Whether the rows of a task can be kept private: its losses are means over them, and x belongs to all of them."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.mean_check import DISTANCES, check_means, near
from fedbilevel.core.population import Population
from fedbilevel.core.privacy import row_derivative
from fedbilevel.core.problem import Loss, Tree
from fedbilevel.errors import InputError


def require_private(population: Population, x: Array, y: Array) -> None:
    """Raise `InputError` unless derivatives of the losses near (x, y) can be made private row by row.

    Noise would hide what an entry of x that belongs to one row learns from that row, which is all that it learns.
    """
    if population.own_x is not None:
        raise InputError(
            "each client has an x of its own, which would keep what noise hides: privacy of rows is for tasks whose x is shared"
        )
    check_means(population, x, y, pooled=True)
    problem, rows = population.problem, population.some_rows()
    x, y = near(x, problem.sets.x, DISTANCES[1]), near(y, problem.sets.y, DISTANCES[1])
    for name, loss, some, v in (("fx", problem.f, rows.upper, None), ("gxy", problem.g, rows.lower, jnp.ones_like(y))):
        each = _each(name, loss, x, y, some, v)
        reached = np.unique(np.asarray(each) != 0, axis=0)
        if len(reached) > 1 and all((a.any() and b.any() and not (a & b).any()) for a, b in combinations(reached, 2)):
            raise InputError(
                "x has entries of its own for single rows, and noise that hides a row hides all that these entries are for: "
                "privacy of rows is for tasks whose x is shared by all rows"
            )


@partial(jax.jit, static_argnums=(0, 1))
def _each(name: str, loss: Loss, x: Array, y: Array, rows: Tree, v: Array | None) -> Array:
    return jax.vmap(lambda row: row_derivative(name, loss, x, y, row, v))(rows)
