"""A tuning on disk: what was asked for, its finished runs, where the survivors are, and what came of it.

tuning.json       what is tuned, the versions it began with, and the SHA-256 of the user's code
passes.jsonl      a line for each pass: its boxes and its candidates
results.jsonl     a line for each run on a rung: its pass, its candidate, its seed, its numbers along the way, its seconds
states/           where runs are that may go on to the next rung
candidates.csv    a line for each candidate
best.toml         the best candidate, for `fedbilevel run --settings`
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fedbilevel.errors import FolderTaken, InputError, require
from fedbilevel.runs.checkpoint import Checkpoint
from fedbilevel.runs.files import append_durably, locked, require_place, write_atomically
from fedbilevel.runs.rows import Row, row_check
from fedbilevel.runs.sweeps.batched_runs import FINISHED, Outcome
from fedbilevel.runs.sweeps.best_settings import settings_text
from fedbilevel.runs.sweeps.described_folder import DescribedFolder
from fedbilevel.runs.sweeps.programs import most_together
from fedbilevel.runs.tuning.batches import Batch, Made
from fedbilevel.runs.tuning.boxes import around, drawn, require_box
from fedbilevel.runs.tuning.found import Found, Pass, Result, Run
from fedbilevel.runs.tuning.tuning import BOUNDS, Tuning
from fedbilevel.runs.workers import Here, Workers
from fedbilevel.user_files import read_json_lines

BEST = "best.toml"
Observe = Callable[[int, int, str], None]  # called with the rounds that are done, those of all passes, and what is under way


@dataclass(frozen=True)
class FinishedRun:
    """A line of `results.jsonl`."""

    search: int  # the number of the pass
    rung: int
    candidate: int
    seed: int
    rows: Sequence[Row]
    status: Literal["finished", "diverged"]
    reason: str
    seconds: float = 0.0  # of computing on its rung


class TuningFolder(DescribedFolder[Tuning]):
    """A tuning on disk; finished runs are not repeated."""

    FILE = "tuning.json"

    @classmethod
    def create(cls, path: Path, tuning: Tuning, force: bool = False) -> TuningFolder:
        """A new tuning, or the one in the folder if it is the same."""
        folder = cls(path)
        known = (path / cls.FILE).exists() and not force
        if known and folder.described.plain() != tuning.plain():
            raise FolderTaken(f"{path} holds another tuning: choose another folder", replaceable=True)
        if known:
            folder.confirm_code()
            return folder
        require_place(path, "config.json", "*/config.json", "starting.json", "sweep.json")
        path.mkdir(parents=True, exist_ok=True)
        for file in (cls.FILE, "passes.jsonl", "results.jsonl", BEST):
            (path / file).unlink(missing_ok=True)
        shutil.rmtree(path / "states", ignore_errors=True)
        folder.begin(tuning)  # last, since a folder without it holds no tuning
        return folder

    @classmethod
    def find(cls, path: Path) -> list[TuningFolder]:
        """The tuning in a folder, or those in the folders in it, in the order of their names."""
        return [cls(file.parent) for file in (sorted(path.glob(cls.FILE)) or sorted(path.glob(f"*/{cls.FILE}")))]

    def read(self, values: Mapping[str, Any]) -> Tuning:
        """The tuning from its file."""
        return Tuning.read(values)

    def begun(self) -> bool:
        """Whether any of its runs has ended."""
        return bool(self.results())

    def passes(self) -> list[Pass]:
        """The passes that have begun."""
        file, names = self.path / "passes.jsonl", set(self.described.boxes)

        def check(one: Pass) -> None:
            if {*one.boxes} != names or any({*values} != names for values in one.candidates):
                raise InputError(f"a pass must have boxes and candidates for {', '.join(sorted(names)) or 'nothing'}")
            for name, ends in one.boxes.items():
                require_box(name, ends)
            for name, value in (pair for values in one.candidates for pair in values.items()):
                require(0 < value < math.inf, f"a candidate's {name}", "a finite number above 0", value)

        return list(read_json_lines(file, Pass, check)) if file.exists() else []

    def results(self) -> dict[Run, Result]:
        """The finished runs; a line cut off by a kill is left out."""
        file, tuning = self.path / "results.jsonl", self.described

        def check(run: FinishedRun) -> None:
            check_row = row_check(tuning.options)
            for row in run.rows:
                check_row(row)
                if tuning.metric not in row:
                    raise InputError(f"the row of step {row['step']} has no {tuning.metric!r}")
            require(run.seconds >= 0, "seconds", "a number from 0", run.seconds)
            if run.status == FINISHED and not run.rows:
                raise InputError("a run that is finished has at least one row")

        lines = read_json_lines(file, FinishedRun, check) if file.exists() else ()
        return {
            Run(r.search, r.rung, r.candidate, r.seed): Result(Outcome(list(r.rows), r.status, r.reason), r.seconds)
            for r in lines
        }

    def found(self) -> Found:
        """What has been found so far."""
        return Found(self.described, self.passes(), self.results())

    def execute(self, workers: Workers | None = None, observe: Observe = lambda done, of, word: None) -> None:
        """Run what is missing."""
        with locked(self.path):
            for file, lines in (
                ("passes.jsonl", [json.dumps(asdict(one)) + "\n" for one in self.passes()]),
                ("results.jsonl", [_line(*run) for run in self.results().items()]),
            ):
                write_atomically(self.path / file, "".join(lines).encode())  # without a line cut off by a kill
            (self.path / "states").mkdir(exist_ok=True)
            _Climb(self, workers or Here(), observe).climb()
            shutil.rmtree(self.path / "states", ignore_errors=True)

    def conclude(self) -> Found:
        """Write the table of candidates and the best one's settings; returns what was found."""
        found = self.found()
        tuning, metric = found.tuning, found.tuning.metric
        reached = [f"{metric} at round {tuning.rounds(rung)}" for rung in range(tuning.rungs)]
        lines = [["pass", "candidate", *tuning.boxes, *reached, "diverged"]]
        for search, number, rungs in found.climbed():
            means = [f"{cell.mean(metric):.6g}" for cell in rungs] + [""] * (tuning.rungs - len(rungs))
            lines.append([*map(str, (search + 1, number, *rungs[0].values.values())), *means, str(rungs[-1].diverged)])
        write_atomically(self.path / "candidates.csv", "".join(",".join(line) + "\n" for line in lines).encode())
        if found.best() is not None:
            write_atomically(self.path / BEST, best_settings([found]).encode())
        return found


def best_settings(tuned: Sequence[Found]) -> str:
    """The settings that tunings on one task have found, for `fedbilevel run --settings`."""
    chosen = {found.tuning.algorithm: {**found.tuning.hyperparameters, **found.chosen()} for found in tuned if found.best()}
    first = tuned[0].tuning
    return settings_text("\n".join(found.summary() for found in tuned), first.task, first.knobs, chosen)


class _Climb:
    """The passes of a tuning, from where they are."""

    def __init__(self, folder: TuningFolder, workers: Workers, observe: Observe):
        self.folder, self.workers, self.observe = folder, workers, observe
        self.tuning, self.passes, self.results = folder.described, folder.passes(), folder.results()
        self.done = 0  # rounds

    @property
    def found(self) -> Found:
        """What has been found so far."""
        return Found(self.tuning, self.passes, self.results)

    def climb(self) -> None:
        """Make all passes."""
        search = 0
        while self._continues(search):
            if search == len(self.passes):
                self._begin()
            self._pass(search)
            search += 1

    def _continues(self, search: int) -> bool:
        """Whether another pass is due: while there are passes left, or seconds for one like those before.

        A pass whose candidates all diverge before their first step takes no seconds, and others would do the same.
        """
        found, seconds = self.found, self.tuning.seconds
        if seconds is None or search == 0:
            due = self.tuning.passes
            return search < due or (search < due + self.tuning.more and bool(found.edges()))
        if search == BOUNDS["passes"][1] or (found.best() is None and found.seconds(search) == found.seconds(search - 1)):
            return False
        return found.seconds(search) * (search + 1) / search <= seconds

    def _begin(self) -> None:
        """Draw the candidates of another pass: from the boxes, and later around the best so far."""
        tuning, search = self.tuning, len(self.passes)
        if search == 0:
            known = tuning.in_force()
            new = Pass(tuning.boxes, [*known, *drawn(tuning.boxes, tuning.candidates - len(known), search)])
        else:
            before, best = self.passes[-1].boxes, self.found.best()
            lowest = {name: low for name, (low, _) in before.items()}  # smaller steps, where all diverged
            share = 0.5 if search < tuning.passes or tuning.seconds is not None else 1.0
            boxes = around(before, lowest if best is None else best.values, tuning.algorithm, share)
            new = Pass(boxes, drawn(boxes, tuning.candidates, search))
        append_durably(self.folder.path / "passes.jsonl", json.dumps(asdict(new)) + "\n")
        self.passes.append(new)

    def _pass(self, search: int) -> None:
        tuning, alive = self.tuning, list(range(len(self.passes[search].candidates)))
        for rung in range(tuning.rungs):
            runs = [Run(search, rung, number, seed) for number in alive for seed in tuning.seed_numbers(rung)]
            self.done += sum(self._left(run) for run in runs if run in self.results)
            self._make([run for run in runs if run not in self.results])
            alive = self.found.survivors(search, rung, alive)
            for file in (self.folder.path / "states").glob(f"{search}-{rung - 1}-*"):
                file.unlink()

    def _make(self, runs: list[Run]) -> None:
        """Make runs of one rung, in batches."""
        if not runs:
            return
        tuning, rung, candidates = self.tuning, runs[0].rung, self.passes[runs[0].search].candidates
        configurations = [tuning.configuration(candidates[run.candidate], run.seed, rung) for run in runs]
        size = min(most_together(configurations[0].experiment()), -(-len(runs) // self.workers.count))
        parts = [slice(first, first + size) for first in range(0, len(runs), size)]
        batches = [Batch(configurations[part], [self._start(run) for run in runs[part]]) for part in parts]
        moving = dict.fromkeys(range(len(batches)), 0)
        before = tuning.rounds(rung - 1) if rung else 0

        def moved(number: int, rounds: int) -> None:
            if number >= 0:
                moving[number] = max(0, rounds - before)
            under_way = sum(moving[k] * len(runs[parts[k]]) for k in moving)
            word = f"pass {runs[0].search + 1}, rung {rung + 1}: {len(runs)} runs to round {tuning.rounds(rung)}"
            self.observe(self.done + under_way, self._total(), word)

        for number, made in self.workers.do(batches, moved):
            self._keep(runs[parts[number]], made)
            del moving[number]
            self.done += sum(self._left(run) for run in runs[parts[number]])
            moved(-1, 0)

    def _keep(self, runs: list[Run], made: list[Made]) -> None:
        """Write where runs are that may go on, and then their results."""
        results = {run: Result(one.outcome, one.seconds) for run, one in zip(runs, made, strict=True)}
        self.results |= results
        search, rung = runs[0].search, runs[0].rung
        if rung < self.tuning.rungs - 1:
            ended = [run.candidate for run in self.results if (run.search, run.rung) == (search, rung)]
            hopeful = self.found.survivors(search, rung, ended)  # whoever is not among the best so far will not be in the end
            for run, one in zip(runs, made, strict=True):
                if one.end is not None and run.candidate in hopeful:
                    write_atomically(self._state(run), one.end.encoded())
        append_durably(self.folder.path / "results.jsonl", "".join(_line(*result) for result in results.items()))

    def _start(self, run: Run) -> Checkpoint | None:
        """Where a run begins: where it was at the end of the rung below, or at its own beginning if there is no such state."""
        file = self._state(run._replace(rung=run.rung - 1))
        return Checkpoint.read(file, "") if run.seed == 0 and file.exists() else None

    def _state(self, run: Run) -> Path:
        return self.folder.path / "states" / f"{run.search}-{run.rung}-{run.candidate}"

    def _left(self, run: Run) -> int:
        """The rounds that a run makes on its rung."""
        before = self.tuning.rounds(run.rung - 1) if run.rung and not run.seed else 0
        return self.tuning.rounds(run.rung) - before

    def _total(self) -> int:
        return self.tuning.pass_rounds() * max(self.tuning.passes if self.tuning.seconds is None else 1, len(self.passes))


def _line(run: Run, result: Result) -> str:
    return json.dumps({**run._asdict(), **result.outcome._asdict(), "seconds": result.seconds}) + "\n"
