"""Runs side by side: the numbers at their ends, for the terminal and for other tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from fedbilevel.core.problem import LOSSES
from fedbilevel.report.confidence import interval
from fedbilevel.report.curves import Curve, Series, in_series, metrics

COSTS = ("rounds", "MB up", "MB down", "seconds")


class Cell(NamedTuple):
    """A number in words, and whether it is the best of its column."""

    text: str
    value: float | None  # the mean over seeds; None if there is none
    best: bool = False


class Line(NamedTuple):
    """The numbers of a run, or of several that differ only in their seed."""

    series: Series
    cells: list[Cell]

    @property
    def label(self) -> str:
        """The name of the series."""
        return self.series.label


class Comparison(NamedTuple):
    """The numbers at the ends of runs."""

    columns: list[str]
    lines: list[Line]


def compared(curves: Sequence[Curve]) -> Comparison:
    """For each run, or series of seeds, its metrics and what it took; over seeds the mean with its confidence interval.

    Of the two losses there is one only if runs are compared by it.
    """
    shown = [name for name in metrics(curves) if name not in LOSSES or name in {curve.headline for curve in curves}]
    series = in_series(curves)
    best = {name: _best(name, series) for name in shown}
    lines = [Line(one, [*(_cell(one.ends(m), one is best[m]) for m in shown), *_costs(one)]) for one in series]
    return Comparison([*(name.replace("_", " ") for name in shown), *COSTS], lines)


def table(curves: Sequence[Curve]) -> Table:
    """The comparison for a terminal; the best of each metric is bold."""
    comparison = compared(curves)
    out = Table(box=None, pad_edge=False, header_style="bold")
    out.add_column("run", overflow="fold")
    for name in comparison.columns:
        out.add_column(name, justify="right")
    for line in comparison.lines:
        out.add_row(line.label, *(Text(cell.text, "bold" if cell.best else "") for cell in line.cells))
    return out


def _cell(ends: Sequence[float], best: bool) -> Cell:
    if len(ends) < 2:
        return Cell("".join(f"{value:.4g}" for value in ends), ends[0] if ends else None, best)
    mean, half = interval(ends)
    return Cell(f"{mean:.4g} ± {half:.2g}", mean, best)


def _costs(series: Series) -> list[Cell]:
    last = [(run, run.rows[-1]) for run in series.runs]
    means = [np.mean([row["rounds"] for _, row in last])]
    means += [np.mean([run.megabytes(row, direction) for run, row in last]) for direction in ("up", "down")]
    means += [np.mean([row["seconds"] for _, row in last])]
    return [Cell(f"{mean:.{digits}f}", float(mean)) for mean, digits in zip(means, (0, 2, 2, 1), strict=True)]


def _best(name: str, series: Sequence[Series]) -> Series | None:
    """The series with the best mean of a metric, of those that finished; None if there is nothing to compare."""
    finished = [one for one in series if one.runs[0].status == "finished" and one.ends(name)]
    if len(finished) < 2:
        return None
    choose = max if finished[0].runs[0].better.get(name) == "higher" else min
    return choose(finished, key=lambda one: float(np.mean(one.ends(name))))
