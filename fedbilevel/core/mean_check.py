"""Whether the losses and metrics are means over their rows, as they must be where the number of rows varies.

On minibatches, and for clients with unequally many rows, a sum, a median or a loss that compares rows with each other
would make another problem than the one that was written down, and a metric such as a root mean square another number.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.population import Population
from fedbilevel.core.problem import Loss, Tree, alone
from fedbilevel.core.sets import ConvexSet
from fedbilevel.errors import InputError

DISTANCES = 0.1, 1.0  # the further from the start, the less a regulariser hides, and the sooner a loss is not finite


def check_means(population: Population, x: Array, y: Array, pooled: bool = False) -> None:
    """Raise `InputError` if f, g or a metric is asked for unequal numbers of rows and is no mean over them at (x, y), or near.

    A few rows of one client are enough to tell, but not at (x, y) alone, where a loss may be zero however it is made.
    `pooled` says that rows of several clients are taken together, or may be elsewhere.
    """
    problem, upper, lower, test = population.problem, population.upper, population.lower, population.test
    points = [(near(x, problem.sets.x, distance), near(y, problem.sets.y, distance)) for distance in DISTANCES]
    drawn = pooled or population.batch_size is not None
    losses = [("f", problem.f, upper, drawn), ("g", problem.g, lower, drawn)]
    for metrics, shards in ((problem.metrics, upper), (problem.lower_metrics, lower), (problem.tests, test)):
        if shards is not None:
            losses += [(name, metric, shards, pooled) for name, metric in metrics]
    for name, loss, shards, varies in losses:
        for point in ((x, y), *points) if varies or not shards.equal else ():
            values = _together_and_alone(loss, *point, shards.some())
            tolerance = float(jnp.finfo(values[0].dtype).eps) ** (1 / 3)  # wide enough for numbers that cancel
            together, mean, size = map(float, values)
            if math.isfinite(together) and not abs(together - mean) <= tolerance * max(size, abs(together)):
                raise InputError(
                    f"{name} must be a mean over its rows where their number varies: on some rows of a client it is "
                    f"{together:.6g}, and the mean of its values on each of these alone is {mean:.6g}; take jnp.mean over "
                    "the rows, or give all clients equally many and no batch_size"
                )


@partial(jax.jit, static_argnums=0)
def _together_and_alone(loss: Loss, x: Array, y: Array, rows: Tree) -> tuple[Array, Array, Array]:
    """The loss on all rows, the mean of its values on each alone, and the mean size of those."""
    x, y, rows = jax.tree.map(_wide, (x, y, rows))
    with jax.default_matmul_precision("highest"):
        each = alone(loss, x, y, rows)
        return loss(x, y, rows), each.mean(), jnp.abs(each).mean()


def _wide(a: Array) -> Array:
    """Half precision in single precision, so that rounding hides nothing."""
    return a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4 else a


def near(v: Array, within: ConvexSet, distance: float) -> Array:
    """A point of the set about so far away in every direction, in units of 1 + |v|."""
    step = distance * np.random.default_rng(0).standard_normal(v.shape)
    return within.project(jnp.asarray(np.asarray(v) * (1 + step) + step, v.dtype))
