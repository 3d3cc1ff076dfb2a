"""What a sweep found: printed in a line, shown in a notebook, drawn, and as a table."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbilevel.library.solution import data_frame
from fedbilevel.report import grid_picture
from fedbilevel.report.cells_table import cells_table
from fedbilevel.report.history_picture import data_url
from fedbilevel.report.styles import SCREEN, Style
from fedbilevel.runs.sweeps.cell import Cell
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep, untied

SHOWN = 10  # cells in a table for reading


@dataclass(frozen=True, repr=False)
class SweepResult:
    """What `sweep` found: its cells with the numbers of all their runs, from best to worst by `metric`.

    Each cell has its `values` and the `outcomes` of its runs, of which each has its `rows`, its `status` and a `reason`.
    """

    swept: Sweep
    metric: str
    cells: list[Cell]

    @property
    def best(self) -> dict[str, Any]:
        """The best cell's values, by name of the hyperparameter or knob; empty if a run of every cell diverged."""
        first = self.cells[0]
        return {} if math.isnan(first.mean(self.metric)) else untied(first.values)

    @property
    def table(self) -> list[dict[str, Any]]:
        """For each cell its values, how many of its runs diverged, and the mean and the deviation of every metric."""
        return self.swept.table(self.cells)

    def __repr__(self) -> str:
        """A line: what was swept, and the best cell."""
        number = self.cells[0].mean(self.metric)
        values = ", ".join(f"{name}={value}" for name, value in self.best.items())
        best = f"{self.metric} {number:.4g} at {values}" if self.best else "a run of every cell diverged"
        return f"<SweepResult: {self.swept.title()}, {len(self.cells)} cells; {best}>"

    def _repr_html_(self) -> str:
        """The line, the best cells in a table, and the picture of the grid, for a notebook."""
        head, *rows = best_cells(self)
        more = [_row("td", ["..."])] if len(rows) < len(self.cells) else []
        lines = [_row("th", head), *(_row("td", row) for row in rows), *more]
        picture = f'<img alt="{html.escape(self.metric)} over the grid" src="{data_url(self.plot())}">'
        return f"<p>{html.escape(repr(self))}</p><table>{''.join(lines)}</table>{picture}"

    def plot(self) -> Any:
        """A matplotlib figure of the metric over the grid, with crosses where a run diverged."""
        return grid_picture.figure(self.swept, self.cells, self.metric)

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame with a row for each cell.

        Raises:
            InputError: pandas is not installed.
        """
        return data_frame(self.table)


def concluded(folder: SweepFolder, style: Style = SCREEN) -> SweepResult:
    """The result of a sweep whose runs have all ended, whose table, best settings and pictures this writes."""
    result = SweepResult(folder.sweep, folder.metric, folder.conclude())
    grid_picture.grid(result.swept, result.cells, result.metric, pictures(folder.path), style)
    return result


def best_cells(result: SweepResult) -> list[list[str]]:
    """A table for reading: a heading, and the best cells with the metric that ranks them."""
    return cells_table(result.swept, result.cells[:SHOWN], result.metric)


def pictures(folder: Path) -> list[Path]:
    """Where the pictures of a sweep are."""
    return [folder / "sweep.png", folder / "sweep.svg"]


def _row(tag: str, texts: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"
