"""A sweep on disk: what was asked for, its finished runs, and what came of them.

sweep.json        what is swept, the versions it began with, and the SHA-256 of the user's code
ranking.json      the metric that ranks its cells, if it is not the task's own
results.jsonl     a line for each finished run: its cell, its seed, its numbers along the way
cells.csv         a line for each cell
sweep.png, .svg   a picture of the grid
best.toml         the best cell, for `fedbilevel run --settings`
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fedbilevel.errors import FolderTaken, InputError
from fedbilevel.runs.files import append_durably, locked, require_place, write_atomically
from fedbilevel.runs.rows import Row, row_check, with_bytes
from fedbilevel.runs.sweeps.batched_runs import FINISHED, Outcome, run_together
from fedbilevel.runs.sweeps.best_settings import settings_text
from fedbilevel.runs.sweeps.cell import Cell
from fedbilevel.runs.sweeps.described_folder import DescribedFolder
from fedbilevel.runs.sweeps.programs import alike, programs
from fedbilevel.runs.sweeps.sweep import Sweep
from fedbilevel.settings import nearest
from fedbilevel.user_files import Scalar, read_json, read_json_lines


@dataclass(frozen=True)
class Ranking:
    """What `ranking.json` holds."""

    metric: str


@dataclass(frozen=True)
class FinishedRun:
    """A line of `results.jsonl`."""

    cell: Mapping[str, Scalar]
    seed: int
    rows: Sequence[Row]
    status: Literal["finished", "diverged"]
    reason: str


Observe = Callable[[int, int, int], None]  # called with how many runs have ended, how many are in progress, and their rounds


class SweepFolder(DescribedFolder[Sweep]):
    """A sweep on disk; finished runs are not repeated."""

    FILE = "sweep.json"

    def read(self, values: Mapping[str, Any]) -> Sweep:
        """The sweep from its file."""
        return Sweep.read(values)

    def begun(self) -> bool:
        """Whether any of its runs has ended."""
        return bool(self.results())

    @classmethod
    def create(cls, path: Path, sweep: Sweep, force: bool = False, metric: str = "") -> SweepFolder:
        """A new sweep, or the one in the folder if it is the same; its cells are ranked by the metric if one is given."""
        folder = cls(path)
        sweep.settle()
        known = (path / "sweep.json").exists() and not force
        if known and folder.sweep != sweep:
            raise FolderTaken(f"{path} holds another sweep: choose another folder", replaceable=True)
        if known:
            folder.confirm_code()
        require_place(path, "config.json", "*/config.json", "starting.json", "tuning.json", "*/tuning.json")
        if metric and metric not in (names := sweep.metrics()):
            raise InputError(f"there is no metric {metric!r} to rank by{nearest(metric, names)}")
        if not known:
            for cells in alike((cell, sweep.configuration(cell, sweep.first_seed)) for cell in sweep.cells()):
                cells[0][1].experiment()  # raises if anything is wrong with a cell, before any is run
            path.mkdir(parents=True, exist_ok=True)
            for file in ("sweep.json", "results.jsonl", "ranking.json"):
                (path / file).unlink(missing_ok=True)
        if metric:
            write_atomically(path / "ranking.json", json.dumps(asdict(Ranking(metric))).encode())
        if not known:  # last, since a folder without it holds no sweep
            folder.begin(sweep)
        return folder

    @property
    def sweep(self) -> Sweep:
        """What is swept."""
        return self.described

    @property
    def metric(self) -> str:
        """The metric that ranks the cells: the task's own unless another was asked for."""
        file = self.path / "ranking.json"
        return read_json(file, Ranking).metric if file.exists() else self.sweep.headline

    def results(self) -> dict[tuple[str, int], Outcome]:
        """The finished runs, by cell and seed; a line cut off by a kill is left out."""
        file, options = self.path / "results.jsonl", self.sweep.options
        names: set[str] = set()

        def check(run: FinishedRun) -> None:
            check_row = row_check(options)
            for row in run.rows:
                check_row(row)
                names.update(() if names else row)  # those of the first row, which every row has
                if missing := names - row.keys():
                    raise InputError(f"the row of step {row['step']} has no {min(missing)!r}")
            if run.status == FINISHED and not run.rows:
                raise InputError("a run that is finished has at least one row")

        lines = read_json_lines(file, FinishedRun, check) if file.exists() else ()
        found = {
            (_name(run.cell), run.seed): Outcome([with_bytes(row, 4) for row in run.rows], run.status, run.reason)
            for run in lines
        }
        if names and self.metric not in names:
            said = ranking if (ranking := self.path / "ranking.json").exists() else file
            raise InputError(f"{said}: the runs have no metric {self.metric!r} to rank by{nearest(self.metric, names)}")
        return found

    def cells(self) -> list[Cell]:
        """The cells that are finished with all their seeds."""
        sweep, found = self.sweep, self.results()
        seeds = sweep.seed_numbers()
        complete = [cell for cell in sweep.cells() if all((_name(cell), seed) in found for seed in seeds)]
        return [Cell(cell, [found[_name(cell), seed] for seed in seeds]) for cell in complete]

    def execute(self, observe: Observe = lambda done, together, rounds: None) -> None:
        """Run what is missing."""
        with locked(self.path):
            self._execute(observe)

    def _execute(self, observe: Observe) -> None:
        sweep, found = self.sweep, self.results()
        lines = (_line(json.loads(cell), seed, outcome) for (cell, seed), outcome in found.items())
        write_atomically(self.path / "results.jsonl", "".join(lines).encode())
        runs = [(cell, seed) for cell in sweep.cells() for seed in sweep.seed_numbers()]
        missing = [run for run in runs if (_name(run[0]), run[1]) not in found]
        done = len(runs) - len(missing)
        for together in programs((run, sweep.configuration(*run)) for run in missing):
            outcomes = run_together([e for _, e in together], partial(observe, done, len(together)))
            lines = (_line(cell, seed, outcome) for ((cell, seed), _), outcome in zip(together, outcomes, strict=True))
            append_durably(self.path / "results.jsonl", "".join(lines))
            done += len(together)
            observe(done, 0, 0)

    def conclude(self) -> list[Cell]:
        """Write the table and the best cell's settings; returns the cells, best first."""
        sweep, metric = self.sweep, self.metric
        cells = sweep.ranked(self.cells(), metric)
        table = sweep.table(cells)
        exact = {*sweep.grid, "diverged"}
        lines = [list(table[0]), *([str(v) if n in exact else f"{v:.6g}" for n, v in row.items()] for row in table)]
        write_atomically(self.path / "cells.csv", "".join(",".join(line) + "\n" for line in lines).encode())
        best = cells[0]
        if not math.isnan(best.mean(metric)):
            write_atomically(self.path / "best.toml", _settings(sweep, best, len(cells), metric).encode())
        return cells


def _line(cell: Mapping[str, Any], seed: int, outcome: Outcome) -> str:
    return json.dumps({"cell": cell, "seed": seed, **outcome._asdict()}) + "\n"


def _name(cell: Mapping[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


def _settings(sweep: Sweep, best: Cell, cells: int, metric: str) -> str:
    knobs, hyperparameters = sweep.chosen(best.values)
    comment = (
        f"The best of {cells} cells by {metric}: {best.mean(metric):.4g}, deviation {best.deviation(metric):.2g} over "
        f"{len(best.outcomes)} seeds."
    )
    return settings_text(comment, sweep.task, knobs, {sweep.algorithm: hyperparameters})
