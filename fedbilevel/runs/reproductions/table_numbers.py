"""The numbers of a table: a method's metric in each column and at a budget that all methods share, and its costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedbilevel.runs.reproductions.plan import Column, Reproduction
from fedbilevel.runs.reproductions.results import Row, Run
from fedbilevel.runs.sweeps.batched_runs import DIVERGED
from fedbilevel.runs.sweeps.cell import deviation


class Number(NamedTuple):
    """A mean over those runs that have the number."""

    mean: float
    deviation: float
    of: int  # runs that have it
    runs: int  # all runs

    @classmethod
    def over(cls, values: Sequence[float | None]) -> Number | None:
        """The mean over what is known; None if nothing is."""
        known = [v for v in values if v is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), deviation(known), len(known), len(values))


def columns(plan: Reproduction) -> Sequence[Column]:
    """The columns of a plan's table; one for the end of the runs if the paper has no table."""
    return plan.columns or [Column(at=plan.rounds)]


def number(runs: Sequence[Run], column: Column) -> Number | None:
    """A line's entry in a column."""
    if column.at is not None:
        return Number.over([run.after(column.at) for run in runs])
    return Number.over([run.until(column.reach or 0.0) for run in runs])


def least_spent(lines: Sequence[Sequence[Run]], cost: Callable[[Row], float]) -> float:
    """What every line has spent, each as much as its costliest run; runs that diverged are left out."""
    ended = [[run.rows[-1] for run in runs if run.status != DIVERGED] for runs in lines]
    return min((max(cost(row) for row in line) for line in ended if line), default=0.0)


def metric_at(run: Run, cost: Callable[[Row], float], limit: float) -> float | None:
    """A run's metric after spending so much; None if it had diverged, or had no metrics after its start yet."""
    return run._replace(rows=run.rows[1:]).when(cost, limit)


class Budget(NamedTuple):
    """What every method of a panel has spent: each spent as much as its costliest run, and the least of these counts."""

    megabytes: float
    derivatives: float

    @classmethod
    def common(cls, lines: Sequence[Sequence[Run]]) -> Budget:
        """The budget of a panel's lines; runs that diverged are left out."""
        return cls(least_spent(lines, lambda row: row.megabytes), least_spent(lines, lambda row: row.derivatives))

    def reached(self, run: Run) -> tuple[float | None, float | None]:
        """A run's metric after spending the megabytes, and the derivatives; None if it had diverged, or had no metrics yet."""
        return (
            metric_at(run, lambda row: row.megabytes, self.megabytes),
            metric_at(run, lambda row: row.derivatives, self.derivatives),
        )

    def numbers(self, runs: Sequence[Run]) -> list[Number | None]:
        """A line's entries for equal megabytes, and for equal derivatives."""
        return [Number.over(reached) for reached in zip(*map(self.reached, runs), strict=True)]


def spent(runs: Sequence[Run]) -> list[float]:
    """Megabytes, gradients and second-order products of a run: means over those that did not diverge, if there are any.

    A run that diverged before its first row counts as having spent nothing.
    """
    counted = [run for run in runs if run.status != DIVERGED] or runs
    ends = [(e.megabytes, e.gradients, e.second_order) for run in counted for e in run.rows[-1:]] or [(0.0, 0, 0)]
    return [sum(values) / len(counted) for values in zip(*ends, strict=True)]
