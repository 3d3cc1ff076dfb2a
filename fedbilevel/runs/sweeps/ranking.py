"""What runs with different settings are ranked by: a metric on validation rows, unless the user names another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fedbilevel.errors import InputError
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.sweeps.cell import Cell
from fedbilevel.settings import nearest
from fedbilevel.tasks.base import Better
from fedbilevel.tasks.validation import Criterion, criterion


def criterion_of(configuration: Configuration, by: str = "") -> Criterion:
    """What ranks runs like this one: the metric of that name, or unless one is given the task's validation metric."""
    cls, options = configuration.task_class(), replace(configuration.options, validation=False)
    task = replace(configuration, options=options).built_task()
    unless_given = criterion(task, cls.headline, cls.better)
    if by in ("", unless_given.metric):
        return unless_given
    if by not in (known := task.metric_names()):
        raise InputError(f"there is no metric {by!r} to rank by{nearest(by, dict.fromkeys([*known, unless_given.metric]))}")
    return Criterion(by, cls.better.get(by) == "higher", None, "")


def ranked(cells: Sequence[Cell], metric: str, better: Better) -> list[Cell]:
    """The cells from best to worst by this metric; those with a run that diverged come last."""
    sign = -1 if better.get(metric) == "higher" else 1

    def rank(cell: Cell) -> tuple[bool, float]:
        mean = cell.mean(metric)
        return (True, 0.0) if math.isnan(mean) else (False, sign * mean)

    return sorted(cells, key=rank)
