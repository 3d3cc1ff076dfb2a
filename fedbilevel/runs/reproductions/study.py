"""Running a table or figure: a folder of sweeps, one for each line's grid and one for its reported runs.

tuning/PANEL/METHOD    the grid, as `fedbilevel sweep` writes it
search/PANEL/METHOD    the search, as `fedbilevel tune` writes it
lines/PANEL/METHOD     the runs with the chosen values, and work.json, the derivatives that they took

What is finished is not run again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from fedbilevel.errors import InputError
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
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep, untied
from fedbilevel.runs.tuning.folder import TuningFolder
from fedbilevel.runs.versions import changes_since
from fedbilevel.settings import nearest
from fedbilevel.user_files import naming, read_json

Observe = Callable[[str, int], None]  # called with the current line and its rounds


@dataclass(frozen=True)
class Description:
    """What was run, stored with the numbers so that they are shown only beside the plan that they come from."""

    metric: str
    lines: Sequence[Mapping[str, Any]]  # as `Sweep.plain` returns them


class Study:
    """A reproduction and the folder of its runs."""

    def __init__(
        self,
        reproduction: Reproduction,
        path: Path,
        data: str = "",
        plans: Path = FOLDER,
        settings: Callable[[str], Mapping[str, Any]] = lambda algorithm: {},
        methods: Sequence[str] = (),
    ):
        """`settings` returns an algorithm's hyperparameters that override the chosen ones.

        If `methods` are named, only their lines are run; the numbers of the others are those stored beside the plan.
        """
        names = [method.name for method in reproduction.methods]
        for name in methods:
            if name not in names:
                raise InputError(f"{reproduction.name} has no method {name!r}{nearest(name, names)}")
        self._methods = methods
        self.reproduction, self.path, self._data, self._plans, self._settings = reproduction, path, data, plans, settings

    def tune(self, observe: Observe = lambda line, rounds: None) -> None:
        """Run the grids, and write the chosen values beside the plan."""
        if self.reproduction.search:
            self._search(observe)
            return
        plan = self.reproduction
        if not plan.tuned_lines():
            raise InputError(f"{plan.name} has nothing to tune: its values are those of {plan.tuned_by or 'the plan'}")
        self._require_metric(plan.tuning(panel, method, self._data) for panel, method in plan.tuned_lines())
        for panel, method in plan.tuned_lines():
            self.tune_line(panel, method, observe)
        write_atomically(tuned_file(plan.name, self._plans), tuned_text(plan.name, plan.metric, self.choices()).encode())

    def _search(self, observe: Observe) -> None:
        """Tune all lines as `fedbilevel tune` does, and write the chosen values beside the plan."""
        self.reproduction = plan = self.reproduction.after_search()
        self._require_metric(plan.reported(panel, method, {}, self._data) for panel, method in plan.searched_lines())
        for panel, method in plan.searched_lines():
            self.search_line(panel, method, observe)
        found = [self._found(panel, method) for panel, method in plan.searched_lines()]
        write_atomically(tuned_file(plan.name, self._plans), tuned_text(plan.name, plan.metric, found, searched=True).encode())

    def search_line(self, panel: Panel, method: Method, observe: Observe = lambda line, rounds: None) -> None:
        """Make the search of one line."""
        path, label = self._folder("search", panel, method), f"tuning {panel.name}, {method.name}"
        tuning = self.reproduction.searching(panel, method, self._data)
        if (path / TuningFolder.FILE).exists():
            known = TuningFolder(path).described
            if replace(known, data=tuning.data) != tuning:
                shutil.rmtree(path)  # it is of another plan
            else:
                tuning = known  # its data may have been elsewhere
        observe(label, 0)
        TuningFolder.create(path, tuning).execute(observe=lambda done, of, word: observe(label, done))
        jax.clear_caches()

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

    def tune_line(self, panel: Panel, method: Method, observe: Observe = lambda line, rounds: None) -> None:
        """Run the grid of one line."""
        sweep = self.reproduction.tuning(panel, method, self._data)
        self._run(self._folder("tuning", panel, method), sweep, f"tuning {panel.name}, {method.name}", observe)

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

    def run(self, observe: Observe = lambda line, rounds: None) -> None:
        """Run what is missing in all lines that are run here."""
        lines = self.lines()
        self._require_metric([self.line(panel, method) for panel, method in lines])
        for panel, method in lines:
            self.run_line(panel, method, observe)

    def lines(self) -> list[tuple[Panel, Method]]:
        """The lines that are run here."""
        return [(p, m) for p, m in self.reproduction.lines() if not self._methods or m.name in self._methods]

    @property
    def stored(self) -> Path:
        """The numbers stored beside the plan."""
        return self._plans / "results" / f"{self.reproduction.name}.csv"

    def require_stored(self, panel: Panel, method: Method) -> None:
        """Raise `InputError` unless the stored numbers of a line come from the line as it is now."""
        file = self.stored.with_suffix(".json")
        stored = read_json(file, Description)
        with naming(file):
            lines = [_without_data(Sweep.read(line)) for line in stored.lines]
        if stored.metric != self.reproduction.metric or _without_data(self.line(panel, method)) not in lines:
            where = f"{panel.name}, {method.name}"
            raise InputError(f"{file} has no numbers of {where} as the plan has it now: run {method.name} too")

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
        chosen = {**untied(chosen_values(self.reproduction, panel, method, self._plans)), **self._settings(method.algorithm)}
        return self.reproduction.reported(panel, method, chosen, self._data)

    def run_line(self, panel: Panel, method: Method, observe: Observe = lambda line, rounds: None) -> None:
        """Run one line."""
        sweep, folder = self.line(panel, method), self._folder("lines", panel, method)
        self._run(folder, sweep, f"{panel.name}, {method.name}", observe)
        if not (folder / "work.json").exists():
            write_atomically(folder / "work.json", json.dumps(_work(sweep, self.outcome(panel, method))).encode())

    def description(self) -> Description:
        """The description of its runs."""
        return Description(self.reproduction.metric, [line.plain() for line in self._lines()])

    def made(self, file: Path) -> bool:
        """Whether a stored description is of this study's runs."""
        stored = read_json(file, Description)
        with naming(file):
            lines = [_without_data(Sweep.read(line)) for line in stored.lines]
        return stored.metric == self.reproduction.metric and lines == self._lines()

    def _lines(self) -> list[Sweep]:
        return [_without_data(self.line(panel, method)) for panel, method in self.reproduction.lines()]

    def outcome(self, panel: Panel, method: Method) -> Cell:
        """A line's runs, one for each seed."""
        folder = SweepFolder(self._folder("lines", panel, method))
        for cell in folder.cells():
            return cell
        raise InputError(f"{folder.path / 'results.jsonl'} lacks some of the line's runs: run it again")

    def work(self, panel: Panel, method: Method) -> list[list[Work]]:
        """The gradients and second-order products up to each row, for each run of a line."""
        file, outcomes = self._folder("lines", panel, method) / "work.json", self.outcome(panel, method).outcomes
        stored = read_json(file, list[list[Work]])
        if list(map(len, stored)) != [len(outcome.rows) for outcome in outcomes]:
            raise InputError(f"{file} does not fit the rows in results.jsonl beside it: remove it to have it counted again")
        return stored

    def _run(self, path: Path, sweep: Sweep, label: str, observe: Observe) -> None:
        if (path / "sweep.json").exists() and _without_data(SweepFolder(path).sweep) != _without_data(sweep):
            shutil.rmtree(path)  # it is of another plan, or of values that are no longer the chosen ones
        if not (path / "sweep.json").exists():
            SweepFolder.create(path, sweep)
        observe(label, 0)
        SweepFolder(path).execute(lambda done, together, rounds: observe(label, rounds))
        jax.clear_caches()  # a process has room for a few thousand compiled programs, and the next line needs others

    def _folder(self, kind: str, panel: Panel, method: Method) -> Path:
        return self.path / kind / folder_name(panel.name) / folder_name(method.name)


def _work(sweep: Sweep, cell: Cell) -> list[list[Work]]:
    tally = Tally(sweep.configuration({}, sweep.first_seed).experiment())
    return [
        tally.at([int(row["step"] or 0) for row in outcome.rows], seed)
        for seed, outcome in zip(sweep.seed_numbers(), cell.outcomes, strict=True)
    ]


def _mean(cell: Cell, metric: str) -> float | str:
    return DIVERGED if cell.diverged else round(cell.mean(metric), 5)


def _endurance(cell: Cell) -> float:
    """The number of rounds that all of a cell's runs lasted."""
    return min(float(outcome.rows[-1]["rounds"] or 0) if outcome.rows else -1.0 for outcome in cell.outcomes)


def _without_data(sweep: Sweep) -> Sweep:
    """The sweep without the place of its data, to compare by."""
    return replace(sweep, data="")
