"""Pictures of curves, for a screen or a paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.report.confidence import band
from fedbilevel.report.curves import Curve, in_series
from fedbilevel.report.styles import SCREEN, Style, legend_above, look, save

FORMATS = (".png", ".svg")


def draw(curves: Sequence[Curve], path: Path, style: Style = SCREEN) -> list[Path]:
    """The headline metric against rounds and against megabytes, and the upper loss against rounds.

    They are written as PNG and SVG, and in the format that `path` ends in if that is another; returns the paths.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style.settings):
        figure = Figure(figsize=(style.width, style.height), layout="constrained")
        panels: list[tuple[str, str, Callable[[Curve, dict[str, Any]], float]]] = [
            (curves[0].headline, "communication rounds", lambda curve, row: row["rounds"]),
            (curves[0].headline, "megabytes, up and down", lambda curve, row: curve.megabytes(row, "up", "down")),
            ("upper_loss", "communication rounds", lambda curve, row: row["rounds"]),
        ]
        for axis, (metric, label, position) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            panel(axis, curves, metric, position)
            axis.set_xlabel(label)
        handles, names = figure.axes[0].get_legend_handles_labels()
        legend_above(figure, handles, names)
        written = list(dict.fromkeys([*(path.with_suffix(suffix) for suffix in FORMATS), path]))
        for file in written:
            save(figure, file, style)
    return written


def panel(axis: Any, curves: Sequence[Curve], metric: str, position: Callable[[Curve, dict[str, Any]], float]) -> None:
    """Draw a metric of the curves at their rows' positions; on a logarithmic scale, and labelled so, if it falls a hundredfold.

    Of runs that differ only in their seed it draws the mean and its confidence interval. A cross is where a run that diverged
    was last measured.
    """
    lowest, highest = float("inf"), 0.0
    for k, series in enumerate(in_series(curves)):
        rows = [[row for row in run.rows if row.get(metric) is not None] for run in series.runs]
        values = [[row[metric] for row in of_run] for of_run in rows]
        at = [[position(run, row) for row in of_run] for run, of_run in zip(series.runs, rows, strict=True)]
        found = [value for of_run in values for value in of_run]
        lowest, highest = min([lowest, *found]), max([highest, *found])
        common = band(at, values) if len(values) > 1 else None
        if common:
            axis.fill_between(common.at, common.low, common.high, color=look(k)["color"], alpha=0.2, linewidth=0)
            at, values = [common.at], [common.mean]
        for n, (positions, line) in enumerate(zip(at, values, strict=True)):
            axis.plot(positions, line, label=series.label if n == 0 else None, **look(k))
            if series.runs[0].status == "diverged" and line:
                axis.plot(positions[-1], line[-1], marker="x", markersize=8, color=look(k)["color"])
    logarithmic = 0 < lowest < highest / 100
    if logarithmic:
        axis.set_yscale("log")
    axis.set_ylabel(metric.replace("_", " ") + (" (log scale)" if logarithmic else ""))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
