"""Breakdown curves: the headline metric at the end of runs against the number of clients that lied, by rule and attack."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbilevel.aggregations import parts
from fedbilevel.engines.attacks import STRENGTHS, Attack
from fedbilevel.own_code import label
from fedbilevel.report.confidence import interval
from fedbilevel.report.curves import Curve, Series, described, labels
from fedbilevel.runs.configuration import Configuration


@dataclass(frozen=True)
class Point:
    """The mean over the seeds of runs with so many liars."""

    liars: int
    mean: float
    half: float | None  # half of its 95 % confidence interval; None for one seed
    diverged: bool  # one of the runs did, and the number is what was last measured


@dataclass(frozen=True)
class RuleCurve:
    """What runs with a rule came to, by their number of liars."""

    rule: str
    points: list[Point]


@dataclass(frozen=True)
class Panel:
    """A kind of attack."""

    attack: str
    curves: list[RuleCurve]


@dataclass(frozen=True)
class Breakdown:
    """Runs that differ only in their attack, their rule and their seed."""

    name: str  # how they differ from those of other breakdowns
    metric: str
    better: str
    rules: list[str]
    panels: list[Panel]


def breakdowns(shown: Sequence[Curve], configurations: Sequence[Configuration]) -> list[Breakdown]:
    """The breakdowns of all runs that have ended and differ in how many clients lied."""
    groups: dict[str, list[tuple[Curve, Configuration]]] = {}
    for curve, configuration in zip(shown, configurations, strict=True):
        if curve.status != "unfinished":
            groups.setdefault(json.dumps(_rest(configuration.plain()), sort_keys=True), []).append((curve, configuration))
    drawn = {alike: panels for alike, runs in groups.items() if (panels := _panels(runs))}
    names = labels([_rest(described(groups[alike][0][1])) for alike in drawn])
    found = []
    for name, (alike, panels) in zip(names, drawn.items(), strict=True):
        first, _ = groups[alike][0]
        rules = list(dict.fromkeys(curve.rule for panel in panels for curve in panel.curves))
        found.append(Breakdown(name, first.headline, first.better.get(first.headline, "lower"), rules, panels))
    return found


def _rest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in which runs of one breakdown are alike."""
    return {name: value for name, value in settings.items() if name not in ("attack", "aggregate", "seed")}


def _panels(runs: Sequence[tuple[Curve, Configuration]]) -> list[Panel]:
    """A panel for each kind of attack of which runs have two numbers of liars or more, none being one."""
    rules = _rules([configuration for _, configuration in runs])
    lies = [_lies(configuration.options.attack) for _, configuration in runs]
    panels = []
    for kind in dict.fromkeys(kind for kind, _ in lies if kind):
        of_rules: dict[str, dict[int, list[Curve]]] = {}
        for (curve, _), rule, (of, liars) in zip(runs, rules, lies, strict=True):
            if of in (kind, ""):
                of_rules.setdefault(rule, {}).setdefault(liars, []).append(curve)
        curves = [RuleCurve(rule, _points(by_liars)) for rule, by_liars in of_rules.items()]
        if len({point.liars for curve in curves for point in curve.points}) > 1:
            panels.append(Panel(kind, curves))
    return panels


def _lies(attack: str) -> tuple[str, int]:
    """The kind of an attack, with its strength unless that is usual, and the number of liars."""
    if not attack:
        return "", 0
    parsed = Attack.parse(attack)
    usual = parsed.strength == STRENGTHS[parsed.name]
    return parsed.name if usual else f"{parsed.name}, strength {parsed.strength:g}", parsed.liars


def _rules(configurations: Sequence[Configuration]) -> list[str]:
    """The rule of each run, with the settings in which rules of that name differ.

    `byzantine` often follows the number of liars: it tells rules apart only where runs under one attack differ in it.
    """
    settings = []
    for configuration in configurations:
        name, values = parts(configuration.options.aggregate)
        settings.append({**values, "task": "", "algorithm": label(name)})
    rest = [{name: value for name, value in one.items() if name != "byzantine"} for one in settings]
    under: dict[tuple[str, str], set[str]] = {}
    for one, others, configuration in zip(settings, rest, configurations, strict=True):
        under.setdefault((str(others), configuration.options.attack), set()).add(one.get("byzantine", ""))
    apart = {others for (others, _), values in under.items() if len(values) > 1}
    return labels([one if str(others) in apart else others for one, others in zip(settings, rest, strict=True)])


def _points(by_liars: dict[int, list[Curve]]) -> list[Point]:
    points = []
    for liars, runs in sorted(by_liars.items()):
        ends = Series("", runs).ends(runs[0].headline)
        if ends:
            mean, half = interval(ends) if len(ends) > 1 else (ends[0], None)
            points.append(Point(liars, mean, half, any(run.status == "diverged" for run in runs)))
    return points
