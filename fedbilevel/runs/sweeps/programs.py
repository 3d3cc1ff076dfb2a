"""Which runs of a sweep are computed together, as one program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from fedbilevel.core.devices import memory
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.sweeps.batched_runs import bytes_of

MOST_TOGETHER = 64  # runs in one program: results are written after each program
LARGE = 50_000_000  # bytes: a run of this size keeps a CPU busy, and several at once only get in each other's way


def alike(runs: Iterable[tuple[Any, Configuration]]) -> list[list[tuple[Any, Configuration]]]:
    """The runs in groups with the same task, whose algorithms differ only in their real numbers."""
    groups: dict[Any, list[tuple[Any, Configuration]]] = {}
    for run in runs:
        task, algorithm = tuple(run[1].knobs.items()), run[1].configured_algorithm()
        groups.setdefault((task, jax.tree.structure(algorithm)), []).append(run)
    return list(groups.values())


def most_together(experiment: Experiment) -> int:
    """How many runs like this one should be one program: as many as fit into memory, and gain by it."""
    needed = bytes_of(experiment)
    return 1 if jax.default_backend() == "cpu" and needed > LARGE else max(1, min(MOST_TOGETHER, memory() // 2 // needed))


def programs(runs: Iterable[tuple[Any, Configuration]]) -> Iterator[list[tuple[Any, Experiment]]]:
    """The runs in groups that can be one program and that fit into memory."""
    for group in alike(runs):
        size = most_together(group[0][1].experiment())
        for first in range(0, len(group), size):
            yield [(run, configuration.experiment()) for run, configuration in group[first : first + size]]
