"""The results of a reproduction: the numbers of every run along the way, and the CSV file that stores them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedbilevel.errors import InputError, in_one_line
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


def collect(study: Study) -> Results:
    """The numbers of a study's runs."""
    metric, found = study.reproduction.metric, {}
    for panel, method in study.reproduction.lines():
        outcomes, work = study.outcome(panel, method).outcomes, study.work(panel, method)
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
                        math.nan if (value := row[metric]) is None else float(value),
                    )
                    for row, spent in zip(outcome.rows, spent_by_row, strict=True)
                ],
            )
            for seed, outcome, spent_by_row in zip(seeds, outcomes, work, strict=True)
        ]
    return found


HEADER = ["panel", "method", "seed", "status", *Row._fields]
NO_ROW: list[object] = [""] * len(Row._fields)  # for a run that diverged before its first row


def to_csv(results: Results) -> str:
    """A line for each moment of each run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    for (panel, method), runs in results.items():
        for run in runs:
            rows = [[r.rounds, f"{r.megabytes:.6g}", r.gradients, r.second_order, f"{r.value:.5g}"] for r in run.rows]
            for numbers in rows or [NO_ROW]:
                writer.writerow([panel, method, run.seed, run.status, *numbers])
    return out.getvalue()


def from_csv(path: Path) -> Results:
    """The results that `to_csv` wrote."""
    found: Results = {}
    lines = csv.reader(io.StringIO(read_bytes(path).decode(errors="replace"), newline=""))
    try:
        if next(lines, None) != HEADER:
            raise ValueError("it holds no results of a reproduction")
        for panel, method, seed, status, *numbers in lines:
            runs = found.setdefault((panel, method), [])
            if not runs or runs[-1].seed != int(seed):
                runs.append(Run(int(seed), status, []))
            if numbers != NO_ROW:
                rounds, megabytes, gradients, second_order, value = numbers
                runs[-1].rows.append(Row(int(rounds), float(megabytes), int(gradients), int(second_order), float(value)))
    except (csv.Error, ValueError) as error:
        raise InputError(f"{path}, line {lines.line_num}: {in_one_line(error)}: write it again") from None
    return found
