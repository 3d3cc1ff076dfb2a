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
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import InputError
from fedbilevel.own_code import Hashes, confirmed, hashes
from fedbilevel.registry import Entry, find
from fedbilevel.runs.files import locked, require_place, write_atomically
from fedbilevel.runs.rows import Row, row_check, with_bytes
from fedbilevel.runs.sweeps.batched_runs import FINISHED, Outcome, run_together
from fedbilevel.runs.sweeps.programs import alike, programs
from fedbilevel.runs.sweeps.sweep import Cell, Sweep
from fedbilevel.runs.versions import versions_here
from fedbilevel.settings import nearest, parsed, settings
from fedbilevel.tasks import TASKS
from fedbilevel.user_files import Scalar, naming, read_json, read_json_lines


@dataclass(frozen=True)
class Began:
    """What `sweep.json` holds besides the sweep; nothing in version 0.1."""

    versions: Mapping[str, str] = field(default_factory=dict)
    code: Hashes = field(default_factory=dict)  # the SHA-256 of the user's files that define its task or its algorithm


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


class SweepFolder:
    """A sweep on disk; finished runs are not repeated."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: Path, sweep: Sweep, force: bool = False, metric: str = "") -> SweepFolder:
        """A new sweep, or the one in the folder if it is the same; its cells are ranked by the metric if one is given."""
        folder = cls(path)
        sweep.settle()
        known = (path / "sweep.json").exists() and not force
        if known and folder.sweep != sweep:
            raise InputError(f"{path} holds another sweep: choose another --out, or replace it with --force")
        if known:
            folder.confirm_code()
        require_place(path, "config.json", "*/config.json", "starting.json")
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
            folder._write(sweep, Began(versions_here(*sweep.packages()), hashes(sweep.names())))
        return folder

    def _write(self, sweep: Sweep, began: Began) -> None:
        stored = {**sweep.plain(), **asdict(began)}
        write_atomically(self.path / "sweep.json", (json.dumps(stored, indent=2) + "\n").encode())

    def confirm_code(self, *, changed: bool = False, trusted: bool = False) -> None:
        """Raise `InputError` if the user's code that it needs may not be executed, or has changed and must not have."""
        sweep, began = self.sweep, read_json(self.path / "sweep.json", Began)
        code = confirmed(sweep.names(), began.code, changed=changed, trusted=trusted)
        if code != began.code:
            with locked(self.path):
                self._write(sweep, replace(began, code=code))

    @property
    def sweep(self) -> Sweep:
        """What is swept."""
        file = self.path / "sweep.json"
        values = read_json(file, dict[str, Any])
        for other in fields(Began):
            values.pop(other.name, None)
        with naming(file):
            return Sweep.read(values)

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions that the sweep began with."""
        return read_json(self.path / "sweep.json", Began).versions

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

    def execute(self, observe: Callable[[int, int], None] = lambda done, rounds: None) -> None:
        """Run what is missing; `observe` is called with the number of finished runs and the rounds of those in progress."""
        with locked(self.path):
            self._execute(observe)

    def _execute(self, observe: Callable[[int, int], None]) -> None:
        sweep, found = self.sweep, self.results()
        lines = (_line(json.loads(cell), seed, outcome) for (cell, seed), outcome in found.items())
        write_atomically(self.path / "results.jsonl", "".join(lines).encode())
        runs = [(cell, seed) for cell in sweep.cells() for seed in sweep.seed_numbers()]
        missing = [run for run in runs if (_name(run[0]), run[1]) not in found]
        done = len(runs) - len(missing)
        for together in programs((run, sweep.configuration(*run)) for run in missing):
            outcomes = run_together([e for _, e in together], partial(observe, done))
            with (self.path / "results.jsonl").open("a") as file:
                for ((cell, seed), _), outcome in zip(together, outcomes, strict=True):
                    file.write(_line(cell, seed, outcome))
                file.flush()
                os.fsync(file.fileno())
            done += len(together)
            observe(done, 0)

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
    def table(entry: Entry, owner: str, values: Mapping[str, Any]) -> str:
        known = settings(entry.load())
        return "".join(f"{name} = {json.dumps(parsed(owner, name, known[name], v))}\n" for name, v in values.items())

    def quoted(name: str) -> str:
        return json.dumps(name, ensure_ascii=False)

    knobs, hyperparameters = sweep.chosen(best.values)
    task, algorithm = find(TASKS, "task", sweep.task), find(ALGORITHMS, "algorithm", sweep.algorithm)
    key = sweep.algorithm if sweep.algorithm in ALGORITHMS else quoted(sweep.algorithm)
    return (
        f"# The best of {cells} cells by {metric}: {best.mean(metric):.4g}, deviation {best.deviation(metric):.2g} over "
        f"{len(best.outcomes)} seeds.\n"
        f"task = {quoted(sweep.task)}\n\n[knobs]\n{table(task, sweep.task, knobs)}\n"
        f"[hyperparameters.{key}]\n{table(algorithm, sweep.algorithm, hyperparameters)}"
    )
