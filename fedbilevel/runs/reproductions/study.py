"""Running a table or figure: a folder of sweeps, one for each line's grid and one for its reported runs.

tuning/PANEL/METHOD    the grid, as `fedbilevel sweep` writes it
search/PANEL/METHOD    the search, as `fedbilevel tune` writes it
lines/PANEL/METHOD     the runs with the chosen values, and work.json, the derivatives that they took

What is finished is not run again.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from fedbilevel.errors import InputError
from fedbilevel.runs.best_round import best_so_far, goodness
from fedbilevel.runs.derivative_counts import Tally, Work
from fedbilevel.runs.files import write_atomically
from fedbilevel.runs.reproductions.plan import (
    Method,
    Panel,
    Reproduction,
    chosen_values,
    fixed,
    folder_name,
    paper_of,
)
from fedbilevel.runs.reproductions.tuned import FOLDER, tuned_file, tuned_text
from fedbilevel.runs.sweeps.batched_runs import DIVERGED
from fedbilevel.runs.sweeps.cell import Cell
from fedbilevel.runs.sweeps.described_folder import DescribedFolder
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep, untied
from fedbilevel.runs.tuning.folder import TuningFolder
from fedbilevel.runs.tuning.tuning import Tuning
from fedbilevel.runs.versions import changes_since
from fedbilevel.runs.workers import Here, Workers
from fedbilevel.settings import nearest
from fedbilevel.user_files import naming, read_json

Kind = Literal["search", "tuning", "lines"]  # what is made of a line: its search, its grid, its reported runs
Lines = Mapping[tuple[str, str], Sweep]  # by panel and method
Observe = Callable[[int, str], None]  # called with the number of finished lines, and with what is under way


@dataclass(frozen=True)
class DescribedLine:
    """A line of a stored description."""

    panel: str
    method: str
    sweep: Mapping[str, Any]  # as `Sweep.plain` returns it


@dataclass(frozen=True)
class Description:
    """What was run, stored with the numbers so that they are shown only beside the plan that they come from."""

    metric: str
    lines: Sequence[DescribedLine]


class Study:
    """A reproduction and the folder of its runs."""

    def __init__(
        self,
        reproduction: Reproduction,
        path: Path,
        data: str = "",
        plans: Path = FOLDER,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        methods: Sequence[str] = (),
        changed: bool = False,
    ):
        """`settings` are hyperparameters, by algorithm, that override the chosen ones.

        If `methods` are named, only their lines are run, and if `changed`, only those that differ from what is stored beside
        the plan; the numbers of the others are those stored.
        """
        names = [method.name for method in reproduction.methods]
        for name in methods:
            if name not in names:
                raise InputError(f"{reproduction.name} has no method {name!r}{nearest(name, names)}")
        self._methods, self._changed = methods, changed
        self.reproduction, self.path, self._data, self._plans = reproduction, path, data, plans
        self._settings = settings or {}

    def tune(self, observe: Observe = lambda done, word: None, workers: Workers | None = None) -> None:
        """Make the searches or the grids of all lines, and write the chosen values beside the plan."""
        self.reproduction = plan = self.reproduction.after_search()
        if plan.search:
            self._require_metric(plan.reported(panel, method, {}, self._data) for panel, method in plan.searched_lines())
            self._make("search", plan.searched_lines(), observe, workers)
            choices = [self._found(panel, method) for panel, method in plan.searched_lines()]
        elif plan.tuned_lines():
            self._require_metric(plan.tuning(panel, method, self._data) for panel, method in plan.tuned_lines())
            self._make("tuning", plan.tuned_lines(), observe, workers)
            choices = self.choices()
        else:
            raise InputError(f"{plan.name} has nothing to tune: its values are those of {plan.tuned_by or 'the plan'}")
        text = tuned_text(plan.name, plan.metric, choices, searched=bool(plan.search))
        write_atomically(tuned_file(plan.name, self._plans), text.encode())

    def search_line(self, panel: Panel, method: Method, observe: Callable[[int], None] = lambda rounds: None) -> None:
        """Make the search of one line, as `fedbilevel tune` does."""
        path, tuning = self._folder("search", panel, method), self.reproduction.searching(panel, method, self._data)
        _keep_if_same(TuningFolder(path), tuning)
        TuningFolder.create(path, tuning).execute(observe=lambda done, of, word: observe(done))

    def _found(self, panel: Panel, method: Method) -> dict[str, Any]:
        """The best candidate of a search, or the one that lasted longest if all diverged."""
        found = TuningFolder(self._folder("search", panel, method)).found()
        climbed = [candidate.rungs[-1] for candidate in found.climbed()]
        best = found.best() or max(climbed, key=_endurance)
        return {
            "panel": panel.name,
            "method": method.name,
            "values": dict(best.values),
            found.tuning.metric: _mean(best, found.tuning.metric),
            "seeds": list(found.tuning.seed_numbers(found.tuning.rungs - 1)),
            "cells": len(climbed),
            "diverged": sum(bool(cell.diverged) for cell in climbed),
            "boxes": {name: list(ends) for name, ends in found.tuning.boxes.items()},
            "edges": found.edges(),
        }

    def tune_line(self, panel: Panel, method: Method, observe: Callable[[int], None] = lambda rounds: None) -> None:
        """Run the grid of one line."""
        self._run(self._folder("tuning", panel, method), self.reproduction.tuning(panel, method, self._data), observe)

    def choices(self) -> list[dict[str, Any]]:
        """The best cell of each grid that has been run."""
        plan = self.reproduction
        return [self.choice(p, m) for p, m in plan.tuned_lines() if (self._folder("tuning", p, m) / "results.jsonl").exists()]

    def choice(self, panel: Panel, method: Method) -> dict[str, Any]:
        """The best cell of a grid, or the one that lasted longest if all diverged; and the result of the paper's own values."""
        metric = self.reproduction.metric
        folder = SweepFolder(self._folder("tuning", panel, method))
        cells = folder.cells()
        best = folder.sweep.ranked(cells, metric)[0]
        if best.diverged:
            best = max(cells, key=_endurance)
        choice = {
            "panel": panel.name,
            "method": method.name,
            "values": dict(best.values),
            metric: _mean(best, metric),
            "seeds": list(folder.sweep.seed_numbers()),
            "cells": len(cells),
            "diverged": sum(bool(cell.diverged) for cell in cells),
        }
        paper = paper_of(panel, method)
        published = [c for c in cells if untied(paper).items() <= {**fixed(panel, method), **untied(c.values)}.items()]
        if paper and published:
            choice["with_paper_values"] = _mean(published[0], metric)
        return choice

    def run(self, observe: Observe = lambda done, word: None, workers: Workers | None = None) -> None:
        """Run what is missing in all lines that are run here."""
        lines = self.lines()
        self._require_metric([self.line(panel, method) for panel, method in lines])
        self._make("lines", lines, observe, workers)

    def lines(self) -> list[tuple[Panel, Method]]:
        """The lines that are run here."""
        named = [(p, m) for p, m in self.reproduction.lines() if not self._methods or m.name in self._methods]
        return [line for line in named if not self._is_stored(*line)] if self._changed else named

    @property
    def stored(self) -> Path:
        """The numbers stored beside the plan."""
        return self._plans / "results" / f"{self.reproduction.name}.csv"

    def require_stored(self, panel: Panel, method: Method) -> None:
        """Raise `InputError` unless the stored numbers of a line come from the line as it is now."""
        if not self._is_stored(panel, method):
            where = f"{panel.name}, {method.name}"
            raise InputError(f"{self._described} has no numbers of {where} as the plan has it now: run {method.name} too")

    def _is_stored(self, panel: Panel, method: Method) -> bool:
        metric, lines = self._stored
        known = lines.get((panel.name, method.name))
        return metric == self.reproduction.metric and known == _without_data(self.line(panel, method))

    @functools.cached_property
    def _stored(self) -> tuple[str, Lines]:
        """The metric and the lines that the stored numbers come from; none if nothing is stored."""
        return _read(self._described) if self._described.exists() else ("", {})

    @property
    def _described(self) -> Path:
        return self.stored.with_suffix(".json")

    def _require_metric(self, sweeps: Iterable[Sweep]) -> None:
        """Raise `InputError` if anything is wrong with a line, or with the metric for its task, before any is run."""
        metric = self.reproduction.metric
        for task, sweep in {sweep.task: sweep for sweep in reversed(list(sweeps))}.items():
            if metric not in (known := sweep.metrics()):
                plan = self._plans / f"{self.reproduction.name}.toml"
                raise InputError(f"{plan}: {task} has no metric {metric!r}{nearest(metric, known)}")

    def changes(self) -> str:
        """What has changed since lines of the study began, in words."""
        lines = [(kind, *line) for kind in ("tuning", "lines") for line in self.reproduction.lines()]
        begun = [folder for line in lines if ((folder := self._folder(*line)) / "sweep.json").exists()]
        return "; ".join(dict.fromkeys(filter(None, (changes_since(SweepFolder(folder).versions) for folder in begun))))

    def line(self, panel: Panel, method: Method) -> Sweep:
        """What one line runs, with the values chosen for it."""
        values = untied(chosen_values(self.reproduction, panel, method, self._plans))
        chosen = {**values, **self._settings.get(method.algorithm, {})}
        return self.reproduction.reported(panel, method, chosen, self._data)

    def run_line(self, panel: Panel, method: Method, observe: Callable[[int], None] = lambda rounds: None) -> None:
        """Run one line."""
        sweep, folder = self.line(panel, method), self._folder("lines", panel, method)
        self._run(folder, sweep, observe)
        if not (folder / "work.json").exists():
            write_atomically(folder / "work.json", json.dumps(_work(sweep, self.outcome(panel, method))).encode())

    def description(self) -> Description:
        """The description of its runs."""
        return Description(self.reproduction.metric, [DescribedLine(*of, line.plain()) for of, line in self._lines().items()])

    def made(self, file: Path) -> bool:
        """Whether a stored description is of this study's runs."""
        return _read(file) == (self.reproduction.metric, self._lines())

    def _lines(self) -> Lines:
        return {(p.name, m.name): _without_data(self.line(p, m)) for p, m in self.reproduction.lines()}

    def outcome(self, panel: Panel, method: Method) -> Cell:
        """A line's runs, one for each seed."""
        folder = SweepFolder(self._folder("lines", panel, method))
        for cell in folder.cells():
            return cell
        raise InputError(f"{folder.path / 'results.jsonl'} lacks some of the line's runs: run it again")

    def shown(self, panel: Panel, method: Method) -> list[list[float | None]]:
        """The metric that a line shows for each row, for each of its runs."""
        metric, runs = self.reproduction.metric, [outcome.rows for outcome in self.outcome(panel, method).outcomes]
        if not method.best_round:
            return [[row[metric] for row in rows] for rows in runs]
        _, by = self.line(panel, method).judged()
        kept = [best_so_far([goodness(row[by.metric], by.higher) for row in rows]) for rows in runs]
        return [[rows[best][metric] for best in at] for rows, at in zip(runs, kept, strict=True)]

    def work(self, panel: Panel, method: Method) -> list[list[Work]]:
        """The gradients and second-order products up to each row, for each run of a line."""
        file, outcomes = self._folder("lines", panel, method) / "work.json", self.outcome(panel, method).outcomes
        stored = read_json(file, list[list[Work]])
        if list(map(len, stored)) != [len(outcome.rows) for outcome in outcomes]:
            raise InputError(f"{file} does not fit the rows in results.jsonl beside it: remove it to have it counted again")
        return stored

    def _run(self, path: Path, sweep: Sweep, observe: Callable[[int], None]) -> None:
        _keep_if_same(SweepFolder(path), sweep)
        if not (path / SweepFolder.FILE).exists():
            SweepFolder.create(path, sweep)
        SweepFolder(path).execute(lambda done, together, rounds: observe(rounds))

    def _make(self, kind: Kind, lines: Sequence[tuple[Panel, Method]], observe: Observe, workers: Workers | None) -> None:
        done, word = 0, ""
        observe(done, word)

        def moved(number: int, rounds: int) -> None:
            nonlocal word
            if number >= 0:
                panel, method = lines[number]
                word = f"{'' if kind == 'lines' else 'tuning '}{panel.name}, {method.name}, round {rounds}"
            observe(done, word)

        for _ in (workers or Here()).do([LineJob(self, kind, panel, method) for panel, method in lines], moved):
            done += 1
            observe(done, "")

    def _folder(self, kind: str, panel: Panel, method: Method) -> Path:
        return self.path / kind / folder_name(panel.name) / folder_name(method.name)


class LineJob(NamedTuple):
    """What is made of a line, as work for any process."""

    study: Study
    kind: Kind
    panel: Panel
    method: Method

    def names(self) -> Sequence[str]:
        """The names of its task, its algorithm and its aggregation."""
        return self.study.reproduction.reported(self.panel, self.method, {}).names()

    def do(self, observe: Callable[[int], None] = lambda rounds: None) -> None:
        """Make it."""
        make = {"search": self.study.search_line, "tuning": self.study.tune_line, "lines": self.study.run_line}[self.kind]
        make(self.panel, self.method, observe)
        jax.clear_caches()  # a process has room for a few thousand compiled programs, and the next line needs others


def _work(sweep: Sweep, cell: Cell) -> list[list[Work]]:
    tally = Tally(sweep.configuration({}, sweep.first_seed).experiment())
    return [
        tally.at([int(row["step"] or 0) for row in outcome.rows], seed)
        for seed, outcome in zip(sweep.seed_numbers(), cell.outcomes, strict=True)
    ]


def _keep_if_same(folder: DescribedFolder[Any], given: Tuning | Sweep) -> None:
    """Remove the folder if it is of another plan, or of values no longer chosen; if not, its data is where it is now."""
    if (folder.path / folder.FILE).exists():
        known = folder.described
        if replace(known, data=given.data) != given:
            shutil.rmtree(folder.path)
        elif known.data != given.data:
            folder.move_data(given)


def _mean(cell: Cell, metric: str) -> float | str:
    return DIVERGED if cell.diverged else round(cell.mean(metric), 5)


def _endurance(cell: Cell) -> float:
    """The number of rounds that all of a cell's runs lasted."""
    return min(float(outcome.rows[-1]["rounds"] or 0) if outcome.rows else -1.0 for outcome in cell.outcomes)


def _read(description: Path) -> tuple[str, Lines]:
    """The metric and the lines of a stored description."""
    stored = read_json(description, Description)
    with naming(description):
        return stored.metric, {(line.panel, line.method): _without_data(Sweep.read(line.sweep)) for line in stored.lines}


def _without_data(sweep: Sweep) -> Sweep:
    """The sweep without the place of its data, to compare by."""
    return replace(sweep, data="")
