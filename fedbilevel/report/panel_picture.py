"""A picture laid out like the paper's: a column for each panel; rows against rounds, megabytes and derivatives.

More panels than fit side by side go below one another.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.report.reproduction_text import scaled
from fedbilevel.report.styles import SCREEN, Style, legend_above, look, save
from fedbilevel.runs.reproductions.plan import Panel, Reproduction
from fedbilevel.runs.reproductions.results import Results, Row, Run, as_the_paper_counts
from fedbilevel.runs.sweeps.cell import deviation

AXES: list[tuple[str, Callable[[Row], float]]] = [
    ("communication rounds", lambda row: row.rounds),
    ("megabytes, up and down", lambda row: row.megabytes),
    ("gradients and second-order products", lambda row: row.derivatives),
]
WIDEST = 5  # panels side by side
PERFECT = 100.5  # per cent, slightly above what can be reached
TICKS, LOW_TICKS = (20, 50, 80, 90, 95, 97, 98, 99), (10, 20, 30, 40, 50)  # per cent
MARGIN = 0.05  # of the height, above and below all that is in view
LABELS = {"percent": "{} (%)\nstretched towards 100", "error": "test error (%)\nlog scale", "plain": "{}"}


def draw(plan: Reproduction, results: Results, paths: Sequence[Path], style: Style = SCREEN) -> None:
    """Means over the seeds, all in view, with bands of one standard deviation; the paper's own numbers as circles."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style.settings):
        shown = [(label, position, results) for label, position in AXES]
        if plan.communications is not None:
            shown.insert(0, ("communications by the paper's count", AXES[0][1], as_the_paper_counts(plan, results)))
        blocks = [plan.panels[k : k + WIDEST] for k in range(0, len(plan.panels), WIDEST)]
        wide = len(blocks[0])
        size = style.width * max(wide, 2) / 3, style.height * 2.6 * len(blocks) * len(shown) / len(AXES)
        figure = Figure(figsize=size, layout="constrained")
        grids = figure.subplots(len(blocks) * len(shown), wide, squeeze=False).reshape(len(blocks), len(shown), wide)
        named: dict[str, Any] = {}
        for block, grid in zip(blocks, grids, strict=True):
            for panel, axes in zip(block, grid.T, strict=False):
                for axis, (label, position, numbers) in zip(axes, shown, strict=True):
                    if axis is not axes[0]:
                        axis.sharey(axes[0])
                    named |= _panel(axis, plan, panel, numbers, position)
                    axis.set_xlabel(label)
                axes[0].set_title(panel.name)
                _paper(axes[0], plan, panel)
            for axis in grid[:, len(block) :].flat:
                axis.remove()
            for axis in grid[:, 0]:
                axis.set_ylabel(LABELS[plan.scale].format(plan.metric.replace("_", " ")))
        legend_above(figure, named.values(), named.keys())
        for path in paths:
            save(figure, path, style)


def _panel(axis: Any, plan: Reproduction, panel: Panel, results: Results, position: Callable[[Row], float]) -> dict[str, Any]:
    from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, MaxNLocator, NullLocator

    drawn = {}
    in_view = [y for _, _, y in _published(plan, panel)]
    for (of, method), runs in results.items():
        if of != panel.name:
            continue
        k = [m.name for m in plan.methods].index(method)
        at, mean, spread = _band(runs, position)
        values = [scaled(plan, v) for v in mean]
        width = [abs(scaled(plan, v + s) - scaled(plan, v)) for v, s in zip(mean, spread, strict=True)]
        drawn[method] = axis.plot(at, values, **look(k))[0]
        in_view += values
        low, high = ([v + sign * w for v, w in zip(values, width, strict=True)] for sign in (-1, 1))
        axis.fill_between(at, low, high, color=look(k)["color"], alpha=0.15, linewidth=0)
    in_view = [y for y in in_view if np.isfinite(y)]
    if plan.scale == "percent":  # stretched towards 100, where methods differ
        axis.set_yscale("function", functions=(lambda v: -np.log(PERFECT - np.minimum(v, 100)), lambda s: PERFECT - np.exp(-s)))
        axis.yaxis.set_major_locator(FixedLocator(TICKS if max(in_view, default=100) > TICKS[1] else LOW_TICKS))
        axis.yaxis.set_major_formatter("{x:g}")
    if plan.scale == "error":
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
    scale = axis.yaxis.get_transform()
    low, high = scale.transform(np.array([min(in_view, default=0), max(in_view, default=0)]))
    if 0 < high - low < np.inf:
        axis.set_ylim(scale.inverted().transform(np.array([low - MARGIN * (high - low), high + MARGIN * (high - low)])))
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    return drawn


def _band(runs: Sequence[Run], position: Callable[[Row], float]) -> tuple[list[float], list[float], list[float]]:
    """The positions, means and deviations over the runs that got that far."""
    longest = max(len(run.rows) for run in runs)
    moments = [[run.rows[k] for run in runs if k < len(run.rows)] for k in range(longest)]
    values = [[row.value for row in moment] for moment in moments]
    return (
        [statistics.fmean(position(row) for row in moment) for moment in moments],
        [statistics.fmean(v) for v in values],
        [deviation(v) for v in values],
    )


def _published(plan: Reproduction, panel: Panel) -> Iterator[tuple[str, float, float]]:
    """The paper's own numbers as points: the method, the round, and the metric as it is shown."""
    for method, numbers in plan.published.get(panel.name, {}).items():
        for column, value in zip(plan.columns, numbers, strict=True):
            yield (method, column.at, value) if column.at is not None else (method, value, scaled(plan, column.reach or 0.0))


def _paper(axis: Any, plan: Reproduction, panel: Panel) -> None:
    names = [m.name for m in plan.methods]
    for method, at, value in _published(plan, panel):
        color = look(names.index(method))["color"]
        axis.plot(at, value, marker="o", markerfacecolor="none", markeredgecolor=color, linestyle="none")
