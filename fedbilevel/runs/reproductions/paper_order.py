"""Whether our order of methods is the paper's, two methods at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from fedbilevel.runs.reproductions.plan import Column, Panel, Reproduction
from fedbilevel.runs.reproductions.results import Results
from fedbilevel.runs.reproductions.table_numbers import Number, number
from fedbilevel.runs.sweeps.sweep import higher_is_better


class Pair(NamedTuple):
    """Two methods in the paper's order by one number."""

    ahead: str
    behind: str
    by: Column


class Doubts(NamedTuple):
    """Pairs about which our runs raise doubts."""

    wrong: list[Pair]  # ours are not in this order
    hollow: list[Pair]  # ours are, but only because of runs that diverged


def doubts(plan: Reproduction, panel: Panel, results: Results, at: int | None = None) -> Doubts:
    """Where our order of a panel's methods is not the paper's, or is so only because of runs that diverged.

    What the paper claims without numbers is looked for after `at` rounds, as the results count them; at the end unless given.
    """
    found = Doubts([], [])
    for pair in _pairs(plan, panel, plan.rounds if at is None else at):
        a, b = (number(results[panel.name, name], pair.by) for name in (pair.ahead, pair.behind))
        higher = _higher(plan, pair.by)
        if not _is_ahead(a, b, higher):
            found.wrong.append(pair)
        elif a and b and not _is_better(a.mean, b.mean, higher):
            found.hollow.append(pair)
    return found


def _pairs(plan: Reproduction, panel: Panel, at: int) -> Iterator[Pair]:
    """The pairs by the paper's numbers in every column; if it has none, by what it claims."""
    methods = plan.methods_of(panel)
    if panel.name in plan.published:
        published = plan.published[panel.name]
        known = [name for name in methods if name in published]
        for k, column in enumerate(plan.columns):
            for ahead, behind in itertools.permutations(known, 2):
                if _is_better(published[ahead][k], published[behind][k], _higher(plan, column)):
                    yield Pair(ahead, behind, column)
    else:
        place = {name: k for k, group in enumerate(plan.claims(panel)) for name in group if name in methods}
        for ahead, behind in itertools.permutations(place, 2):
            if place[ahead] < place[behind]:
                yield Pair(ahead, behind, Column(at=at))


def _higher(plan: Reproduction, column: Column) -> bool:
    """Whether larger numbers are better in a column."""
    return column.at is not None and higher_is_better(plan.task, plan.metric)


def _is_ahead(a: Number | None, b: Number | None, higher: bool) -> bool:
    """Whether a is better than b, or b is missing; a number that a larger share of runs has is better."""
    if a is None or b is None:
        return b is None
    if a.of / a.runs != b.of / b.runs:
        return a.of / a.runs > b.of / b.runs
    return _is_better(a.mean, b.mean, higher)


def _is_better(a: float, b: float, higher: bool) -> bool:
    return a > b if higher else a < b
