"""The cells of a sweep's grid as a table for reading, from best to worst."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedbilevel.runs.sweeps.cell import Cell
from fedbilevel.runs.sweeps.sweep import Sweep


def cells_table(sweep: Sweep, cells: Sequence[Cell], metric: str) -> list[list[str]]:
    """A heading, and a line for each of these cells with the metric that ranks them."""

    def line(cell: Cell) -> list[str]:
        mean = cell.mean(metric)
        numbers = ["", ""] if math.isnan(mean) else [f"{mean:.4g}", f"{cell.deviation(metric):.2g}"]
        return [*map(str, cell.values.values()), *numbers, f"{cell.diverged} of {sweep.seeds}"]

    head = [*sweep.grid, metric.replace("_", " "), "deviation", "diverged"]
    return [head, *(line(cell) for cell in cells)]
