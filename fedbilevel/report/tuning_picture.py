"""A picture of a tuning: its rungs, and its candidates in parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.report.styles import COLOURS, SCREEN, Style, save
from fedbilevel.runs.tuning.found import Found

WIDE = 30  # from the lowest to the highest number: drawn on a logarithmic scale


class Line(NamedTuple):
    """A candidate as it is drawn: its values, and the metric at the end of each rung that it reached."""

    search: int
    values: list[float]
    rounds: list[int]
    numbers: list[float]  # NaN where it diverged
    last: bool  # whether it reached the last rung
    best: bool


def lines(found: Found) -> list[Line]:
    """All candidates, those that came farthest last."""
    tuning, best = found.tuning, found.best()
    drawn = [
        Line(
            search,
            list(rungs[0].values.values()),
            [tuning.rounds(rung) for rung in range(len(rungs))],
            [cell.mean(tuning.metric) for cell in rungs],
            len(rungs) == tuning.rungs,
            best is not None and rungs[-1] == best,
        )
        for search, _, rungs in found.climbed()
    ]
    return sorted(drawn, key=lambda line: (len(line.rounds), line.best))


def draw(found: Found, paths: Sequence[Path], style: Style = SCREEN) -> None:
    """Save the picture at each of these paths."""
    import matplotlib

    with matplotlib.rc_context(style.settings):
        drawn = figure(found, style)
        for path in paths:
            save(drawn, path, style)


def figure(found: Found, style: Style = SCREEN) -> Any:
    """The picture as a figure of matplotlib's: rungs on the left, candidates on the right."""
    import matplotlib

    from fedbilevel.report.shown_figure import ShownFigure

    with matplotlib.rc_context(style.settings):
        drawn = ShownFigure(figsize=(style.width, style.height), layout="constrained")
        rungs, candidates = drawn.subplots(1, 2)
        every = lines(found)
        for line in every:
            look = _look(line)
            rungs.plot(line.rounds, line.numbers, marker="o", markersize=3, **look)
            candidates.plot(range(len(line.values)), line.values, marker="o", markersize=3, **look)
        known = [number for line in every for number in line.numbers if math.isfinite(number)]
        wide = bool(known) and min(known) > 0 and max(known) > WIDE * min(known)
        metric = found.tuning.metric.replace("_", " ")
        rungs.set(xscale="log", yscale="log" if wide else "linear", xlabel="communication rounds", ylabel=metric)
        names = [name.replace("+", "\n") for name in found.tuning.boxes]
        candidates.set_xticks(range(len(names)), names)
        candidates.set(yscale="log")
        drawn.suptitle(f"{found.tuning.title()}: its rungs, and its candidates")
        return drawn


def _look(line: Line) -> dict[str, Any]:
    """Dotted if it diverged, faint if it was left behind, wide if it reached the last rung."""
    if not math.isfinite(line.numbers[-1]):
        return dict(color="0.7", linewidth=0.8, linestyle=":")
    if line.last:
        return dict(color=COLOURS[1 if line.best else 0], linewidth=3 if line.best else 1.8, zorder=3 + line.best)
    return dict(color=COLOURS[0], linewidth=0.8, alpha=0.35)
