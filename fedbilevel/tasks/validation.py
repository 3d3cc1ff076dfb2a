"""Validation rows: a part of each client's upper rows that no loss sees, to choose hyperparameters or a round by.

The metric on them is the task's headline where that is a mean over rows, such as an accuracy, and the upper loss otherwise.
Where a client has the same rows for both losses, validation rows are held out of both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.population import Shards
from fedbilevel.core.problem import LOSSES, Loss, Tree
from fedbilevel.errors import InputError
from fedbilevel.tasks.base import Better, Task, Validation

SHARE = 5  # one row in so many is held out
LEAST = 10  # rows, of all clients together


class Criterion(NamedTuple):
    """What hyperparameters are chosen by: a metric on validation rows, or the upper loss where a task allows none."""

    metric: str
    higher: bool  # whether higher values are better
    loss: Loss | None  # of validation rows; None: the metric is the upper loss
    why: str  # what the metric is, as a sentence


def criterion(task: Task, headline: str, better: Better) -> Criterion:
    """The criterion for a task with this headline."""
    problem = task.population.problem
    by_rows = {LOSSES[0]: problem.f, **dict(problem.metrics), **dict(problem.tests)}
    without = Criterion(LOSSES[0], False, None, "")
    if headline not in by_rows and len(by_rows) == 1:
        return without._replace(why=f"ranked by {LOSSES[0]}, since {headline} is not a mean over rows that could be held out.")
    if sum(np.asarray(task.population.upper.size) // SHARE) < LEAST:
        return without._replace(why=f"ranked by {LOSSES[0]}, since the clients have too few upper rows to hold any out.")
    chosen = headline if headline in by_rows else LOSSES[0]
    name = _name(chosen)
    while name in task.metric_names():
        name = f"validation_{name}"
    said = f"ranked by {name}, on one in {SHARE} of each client's upper rows, which are held out of the losses."
    return Criterion(name, better.get(chosen) == "higher", by_rows[chosen], said)


def with_validation(task: Task, headline: str, better: Better) -> Task:
    """The task with rows held out of its losses, and the metric on them; `InputError` if there can be none."""
    how = criterion(task, headline, better)
    if how.loss is None:
        raise InputError(f"this task can have no validation rows: it would be {how.why}")
    population = task.population
    upper, lower = population.upper, population.lower
    kept, held, owners = _parted(upper)
    shared = _same(upper, lower)
    smaller = replace(population, upper=kept, lower=kept if shared else lower)
    return replace(task, population=smaller, validation=Validation(how.metric, how.loss, held, owners, how.higher))


def directions(headline: str, better: Better) -> Better:
    """What is better for a task's metrics, the one on validation rows included."""
    return {_name(headline): better.get(headline, "lower"), **better}


def _name(metric: str) -> str:
    """The name of a metric on validation rows."""
    return "validation_" + ("loss" if metric == LOSSES[0] else metric.removeprefix("test_"))


def _parted(shards: Shards) -> tuple[Shards, Shards, jax.Array]:
    """The rows that remain, those that are held out, and the clients that these belong to."""
    kept, held, owners = list[Tree](), list[Tree](), list[int]()
    for m, (start, size) in enumerate(zip(np.asarray(shards.start), np.asarray(shards.size), strict=True)):
        drawn = np.random.default_rng([m, int(size)]).permutation(size) < size // SHARE
        rows = jax.tree.map(lambda a: np.asarray(a[start : start + size]), shards.rows)
        kept.append(jax.tree.map(lambda a: a[~drawn], rows))
        if drawn.any():
            held.append(jax.tree.map(lambda a: a[drawn], rows))
            owners.append(m)
    return Shards.stack(kept), Shards.stack(held), jnp.asarray(owners, jnp.int32)


def _same(upper: Shards, lower: Shards) -> bool:
    """Whether every client has the same rows for both losses."""
    ours, theirs = ([np.asarray(leaf) for leaf in jax.tree.leaves((s.size, s.rows))] for s in (upper, lower))
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))
