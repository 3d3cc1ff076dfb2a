"""Pictures of curves, as PNG and SVG, for a screen or a paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.report.curves import Curve
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
            axis.set(xlabel=label, ylabel=metric.replace("_", " "))
        handles, names = figure.axes[0].get_legend_handles_labels()
        legend_above(figure, handles, names)
        written = list(dict.fromkeys([*(path.with_suffix(suffix) for suffix in FORMATS), path]))
        for file in written:
            save(figure, file, style)
    return written


def panel(axis: Any, curves: Sequence[Curve], metric: str, position: Callable[[Curve, dict[str, Any]], float]) -> None:
    """Draw a metric of the curves at their rows' positions; on a logarithmic scale if it falls a hundredfold."""
    lowest, highest = float("inf"), 0.0
    for k, curve in enumerate(curves):
        rows = [row for row in curve.rows if row.get(metric) is not None]
        values = [row[metric] for row in rows]
        lowest, highest = min([lowest, *values]), max([highest, *values])
        axis.plot([position(curve, row) for row in rows], values, label=curve.label, **look(k))
    if 0 < lowest < highest / 100:
        axis.set_yscale("log")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
