"""Runs as their folders record them: each one's numbers along the way, under a label that says how it differs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fedbilevel.aggregations import in_short
from fedbilevel.core.problem import LOSSES
from fedbilevel.errors import InputError
from fedbilevel.own_code import label
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import COUNTERS
from fedbilevel.runs.folder import RunFolder
from fedbilevel.tasks.base import Better
from fedbilevel.tasks.validation import directions


class Curve(NamedTuple):
    """One run's numbers along the way."""

    label: str
    rows: list[dict[str, Any]]
    status: str
    headline: str
    diagnostics: Collection[str] = ()  # the names of what its algorithm reports besides the metrics
    series: str = ""  # the label of this run and of those that differ from it only in their seed
    better: Better = {}  # noqa: RUF012 (never modified) as the task says
    best_round: int | None = None  # which its x and y are of, if not of the last row

    @property
    def end(self) -> dict[str, Any]:
        """The row that its x and y are of."""
        return next((row for row in self.rows if row["rounds"] == self.best_round), self.rows[-1])

    def megabytes(self, row: dict[str, Any], *directions: str) -> float:
        """The megabytes sent in these directions up to this row."""
        return sum(row[f"bytes_{d}"] for d in directions) / 1e6


class Series(NamedTuple):
    """Runs that differ only in their seed, and ended alike."""

    name: str
    runs: list[Curve]

    @property
    def label(self) -> str:
        """The name, with how the runs ended unless they finished."""
        status = self.runs[0].status
        return self.name if status == "finished" else f"{self.name} ({status})"

    def ends(self, name: str) -> list[float]:
        """A number of the runs at their ends; nothing if one of them does not have it."""
        found = [row[name] for run in self.runs if (row := run.end).get(name) is not None]
        return found if len(found) == len(self.runs) else []


def in_series(curves: Sequence[Curve]) -> list[Series]:
    """The runs, with those together that differ only in their seed."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.series or curve.label, curve.status), []).append(curve)
    found = []
    for (name, _), runs in groups.items():
        found.append(Series(runs[0].label if len(runs) == 1 else f"{name}, {len(runs)} seeds", runs))
    return found


def curves(folders: Sequence[RunFolder]) -> list[Curve]:
    """Each run's curve so far; labels say how the runs differ. `InputError` if a run has no metrics yet."""
    result = []
    settings = [described(folder.configuration) for folder in folders]
    seedless = labels([{name: value for name, value in one.items() if name != "seed"} for one in settings])
    for folder, name, series in zip(folders, labels(settings), seedless, strict=True):
        rows = folder.rows()
        if not rows:
            raise InputError(f"{folder.path} has no metrics yet: resume it, or leave it out")
        ended = folder.result
        status = str(ended["status"]) if ended else "unfinished"
        reported: Collection[str] = ()
        with contextlib.suppress(InputError):  # settings that this version no longer has
            reported = folder.diagnostics
        better: Better = {}
        with contextlib.suppress(InputError):  # a task that is gone
            better = directions(folder.headline, folder.configuration.task_class().better)
        best_round = ended.get("best_round") if ended else None
        result.append(Curve(name, rows, status, folder.headline, reported, series, better, best_round))
    return result


def described(configuration: Configuration) -> dict[str, Any]:
    """All settings of a run in one dictionary, with its task and its algorithm by name only."""
    found = flat({**configuration.plain(), "task": label(configuration.task), "algorithm": label(configuration.algorithm)})
    return {**found, "aggregate": in_short(configuration.options.aggregate)}


def labels(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each configuration: its algorithm, its task if tasks differ, and how it differs from similar ones.

    A run under attack always has the attack and the rule in its name.
    """
    several = len({d["task"] for d in configurations}) > 1

    def named(one: Mapping[str, Any]) -> str:
        alike = [d for d in configurations if (d["task"], d["algorithm"]) == (one["task"], one["algorithm"])]
        name = f"{one['algorithm']} on {one['task']}" if several else one["algorithm"]
        told = {*differences(alike), *(("aggregate", "attack") if one.get("attack") else ())}
        return ", ".join([name, *(f"{k} {one[k]}" if one[k] != "" else f"no {k}" for k in one if k in told)])

    return [named(one) for one in configurations]


def differences(described: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which configurations differ."""
    return [k for k in dict.fromkeys(k for d in described for k in d) if len({str(d.get(k, "")) for d in described}) > 1]


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with those of inner dictionaries moved up to the same level, under longer names if theirs are taken."""
    beside = {k: v for k, v in values.items() if not isinstance(v, dict)}
    for whose, inner in values.items():
        if isinstance(inner, dict):
            beside |= {f"{whose}.{k}" if k in beside else k: v for k, v in inner.items()}
    return beside


def metrics(curves: Sequence[Curve]) -> list[str]:
    """The names of all metrics: first those by which methods are compared, last the two losses."""
    found = [name for curve in curves for name in curve.rows[-1] if name not in (*COUNTERS, *curve.diagnostics)]
    in_order = [*(curve.headline for curve in curves), *(m for m in found if m not in LOSSES), *LOSSES]
    return list(dict.fromkeys(name for name in in_order if name in found))


def diagnostics(curves: Sequence[Curve]) -> list[str]:
    """The names of everything that the runs' algorithms report."""
    return list(dict.fromkeys(name for curve in curves for name in curve.rows[-1] if name in curve.diagnostics))
