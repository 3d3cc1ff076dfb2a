"""The results of a reproduction: the numbers of every run along the way, and the CSV file that stores them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedbilevel.errors import InputError, in_one_line
from fedbilevel.runs.reproductions.plan import Reproduction
from fedbilevel.runs.reproductions.study import Study
from fedbilevel.runs.sweeps.batched_runs import DIVERGED
from fedbilevel.user_files import read_bytes


class Row(NamedTuple):
    """A moment of a run."""

    rounds: int
    megabytes: float  # up and down
    gradients: int
    second_order: int
    value: float  # the reproduction's metric
    seconds: float = math.nan  # of computing, without compiling, among the line's other seeds; only where methods are ranked

    @property
    def derivatives(self) -> int:
        """Gradients and second-order products, on minibatches, over all clients."""
        return self.gradients + self.second_order


class Run(NamedTuple):
    """A line's run with one seed."""

    seed: int
    status: str
    rows: list[Row]

    def after(self, rounds: int) -> float | None:
        """The metric after so many rounds; None if the run had diverged by then."""
        return self.when(lambda row: row.rounds, rounds)

    def when(self, spent: Callable[[Row], float], limit: float) -> float | None:
        """The last metric before more than the limit was spent; None if the run had diverged, or had no metrics yet."""
        reached = [row for row in self.rows if spent(row) <= limit]
        if not reached or (self.status == DIVERGED and len(reached) == len(self.rows) and spent(reached[-1]) < limit):
            return None
        return reached[-1].value

    def until(self, value: float) -> int | None:
        """The rounds until the metric was at least this value; None if it never was."""
        return next((row.rounds for row in self.rows if row.value >= value), None)


Results = dict[tuple[str, str], list[Run]]  # by panel and method


def as_the_paper_counts(plan: Reproduction, results: Results) -> Results:
    """The results with the paper's communications for round trips; what is sent before the first step is in none."""
    trips = {method.name: method.trips for method in plan.methods}
    return {
        (panel, method): [
            run._replace(rows=[row._replace(rounds=row.rounds // trips[method]) for row in run.rows]) for run in runs
        ]
        for (panel, method), runs in results.items()
    }


def collect(study: Study) -> Results:
    """The numbers of a study's runs, and of lines that it leaves alone those stored beside the plan."""
    here, found = study.lines(), Results()
    others = [line for line in study.reproduction.lines() if line not in here]
    stored = from_csv(study.stored) if others else {}
    for panel, method in study.reproduction.lines():
        if (panel, method) in others:
            study.require_stored(panel, method)
            found[panel.name, method.name] = stored[panel.name, method.name]
            continue
        outcomes, work = study.outcome(panel, method).outcomes, study.work(panel, method)
        shown = study.shown(panel, method)
        seeds = study.reproduction.reported(panel, method, {}).seed_numbers()
        found[panel.name, method.name] = [
            Run(
                seed,
                outcome.status,
                [
                    Row(
                        int(row["rounds"] or 0),
                        (float(row["bytes_up"] or 0) + float(row["bytes_down"] or 0)) / 1e6,
                        spent.gradients,
                        spent.second_order,
                        math.nan if value is None else float(value),
                        float(row["seconds"] or 0) if study.reproduction.ranked else math.nan,
                    )
                    for row, value, spent in zip(outcome.rows, values, spent_by_row, strict=True)
                ],
            )
            for seed, outcome, values, spent_by_row in zip(seeds, outcomes, shown, work, strict=True)
        ]
    return found


HEADER = ["panel", "method", "seed", "status", *Row._fields[:-1]]
TIMED = [*HEADER, Row._fields[-1]]


def to_csv(results: Results) -> str:
    """A line for each moment of each run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    timed = not all(math.isnan(row.seconds) for runs in results.values() for run in runs for row in run.rows)
    writer.writerow(TIMED if timed else HEADER)
    no_row: list[object] = [""] * (len(Row._fields) - (not timed))  # for a run that diverged before its first row
    for (panel, method), runs in results.items():
        for run in runs:
            rows = [
                [r.rounds, f"{r.megabytes:.6g}", r.gradients, r.second_order, f"{r.value:.5g}", *[f"{r.seconds:.4g}"] * timed]
                for r in run.rows
            ]
            for numbers in rows or [no_row]:
                writer.writerow([panel, method, run.seed, run.status, *numbers])
    return out.getvalue()


def from_csv(path: Path) -> Results:
    """The results that `to_csv` wrote."""
    found: Results = {}
    lines = csv.reader(io.StringIO(read_bytes(path).decode(errors="replace"), newline=""))
    try:
        if next(lines, None) not in (HEADER, TIMED):
            raise ValueError("it holds no results of a reproduction")
        for panel, method, seed, status, *numbers in lines:
            runs = found.setdefault((panel, method), [])
            if not runs or runs[-1].seed != int(seed):
                runs.append(Run(int(seed), status, []))
            if any(numbers):
                rounds, megabytes, gradients, second_order, value, *seconds = numbers
                counted = int(rounds), float(megabytes), int(gradients), int(second_order)
                runs[-1].rows.append(Row(*counted, float(value), *map(float, seconds)))
    except (csv.Error, ValueError) as error:
        raise InputError(f"{path}, line {lines.line_num}: {in_one_line(error)}: write it again") from None
    return found
