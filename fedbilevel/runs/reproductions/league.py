"""A league: which methods are better over all panels, at equal rounds, megabytes, derivatives and seconds.

J. Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 7, 2006. In each of N panels the k methods have
ranks from 1, the best, and those with equal results share theirs. With R_j the mean rank of method j over the panels:

    Friedman:  χ² = 12 N / (k (k + 1)) (Σ R_j² - k (k + 1)² / 4),     F = (N - 1) χ² / (N (k - 1) - χ²)  (Iman and Davenport),
    Nemenyi:   two methods differ if their mean ranks do by more than  q sqrt(k (k + 1) / (6 N)),

where F has k - 1 and (k - 1)(N - 1) degrees of freedom, and q is the studentised range's quantile over √2. Panels with
one data set are not independent, so that the tests say more than there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedbilevel.runs.reproductions.plan import Reproduction
from fedbilevel.runs.reproductions.results import Results, Row
from fedbilevel.runs.reproductions.table_numbers import Number, least_spent, metric_at
from fedbilevel.runs.sweeps.sweep import higher_is_better

LEVEL = 0.05  # of the tests
COSTS: Mapping[str, Callable[[Row], float]] = {
    "rounds": lambda row: row.rounds,
    "megabytes": lambda row: row.megabytes,
    "derivatives": lambda row: row.derivatives,
    "seconds": lambda row: row.seconds,
}


class Standing(NamedTuple):
    """The methods at an equal budget of one cost."""

    cost: str
    methods: list[str]
    panels: list[str]
    values: list[list[Number | None]]  # by panel and method; None: a run diverged, or none got that far
    ranks: np.ndarray  # by panel and method

    @property
    def mean_ranks(self) -> np.ndarray:
        """The mean rank of each method."""
        return self.ranks.mean(0)

    @property
    def best_first(self) -> list[int]:
        """The numbers of the methods, by mean rank."""
        return sorted(range(len(self.methods)), key=lambda j: self.mean_ranks[j])


class Friedman(NamedTuple):
    """Friedman's test, and what differs by Nemenyi's."""

    chi_square: float
    f: float
    p: float  # of F
    critical_difference: float


def standings(plan: Reproduction, results: Results) -> list[Standing]:
    """The methods that are in every panel, at an equal budget of each cost."""
    methods = [m.name for m in plan.methods if all(m.name in plan.methods_of(panel) for panel in plan.panels)]
    higher, found = higher_is_better(plan.task, plan.metric), []
    for cost, spent in COSTS.items():
        values: list[list[Number | None]] = []
        for panel in plan.panels:
            lines = [results[panel.name, method] for method in methods]
            limit = least_spent(lines, spent)
            reached = [Number.over([metric_at(run, spent, limit) for run in runs]) for runs in lines]
            values.append([number if number and number.of == number.runs else None for number in reached])
        found.append(Standing(cost, methods, [p.name for p in plan.panels], values, ranks(values, higher)))
    return found


def ranks(values: Sequence[Sequence[Number | None]], higher: bool) -> np.ndarray:
    """The ranks of the methods in each panel, 1 for the best; equal means share theirs, and whoever has none is last."""
    from scipy.stats import rankdata

    sign = -1 if higher else 1
    scores = [[math.inf if number is None else sign * number.mean for number in line] for line in values]
    return np.asarray([rankdata(line) for line in scores])


def friedman(ranks: np.ndarray, level: float = LEVEL) -> Friedman:
    """Friedman's test of ranks by panel and method, and Nemenyi's critical difference."""
    from scipy.stats import f as fisher
    from scipy.stats import studentized_range

    N, k = ranks.shape
    chi = 12 * N / (k * (k + 1)) * float((ranks.mean(0) ** 2).sum() - k * (k + 1) ** 2 / 4)
    free = N * (k - 1) - chi
    F = (N - 1) * chi / free if free > 1e-9 else math.inf
    p = float(fisher.sf(F, k - 1, (k - 1) * (N - 1))) if N > 1 else math.nan
    q = float(studentized_range.ppf(1 - level, k, np.inf)) / math.sqrt(2)
    return Friedman(chi, F, p, q * math.sqrt(k * (k + 1) / (6 * N)))


def alike(mean_ranks: Sequence[float], difference: float) -> list[tuple[float, float]]:
    """The longest stretches of mean ranks within the critical difference, as their ends."""
    at = sorted(mean_ranks)
    reach = [max(other for other in at if other - first <= difference) for first in at]
    stretches = [(first, last) for k, (first, last) in enumerate(zip(at, reach, strict=True)) if k == 0 or last > reach[k - 1]]
    return [(first, last) for first, last in stretches if last > first]
