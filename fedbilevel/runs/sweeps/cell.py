"""Settings and the outcomes of their runs, one for each seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedbilevel.runs.sweeps.batched_runs import DIVERGED, Outcome


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 for one value or none."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


class Cell(NamedTuple):
    """A cell of a grid, or a candidate, and the outcomes of its runs."""

    values: Mapping[str, Any]
    outcomes: list[Outcome]

    @property
    def diverged(self) -> int:
        """How many of its runs diverged."""
        return sum(outcome.status == DIVERGED for outcome in self.outcomes)

    def last(self, metric: str) -> list[float]:
        """The metric at the end of every run that did not diverge."""
        rows = [outcome.rows[-1] for outcome in self.outcomes if outcome.status != DIVERGED]
        return [math.nan if row[metric] is None else float(row[metric]) for row in rows]  # type: ignore[arg-type]

    def mean(self, metric: str) -> float:
        """The mean over the seeds; NaN if a run diverged."""
        return math.nan if self.diverged else statistics.fmean(self.last(metric))

    def deviation(self, metric: str) -> float:
        """The standard deviation over the seeds; 0 for one seed."""
        return deviation(self.last(metric))

    def summary(self, metric: str) -> dict[str, float]:
        """Both."""
        return {"mean": self.mean(metric), "deviation": self.deviation(metric)}
