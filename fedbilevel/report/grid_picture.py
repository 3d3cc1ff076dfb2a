"""A picture of a sweep's grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.report.styles import SCREEN, Style, save
from fedbilevel.runs.sweeps.cell import Cell
from fedbilevel.runs.sweeps.sweep import Sweep


class HeatMap(NamedTuple):
    """A metric over the first two names of a grid, the best over the others; NaN where a run diverged."""

    down: str
    across: str
    rows: list[str]
    columns: list[str]
    numbers: list[list[float]]


def heat_map(sweep: Sweep, cells: Sequence[Cell], metric: str) -> HeatMap:
    """The heat map of a sweep's numbers."""
    down, across = [*sweep.grid, "", ""][:2]
    rows, columns = (sweep.grid.get(name, [None]) for name in (down, across))

    def best(row: Any, column: Any) -> float:
        here = [c for c in cells if (c.values.get(down), c.values.get(across)) == (row, column)]
        return sweep.ranked(here, metric)[0].mean(metric) if here else math.nan

    numbers = [[best(row, column) for column in columns] for row in rows]
    return HeatMap(down, across, [_text(v) for v in rows], [_text(v) for v in columns], numbers)


def grid(sweep: Sweep, cells: Sequence[Cell], metric: str, paths: Sequence[Path], style: Style = SCREEN) -> None:
    """Save the heat map at each of these paths, with crosses where a run diverged."""
    import matplotlib

    with matplotlib.rc_context(style.settings):
        drawn = figure(sweep, cells, metric, style)
        for path in paths:
            save(drawn, path, style)


def figure(sweep: Sweep, cells: Sequence[Cell], metric: str, style: Style = SCREEN) -> Any:
    """The heat map as a figure of matplotlib's."""
    import matplotlib

    with matplotlib.rc_context(style.settings):
        return _drawn(heat_map(sweep, cells, metric), metric, sweep.title(), style)


def _drawn(drawn: HeatMap, metric: str, title: str, style: Style) -> Any:
    from fedbilevel.report.shown_figure import ShownFigure

    down, across, rows, columns, numbers = drawn
    unit = style.settings["font.size"] / 10  # inches grow with the font size
    width, height = max(4.5, 1 + 1.1 * len(columns)) * unit, max(3, 1.4 + 0.55 * len(rows)) * unit
    figure = ShownFigure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    for r, row in enumerate(numbers):
        for c, number in enumerate(row):
            box = dict(boxstyle="round", fc="white", ec="none", alpha=0.8)
            axis.text(
                c, r, "×" if math.isnan(number) else f"{number:.3g}", ha="center", va="center", fontsize="small", bbox=box
            )
    image = axis.imshow(numbers, cmap="cividis", aspect="auto")
    figure.colorbar(image, ax=axis, label=metric.replace("_", " "))
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xticks(range(len(columns)), columns)
    axis.set(ylabel=down, xlabel=across, title=title)
    return figure


def _text(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
