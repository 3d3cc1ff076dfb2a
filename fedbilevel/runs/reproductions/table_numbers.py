"""The numbers of a table: a method's in each column, what it reaches for as much as the others spend, and what it spends."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fedbilevel.runs.reproductions.plan import Column, Reproduction
from fedbilevel.runs.reproductions.results import Run
from fedbilevel.runs.sweeps.batched_runs import DIVERGED
from fedbilevel.runs.sweeps.sweep import deviation


class Number(NamedTuple):
    """A mean over the runs that have such a number."""

    mean: float
    deviation: float
    of: int
    runs: int

    @classmethod
    def over(cls, values: Sequence[float | None]) -> Number | None:
        """None if no run has one."""
        known = [v for v in values if v is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), deviation(known), len(known), len(values))


def columns(plan: Reproduction) -> Sequence[Column]:
    """Of its table: the end of the runs if the paper has none."""
    return plan.columns or [Column(at=plan.rounds)]


def number(runs: Sequence[Run], column: Column) -> Number | None:
    """A line's entry in a column."""
    if column.at is not None:
        return Number.over([run.after(column.at) for run in runs])
    return Number.over([run.until(column.reach or 0.0) for run in runs])


class Budget(NamedTuple):
    """What every method of a panel can spend: the least that one of them spent, its runs' largest."""

    megabytes: float
    derivatives: float

    @classmethod
    def common(cls, lines: Sequence[Sequence[Run]]) -> Budget:
        """Of a panel's lines, runs aside that diverged."""
        ended = [[run.rows[-1] for run in runs if run.status != DIVERGED] for runs in lines]
        ends = [line for line in ended if line]
        return cls(
            min((max(row.megabytes for row in line) for line in ends), default=0.0),
            min((max(row.derivatives for row in line) for line in ends), default=0.0),
        )

    def reached(self, run: Run) -> tuple[float | None, float | None]:
        """A run's metric when it has spent the one, and the other; None if it had diverged, or was not measured by then."""
        measured = run._replace(rows=run.rows[1:])
        return (
            measured.when(lambda row: row.megabytes, self.megabytes),
            measured.when(lambda row: row.derivatives, self.derivatives),
        )

    def numbers(self, runs: Sequence[Run]) -> list[Number | None]:
        """A line's entries for the one, and for the other."""
        return [Number.over(reached) for reached in zip(*map(self.reached, runs), strict=True)]


def spent(runs: Sequence[Run]) -> list[float]:
    """Megabytes, gradients and second-order products of a run: means over those that did not diverge, if there are any.

    A run that diverged before its first row counts as having spent nothing.
    """
    counted = [run for run in runs if run.status != DIVERGED] or runs
    ends = [(e.megabytes, e.gradients, e.second_order) for run in counted for e in run.rows[-1:]] or [(0.0, 0, 0)]
    return [sum(values) / len(counted) for values in zip(*ends, strict=True)]
