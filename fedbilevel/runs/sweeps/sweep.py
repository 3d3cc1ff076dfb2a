"""A grid of hyperparameters with several seeds each: what it is, its folder, and which cell is best.

sweep.json        what is swept
ranking.json      by which metric its cells are ranked, where that is not the task's own
results.jsonl     a line for each finished run: its cell, its seed, its numbers along the way
cells.csv         a line for each cell
sweep.png, .svg   a picture of the grid
best.toml         the best cell, for `fedbilevel run --settings`
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.devices import memory
from fedbilevel.errors import InputError
from fedbilevel.own_code import Hashes, confirmed, hashes, is_reference, label
from fedbilevel.registry import Entry, find, require_known
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import COUNTERS, Experiment
from fedbilevel.runs.files import locked, require_place, write_atomically
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.rows import Row, check_row
from fedbilevel.runs.sweeps.batched_runs import DIVERGED, FINISHED, Outcome, bytes_of, run_together
from fedbilevel.runs.versions import versions_here
from fedbilevel.settings import nearest, parsed, settings
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.base import Better
from fedbilevel.user_files import Scalar, fitted, naming, read_json, read_json_lines

MOST_RUNS = 100_000  # in a sweep: with a second each, more than a day
MOST_TOGETHER = 64  # runs in one program: results are written after each
LARGE = 50_000_000  # bytes of a run from which on a CPU is busy with one, and several at once only get in each other's way


@dataclass(frozen=True)
class Sweep:
    """What is swept: every combination of the grid's values, each with seeds `first_seed`, `first_seed` + 1, ...

    A name of the grid is a hyperparameter's, or a knob's where the algorithm has none of that name; it may be several that
    have the same value, as in "eta_x+gamma_x". The values of the grid are checked, and put in their setting's own type.
    """

    task: str
    knobs: Mapping[str, Scalar]
    algorithm: str
    hyperparameters: Mapping[str, Scalar]  # of all cells
    grid: Mapping[str, Sequence[Scalar]]
    seeds: int
    options: RunOptions  # of all runs, but for their seed
    data: str = ""  # folder of the data set, if it is not bundled
    first_seed: int = 0
    headline: str = ""  # the task's own metric, and which of its metrics' values are better: filled in
    better: Better = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_known(TASKS, self.task)
        require_known(ALGORITHMS, self.algorithm)
        if self.task in TASKS.bundled and self.algorithm in ALGORITHMS.bundled:
            self.settle()
        for name, given in self.grid.items():
            if len(set(given)) < max(1, len(given)):
                raise InputError(f"--grid {name} must name each of its values once; given: {', '.join(map(str, given))}")
        if not 0 <= self.first_seed < self.first_seed + self.seeds <= 2**32:
            raise InputError(f"seeds must be a whole number of at least 1, and below 2³²; given: {self.seeds}")
        runs = self.seeds * math.prod(map(len, self.grid.values()))
        if runs > MOST_RUNS:
            raise InputError(f"this sweep has {runs:,} runs, and may have {MOST_RUNS:,}: give it fewer seeds or cells")

    def settle(self) -> None:
        """Check all values, convert the grid's, and fill in what the task says.

        What is the package's own is settled at once, and the user's code only where the sweep is to be run.
        """
        task, algorithm = find(TASKS, "task", self.task), find(ALGORITHMS, "algorithm", self.algorithm)
        hyperparameters, knobs = settings(algorithm.load()), settings(task.load())
        known = {**hyperparameters, **knobs, **hyperparameters}
        names = [name for tied in self.grid for name in tied.split("+")]
        for name in names:
            if name not in known:
                raise InputError(f"{label(self.algorithm)} has no hyperparameter {name!r}{nearest(name, known)}")
            if names.count(name) > 1:
                raise InputError(f"--grid has {name} twice: name each hyperparameter once")
            if name in self.knobs and name not in hyperparameters:
                raise InputError(f"{name} is in --grid and in --knob: leave one out")
        values = {
            tied: [parsed(label(self.algorithm), first := tied.split("+")[0], known[first], v) for v in given]
            for tied, given in self.grid.items()
        }
        task.configure(label(self.task), self.knobs)
        algorithm.configure(label(self.algorithm), self.hyperparameters)
        filled = {"grid": values, "headline": task.load().headline, "better": dict(task.load().better)}
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Sweep:
        """From what `plain` gave, and from files of version 0.1, whose data folder stands among the options."""
        values = dict(values)
        run = values.pop("run", None)
        if isinstance(run, dict) and "data" in run:
            run = dict(run)
            values.setdefault("data", run.pop("data"))
        return fitted({**values, "options": run}, cls)

    def plain(self) -> dict[str, Any]:
        """As a dictionary for JSON."""
        values = asdict(self)
        values["run"] = values.pop("options")
        return json.loads(json.dumps(values))

    def cells(self) -> list[dict[str, Any]]:
        """The combinations, the last name's values running fastest."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]

    def seed_numbers(self) -> range:
        """The seeds of every cell."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def configuration(self, cell: Mapping[str, Any], seed: int) -> Configuration:
        """Of one run."""
        knobs, hyperparameters = self.chosen(cell)
        options = replace(self.options, seed=seed)
        return Configuration.resolve(self.task, knobs, self.algorithm, hyperparameters, options, data=self.data)

    def chosen(self, cell: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The knobs and the hyperparameters of a cell."""
        known, values = settings(find(ALGORITHMS, "algorithm", self.algorithm).load()), untied(cell)
        of_task = {name: value for name, value in values.items() if name not in known}
        return {**self.knobs, **of_task}, {**self.hyperparameters, **{n: v for n, v in values.items() if n in known}}

    def packages(self) -> list[str]:
        """The other packages that offer its task or its algorithm."""
        return self.configuration(self.cells()[0], self.first_seed).packages()

    def title(self) -> str:
        """What is swept, in words."""
        return f"{label(self.algorithm)} on {label(self.task)}, {self.seeds} seeds"

    def ranked(self, cells: Sequence[Cell], metric: str) -> list[Cell]:
        """The best of its cells first, by this metric; those with a run that diverged last."""
        sign = -1 if self.better.get(metric) == "higher" else 1

        def rank(cell: Cell) -> tuple[bool, float]:
            mean = cell.mean(metric)
            return (True, 0.0) if math.isnan(mean) else (False, sign * mean)

        return sorted(cells, key=rank)

    def metrics(self) -> list[str]:
        """The names of its runs' metrics."""
        return self.configuration(self.cells()[0], self.first_seed).experiment().task.metric_names()


def untied(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The cell's value of every hyperparameter."""
    return {name: value for tied, value in cell.items() for name in tied.split("+")}


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 for one value or none."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


class Cell(NamedTuple):
    """A cell's runs at their ends."""

    values: Mapping[str, Any]
    outcomes: list[Outcome]

    @property
    def diverged(self) -> int:
        """How many of its runs diverged."""
        return sum(outcome.status == DIVERGED for outcome in self.outcomes)

    def last(self, metric: str) -> list[float]:
        """The metric at the end of every run that did not diverge."""
        rows = [outcome.rows[-1] for outcome in self.outcomes if outcome.status != DIVERGED]
        return [math.nan if row[metric] is None else float(row[metric]) for row in rows]  # type: ignore[arg-type]

    def mean(self, metric: str) -> float:
        """Over the seeds; not a number if one diverged."""
        return math.nan if self.diverged else statistics.fmean(self.last(metric))

    def deviation(self, metric: str) -> float:
        """The standard deviation over the seeds; 0 for one seed."""
        return deviation(self.last(metric))


def higher_is_better(task: str, metric: str) -> bool:
    """Whether the task says so of its metric; where it says nothing, lower is better."""
    return find(TASKS, "task", task).load().better.get(metric) == "higher"


@dataclass(frozen=True)
class Began:
    """What `sweep.json` holds beside the sweep; that of version 0.1 nothing."""

    versions: Mapping[str, str] = field(default_factory=dict)
    code: Hashes = field(default_factory=dict)  # of the user's files that define its task or its algorithm


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
    """A sweep on disk; what is finished of it is not run again."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: Path, sweep: Sweep, force: bool = False, metric: str = "") -> SweepFolder:
        """A new sweep, or the one that the folder holds if it is the same; ranked by a metric if one is given."""
        folder = cls(path)
        sweep.settle()
        known = (path / "sweep.json").exists() and not force
        if known and folder.sweep != sweep:
            raise InputError(f"{path} holds another sweep: choose another --out, or replace it with --force")
        require_place(path, "config.json", "*/config.json", "starting.json")
        if metric and metric not in (names := sweep.metrics()):
            raise InputError(f"there is no metric {metric!r} to rank by{nearest(metric, names)}")
        if not known:
            for cells in _alike((cell, sweep.configuration(cell, sweep.first_seed)) for cell in sweep.cells()):
                cells[0][1].experiment()  # whatever is wrong with one is said before any is run
            path.mkdir(parents=True, exist_ok=True)
            for file in ("sweep.json", "results.jsonl", "ranking.json"):
                (path / file).unlink(missing_ok=True)
        if metric:
            write_atomically(path / "ranking.json", json.dumps(asdict(Ranking(metric))).encode())
        if not known:  # last, since a folder without it holds no sweep
            folder._write(sweep, Began(versions_here(*sweep.packages()), hashes((sweep.task, sweep.algorithm))))
        return folder

    def _write(self, sweep: Sweep, began: Began) -> None:
        stored = {**sweep.plain(), **asdict(began)}
        write_atomically(self.path / "sweep.json", (json.dumps(stored, indent=2) + "\n").encode())

    def confirm_code(self, *, changed: bool = False, trusted: bool = False) -> None:
        """Raise `InputError` unless the user's code that it needs may be executed, and is as it was or may have changed."""
        sweep, began = self.sweep, read_json(self.path / "sweep.json", Began)
        code = confirmed((sweep.task, sweep.algorithm), began.code, changed=changed, trusted=trusted)
        if code != began.code:
            with locked(self.path):
                self._write(sweep, replace(began, code=code))

    @property
    def sweep(self) -> Sweep:
        """What is swept."""
        file = self.path / "sweep.json"
        values = read_json(file, dict[str, Any])
        for beside in fields(Began):
            values.pop(beside.name, None)
        with naming(file):
            return Sweep.read(values)

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what the sweep began with."""
        return read_json(self.path / "sweep.json", Began).versions

    @property
    def metric(self) -> str:
        """By which the cells are ranked: the task's own unless another was asked for."""
        file = self.path / "ranking.json"
        return read_json(file, Ranking).metric if file.exists() else self.sweep.headline

    def results(self) -> dict[tuple[str, int], Outcome]:
        """What is finished, by cell and seed; a line that a kill cut off is left out."""
        file, options = self.path / "results.jsonl", self.sweep.options
        names: set[str] = set()

        def check(run: FinishedRun) -> None:
            for row in run.rows:
                check_row(row, options)
                names.update(() if names else row)  # those of the start, which every row has
                if missing := names - row.keys():
                    raise InputError(f"the row of step {row['step']} has no {min(missing)!r}")
            if run.status == FINISHED and not run.rows:
                raise InputError("a run that is finished has at least one row")

        lines = read_json_lines(file, FinishedRun, check) if file.exists() else ()
        found = {(_name(run.cell), run.seed): Outcome(list(run.rows), run.status, run.reason) for run in lines}
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
        """Run what is missing; `observe` is told how many runs are done and the rounds made by those under way."""
        with locked(self.path):
            self._execute(observe)

    def _execute(self, observe: Callable[[int, int], None]) -> None:
        sweep, found = self.sweep, self.results()
        lines = (_line(json.loads(cell), seed, outcome) for (cell, seed), outcome in found.items())
        write_atomically(self.path / "results.jsonl", "".join(lines).encode())
        runs = [(cell, seed) for cell in sweep.cells() for seed in sweep.seed_numbers()]
        missing = [run for run in runs if (_name(run[0]), run[1]) not in found]
        done = len(runs) - len(missing)
        for together in _programs((run, sweep.configuration(*run)) for run in missing):
            outcomes = run_together([e for _, e in together], partial(observe, done))
            with (self.path / "results.jsonl").open("a") as file:
                for ((cell, seed), _), outcome in zip(together, outcomes, strict=True):
                    file.write(_line(cell, seed, outcome))
                file.flush()
                os.fsync(file.fileno())
            done += len(together)
            observe(done, 0)

    def conclude(self) -> list[Cell]:
        """Write the table, and the best cell's settings; the cells, best first."""
        sweep, metric = self.sweep, self.metric
        cells = sweep.ranked(self.cells(), metric)
        rows = (row for cell in cells for outcome in cell.outcomes for row in outcome.rows)
        names = [n for n in next(rows, {}) if n not in COUNTERS]
        lines = [[*sweep.grid, "diverged", *(f"{n} {what}" for n in names for what in ("mean", "deviation"))]]
        for cell in cells:
            numbers = [value for n in names for value in (cell.mean(n), cell.deviation(n))]
            lines.append([*map(str, cell.values.values()), str(cell.diverged), *(f"{v:.6g}" for v in numbers)])
        write_atomically(self.path / "cells.csv", "".join(",".join(line) + "\n" for line in lines).encode())
        best = cells[0]
        if not math.isnan(best.mean(metric)):
            write_atomically(self.path / "best.toml", _settings(sweep, best, len(cells), metric).encode())
        return cells


def _alike(runs: Iterable[tuple[Any, Configuration]]) -> list[list[tuple[Any, Configuration]]]:
    """The runs in groups of one task whose algorithms differ in their real numbers alone."""
    groups: dict[Any, list[tuple[Any, Configuration]]] = {}
    for run in runs:
        task, algorithm = tuple(run[1].knobs.items()), run[1].configured_algorithm()
        groups.setdefault((task, jax.tree.structure(algorithm)), []).append(run)
    return list(groups.values())


def _programs(runs: Iterable[tuple[Any, Configuration]]) -> Iterator[list[tuple[Any, Experiment]]]:
    """The runs in groups that can be one program and that fit into memory."""
    for group in _alike(runs):
        needed = bytes_of(group[0][1].experiment())
        size = 1 if jax.default_backend() == "cpu" and needed > LARGE else max(1, min(MOST_TOGETHER, memory() // 2 // needed))
        for first in range(0, len(group), size):
            yield [(run, configuration.experiment()) for run, configuration in group[first : first + size]]


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
    key = quoted(sweep.algorithm) if is_reference(sweep.algorithm) else sweep.algorithm
    return (
        f"# The best of {cells} cells by {metric}: {best.mean(metric):.4g}, deviation {best.deviation(metric):.2g} over "
        f"{len(best.outcomes)} seeds.\n"
        f"task = {quoted(sweep.task)}\n\n[knobs]\n{table(task, sweep.task, knobs)}\n"
        f"[hyperparameters.{key}]\n{table(algorithm, sweep.algorithm, hyperparameters)}"
    )
