"""Critical-difference diagrams: mean ranks for each cost, with bars over those that Nemenyi's test does not tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbilevel.report.styles import COLOURS, SCREEN, Style, save
from fedbilevel.runs.reproductions.league import Standing, alike, friedman

ROW = 0.24  # inches for a method's name, or a bar


def draw(standings: Sequence[Standing], paths: Sequence[Path], style: Style = SCREEN) -> None:
    """Save the diagrams, one below another, at each of these paths."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style.settings):
        rows = [_rows(standing) for standing in standings]
        figure = Figure(figsize=(style.width * 0.8, ROW * sum(rows)), layout="constrained")
        axes = figure.subplots(len(standings), 1, squeeze=False, height_ratios=rows)
        for axis, standing in zip(axes.flat, standings, strict=True):
            _diagram(axis, standing)
        for path in paths:
            save(figure, path, style)


def _bars(standing: Standing) -> list[tuple[float, float]]:
    return alike(list(standing.mean_ranks), friedman(standing.ranks).critical_difference)


def _rows(standing: Standing) -> int:
    """The height of a diagram, in names: its title, its scale, the difference, bars, and half of the methods on each side."""
    return 5 + len(_bars(standing)) + -(-len(standing.methods) // 2)


def _diagram(axis: Any, standing: Standing) -> None:
    methods, bars, difference = len(standing.methods), _bars(standing), friedman(standing.ranks).critical_difference
    axis.set_title(f"mean ranks at equal {standing.cost}", loc="left")
    axis.set_xlim(1 - 0.6 * methods, methods + 0.6 * methods)
    axis.set_ylim(_rows(standing) - 2, -2)
    axis.axis("off")
    axis.plot([1, methods], [0, 0], color="black", linewidth=1)
    for rank in range(1, methods + 1):
        axis.plot([rank, rank], [0, -0.25], color="black", linewidth=1)
        axis.text(rank, -0.4, str(rank), ha="center", va="bottom", fontsize="small")
    axis.plot([1, 1 + difference], [-1.6, -1.6], color=COLOURS[1], linewidth=2)
    axis.text(1 + difference, -1.6, f"  critical difference {difference:.2f}", va="center", fontsize="small")
    for k, (first, last) in enumerate(bars):
        axis.plot([first - 0.04, last + 0.04], [0.6 + k, 0.6 + k], color=COLOURS[0], linewidth=3)
    half = -(-methods // 2)
    for place, j in enumerate(standing.best_first):
        rank, left = standing.mean_ranks[j], place < half
        row = len(bars) + 1 + (place if left else methods - 1 - place)
        end = 1 - 0.08 * methods if left else methods + 0.08 * methods
        axis.plot([rank, rank, end], [0, row, row], color="black", linewidth=0.8)
        name, side = standing.methods[j], "right" if left else "left"
        axis.text(end, row, f"{name} " if left else f" {name}", ha=side, va="center")
