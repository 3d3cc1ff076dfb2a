"""What a tuning found: printed in lines, shown in a notebook, drawn, and as a table."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbilevel.library.solution import data_frame
from fedbilevel.own_code import label
from fedbilevel.report import tuning_picture
from fedbilevel.report.history_picture import data_url
from fedbilevel.report.styles import SCREEN, Style
from fedbilevel.runs.files import write_atomically
from fedbilevel.runs.tuning.folder import BEST, TuningFolder, best_settings
from fedbilevel.runs.tuning.found import Found


@dataclass(frozen=True, repr=False)
class TuneResult:
    """What `tune` found for each algorithm: its passes, how far each candidate came, and the best."""

    tuned: Sequence[Found]

    @property
    def best(self) -> dict[str, dict[str, Any]]:
        """By algorithm, the best values of its hyperparameters; empty for one whose candidates all diverged."""
        return {label(found.tuning.algorithm): found.chosen() for found in self.tuned}

    @property
    def table(self) -> list[dict[str, Any]]:
        """For each candidate its algorithm, pass and values, the rounds that it made, and the metric that ranked it there."""
        return [
            {
                "algorithm": label(found.tuning.algorithm),
                "pass": search + 1,
                **rungs[-1].values,
                "rounds": found.tuning.rounds(len(rungs) - 1),
                "diverged": rungs[-1].diverged,
                found.tuning.metric: rungs[-1].mean(found.tuning.metric),
            }
            for found in self.tuned
            for search, _, rungs in found.climbed()
        ]

    def __repr__(self) -> str:
        """A line for each algorithm."""
        return f"<TuneResult: {'; '.join(found.summary() for found in self.tuned)}>"

    def _repr_html_(self) -> str:
        """The best of each algorithm, and the pictures, for a notebook."""
        parts = []
        for found in self.tuned:
            values = ", ".join(f"{name} = {value:.4g}" for name, value in found.chosen().items())
            picture = f'<img alt="the rungs and the candidates" src="{data_url(tuning_picture.figure(found))}">'
            parts.append(f"<p>{html.escape(f'{found.summary()}; {values}')}</p>{picture}")
        return "".join(parts)

    def plot(self, algorithm: str = "") -> Any:
        """A matplotlib figure of an algorithm's rungs and candidates; of the first unless another is named."""
        by_name = {label(found.tuning.algorithm): found for found in self.tuned}
        return tuning_picture.figure(by_name[algorithm] if algorithm else self.tuned[0])

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame with a row for each candidate.

        Raises:
            InputError: pandas is not installed.
        """
        return data_frame(self.table)


def concluded(place: Path, folders: Sequence[TuningFolder], style: Style = SCREEN) -> TuneResult:
    """The result of tunings that have all ended, whose tables and pictures this writes, and the best settings of all there."""
    tuned = [folder.conclude() for folder in folders]
    for folder, found in zip(folders, tuned, strict=True):
        tuning_picture.draw(found, pictures(folder.path), style)
    others = [folder for folder in TuningFolder.find(place) if folder.path not in {f.path for f in folders}]
    ended = tuned + [folder.found() for folder in others if (folder.path / BEST).exists()]
    if any(found.best() for found in ended):
        write_atomically(place / BEST, best_settings(ended).encode())
    return TuneResult(tuned)


def finalists(found: Found, most: int) -> list[list[str]]:
    """A table for reading: a heading, and the best candidates of the last rung with the metric that ranks them."""
    metric, seeds = found.tuning.metric, found.tuning.seeds
    lines = [[*found.tuning.boxes, metric.replace("_", " "), "deviation", "diverged"]]
    for cell in found.finalists()[:most]:
        mean = cell.mean(metric)
        numbers = ["", ""] if math.isnan(mean) else [f"{mean:.4g}", f"{cell.deviation(metric):.2g}"]
        lines.append([*(f"{value:g}" for value in cell.values.values()), *numbers, f"{cell.diverged} of {seeds}"])
    return lines


def pictures(folder: Path) -> list[Path]:
    """Where the pictures of a tuning are."""
    return [folder / "tuning.png", folder / "tuning.svg"]
