"""A picture of a sweep's grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbilevel.sweeps.sweep import Cell, Sweep, ranked


def grid(sweep: Sweep, cells: Sequence[Cell], metric: str, path: Path) -> None:
    """The metric over the first two names of the grid, the best over the others; crosses where a run diverged."""
    from matplotlib.figure import Figure

    names = list(sweep.grid)
    down, across = names[0], names[1] if len(names) > 1 else None
    rows: Sequence[Any] = sweep.grid[down]
    columns: Sequence[Any] = sweep.grid[across] if across else [None]
    figure = Figure(figsize=(max(4.5, 1 + 1.1 * len(columns)), max(3, 1.4 + 0.55 * len(rows))), layout="constrained")
    axis = figure.subplots()
    numbers = [[math.nan] * len(columns) for _ in rows]
    for r, row in enumerate(rows):
        for c, column in enumerate(columns):
            here = [cell for cell in cells if cell.values[down] == row and (across is None or cell.values[across] == column)]
            if not here:
                continue
            best = ranked(here, metric)[0]
            numbers[r][c] = best.mean(metric)
            text = "×" if math.isnan(best.mean(metric)) else f"{best.mean(metric):.3g}"
            axis.text(
                c, r, text, ha="center", va="center", fontsize=9, bbox=dict(boxstyle="round", fc="white", ec="none", alpha=0.8)
            )
    image = axis.imshow(numbers, cmap="cividis", aspect="auto")
    figure.colorbar(image, ax=axis, label=metric.replace("_", " "))
    axis.set_yticks(range(len(rows)), [f"{v:g}" if isinstance(v, float) else str(v) for v in rows])
    axis.set_xticks(range(len(columns)), ["" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for v in columns])
    axis.set(ylabel=down, xlabel=across or "", title=f"{sweep.algorithm} on {sweep.task}, {sweep.seeds} seeds")
    figure.savefig(path, dpi=150)
