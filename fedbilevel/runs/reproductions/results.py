"""What came out: the numbers of every run as one CSV file, and from it the tables and what they say about the paper."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedbilevel.errors import InputError
from fedbilevel.runs.reproductions.plan import Column, Panel, Reproduction
from fedbilevel.runs.reproductions.study import Study
from fedbilevel.runs.sweeps.batched_runs import DIVERGED
from fedbilevel.runs.sweeps.sweep import deviation, higher_is_better

BYTES_PER_FLOAT = 4


class Row(NamedTuple):
    """A moment of a run."""

    rounds: int
    megabytes: float  # up and down
    gradients: int
    products: int
    value: float  # the reproduction's metric

    @property
    def derivatives(self) -> int:
        """Gradients and second-order products, on minibatches, over all clients."""
        return self.gradients + self.products


class Run(NamedTuple):
    """One seed of a line."""

    seed: int
    status: str
    rows: list[Row]

    def after(self, rounds: int) -> float | None:
        """The metric after so many rounds; None if the run had diverged by then."""
        return self.when(lambda row: row.rounds, rounds)

    def when(self, spent: Callable[[Row], float], limit: float) -> float | None:
        """The metric when so much was spent, or last before; None if the run had diverged, or was not measured by then."""
        reached = [row for row in self.rows if spent(row) <= limit]
        if not reached or (self.status == DIVERGED and len(reached) == len(self.rows) and spent(reached[-1]) < limit):
            return None
        return reached[-1].value

    def until(self, value: float) -> int | None:
        """The rounds until the metric was at least so large; None if it never was."""
        return next((row.rounds for row in self.rows if row.value >= value), None)


class Number(NamedTuple):
    """A mean over the runs that have such a number."""

    mean: float
    deviation: float
    of: int
    runs: int

    @classmethod
    def over(cls, values: Sequence[float | None]) -> Number | None:
        """None if no run has one."""
        known = [v for v in values if v is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), deviation(known), len(known), len(values))

    @property
    def share(self) -> str:
        """Of how many runs it is, if not of all."""
        return "" if self.of == self.runs else f" ({self.of} of {self.runs} runs)"


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
                        (float(row["floats_up"] or 0) + float(row["floats_down"] or 0)) * BYTES_PER_FLOAT / 1e6,
                        spent.gradients,
                        spent.products,
                        math.nan if (value := row[metric]) is None else float(value),
                    )
                    for row, spent in zip(outcome.rows, spent_by_row, strict=True)
                ],
            )
            for seed, outcome, spent_by_row in zip(seeds, outcomes, work, strict=True)
        ]
    return found


HEADER = ["panel", "method", "seed", "status", *Row._fields]


def to_csv(results: Results) -> str:
    """A line for each moment of each run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    for (panel, method), runs in results.items():
        for run in runs:
            for row in run.rows:
                numbers = [row.rounds, f"{row.megabytes:.6g}", row.gradients, row.products, f"{row.value:.5g}"]
                writer.writerow([panel, method, run.seed, run.status, *numbers])
    return out.getvalue()


def from_csv(path: Path) -> Results:
    """What `to_csv` wrote."""
    found: Results = {}
    with path.open(newline="") as file:
        lines = csv.reader(file)
        if next(lines, None) != HEADER:
            raise InputError(f"{path} holds no results of a reproduction: write it anew")
        for panel, method, seed, status, rounds, megabytes, gradients, products, value in lines:
            runs = found.setdefault((panel, method), [])
            if not runs or runs[-1].seed != int(seed):
                runs.append(Run(int(seed), status, []))
            runs[-1].rows.append(Row(int(rounds), float(megabytes), int(gradients), int(products), float(value)))
    return found


def columns(plan: Reproduction) -> Sequence[Column]:
    """Of its table: the end of the runs if the paper has none."""
    return plan.columns or [Column(at=plan.rounds)]


def number(runs: Sequence[Run], column: Column) -> Number | None:
    """A line's entry in a column."""
    if column.at is not None:
        return Number.over([run.after(column.at) for run in runs])
    return Number.over([run.until(column.reach or 0.0) for run in runs])


class Budget(NamedTuple):
    """What every method of a panel can spend: the least that one of them spent, its runs' largest."""

    megabytes: float
    derivatives: float

    def reached(self, run: Run) -> tuple[float | None, float | None]:
        """A run's metric when it has spent the one, and the other; None if it had diverged, or was not measured by then."""
        measured = run._replace(rows=run.rows[1:])
        return (
            measured.when(lambda row: row.megabytes, self.megabytes),
            measured.when(lambda row: row.derivatives, self.derivatives),
        )


def budget(lines: Sequence[Sequence[Run]]) -> Budget:
    """Of a panel's lines, runs aside that diverged."""
    ended = [[run.rows[-1] for run in runs if run.status != DIVERGED] for runs in lines]
    ends = [line for line in ended if line]
    return Budget(
        min((max(row.megabytes for row in line) for line in ends), default=0.0),
        min((max(row.derivatives for row in line) for line in ends), default=0.0),
    )


class Doubts(NamedTuple):
    """About our order of methods being the paper's, a phrase each."""

    wrong: list[str]  # where it is not
    hollow: list[str]  # where it is, and would not be without the runs that diverged

    def compare(self, ahead: str, behind: str, ours: Sequence[Number | None], higher: bool, where: str = "") -> None:
        """Note what is to be said of two methods, the first ahead in the paper."""
        a, b = ours
        if not _is_ahead(a, b, higher):
            self.wrong.append(f"{behind} is not behind {ahead}{where}")
        elif a and b and not _is_better(a.mean, b.mean, higher):
            self.hollow.append(f"{behind} is behind {ahead} only by its runs that diverged{where}")


def doubts(plan: Reproduction, panel: Panel, results: Results) -> Doubts:
    """Whether our order of methods is the paper's."""
    methods = plan.methods_of(panel)
    if panel.name in plan.published:
        return _against_numbers(plan, panel, methods, results)
    better, claimed = higher_is_better(plan.task, plan.metric), plan.claims(panel)
    last = {name: number(results[panel.name, name], Column(at=plan.rounds)) for name in methods}
    found = Doubts([], [])
    for k, group in enumerate(claimed):
        for ahead in group:
            for behind in (name for later in claimed[k + 1 :] for name in later):
                if ahead in last and behind in last:
                    found.compare(ahead, behind, (last[ahead], last[behind]), better)
    return found


def _against_numbers(plan: Reproduction, panel: Panel, methods: Sequence[str], results: Results) -> Doubts:
    published, found = plan.published[panel.name], Doubts([], [])
    known = [name for name in methods if name in published]
    for k, column in enumerate(plan.columns):
        better = column.at is not None and higher_is_better(plan.task, plan.metric)
        for ahead in known:
            for behind in known:
                theirs = published[ahead][k], published[behind][k]
                if _is_better(*theirs, better):
                    ours = [number(results[panel.name, name], column) for name in (ahead, behind)]
                    found.compare(ahead, behind, ours, better, f" ({heading(plan, column)})")
    return found


def _is_ahead(a: Number | None, b: Number | None, higher: bool) -> bool:
    """Whether a is better than b, or neither is anything; the one that more of its runs have is better."""
    if a is None or b is None:
        return b is None
    if a.of / a.runs != b.of / b.runs:
        return a.of / a.runs > b.of / b.runs
    return _is_better(a.mean, b.mean, higher)


def _is_better(a: float, b: float, higher: bool) -> bool:
    return a > b if higher else a < b


def heading(plan: Reproduction, column: Column) -> str:
    """What a column is."""
    if column.at is not None:
        return f"after {column.at} rounds"
    return f"rounds to {shown(plan, column.reach or 0.0)}{'' if plan.scale == 'plain' else ' %'}"


def shown(plan: Reproduction, value: float) -> str:
    """A value of the metric, on the reproduction's scale."""
    if plan.scale == "plain":
        return f"{value:.4g}"
    return f"{scaled(plan, value):.2f}".rstrip("0").rstrip(".")


def scaled(plan: Reproduction, value: float) -> float:
    """On the reproduction's scale."""
    return {"percent": 100 * value, "error": 100 * (1 - value), "plain": value}[plan.scale]


def text(plan: Reproduction, column: Column, entry: Number | None) -> str:
    """A line's entry as it stands in a table."""
    if entry is None:
        return "diverged" if column.at is not None else "not reached"
    if column.at is None:
        return f"{entry.mean:.0f} ± {entry.deviation:.0f}{entry.share}"
    if plan.scale == "plain":
        return f"{entry.mean:.4g} ± {entry.deviation:.2g}{entry.share}"
    return f"{scaled(plan, entry.mean):.2f} ± {100 * entry.deviation:.2f}{entry.share}"
