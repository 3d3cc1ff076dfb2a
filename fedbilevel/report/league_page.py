"""The league of a plan in words and numbers: how its methods rank over all panels, at equal budgets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from fedbilevel.report.confidence import interval
from fedbilevel.report.markdown import table
from fedbilevel.report.reproduction_text import scaled
from fedbilevel.runs.reproductions.league import LEVEL, Standing, friedman
from fedbilevel.runs.reproductions.plan import Reproduction
from fedbilevel.runs.reproductions.table_numbers import Number


def text(plan: Reproduction, standings: Sequence[Standing]) -> str:
    """A table for each cost: mean ranks over the panels, and the metric in each, with 95 % confidence intervals."""
    return "\n".join(_standing(plan, standing) for standing in standings)


def _standing(plan: Reproduction, standing: Standing) -> str:
    tested = friedman(standing.ranks)
    heads = ["method", "mean rank", *standing.panels]
    lines = []
    for j in standing.best_first:
        mean, half = _interval(standing.ranks[:, j])
        cells = [_shown(plan, line[j]) for line in standing.values]
        lines.append([standing.methods[j], f"{mean:.2f}{_plus_minus(half, 2)}", *cells])
    differ = "differ by Friedman's test" if tested.p < LEVEL else "may be the same by Friedman's test"
    said = (
        f"All ranks {differ} (χ² = {tested.chi_square:.2f}, F = {tested.f:.2f}, p = {tested.p:.2g}); "
        f"two methods differ by Nemenyi's if their mean ranks do by more than {tested.critical_difference:.2f}."
    )
    return f"**At equal {standing.cost}.** {said}\n\n{table(heads, lines)}"


def to_csv(plan: Reproduction, standings: Sequence[Standing]) -> str:
    """A line for each cost, panel and method, and for each mean rank."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["cost", "panel", "method", plan.metric, "half_interval", "rank"])
    for cost, methods, panels, values, ranks in standings:
        for panel, line, places in zip(panels, values, ranks, strict=True):
            for method, number, rank in zip(methods, line, places, strict=True):
                shown = ["", ""] if number is None else [f"{number.mean:.5g}", f"{_half(number):.4g}"]
                writer.writerow([cost, panel, method, *shown, f"{rank:g}"])
        for j, method in enumerate(methods):
            mean, half = _interval(ranks[:, j])
            writer.writerow([cost, "all panels", method, "", f"{half:.4g}", f"{mean:.4g}"])
    return out.getvalue()


def _shown(plan: Reproduction, number: Number | None) -> str:
    if number is None:
        return "diverged"
    factor = 1.0 if plan.scale == "plain" else 100.0
    mean, half = scaled(plan, number.mean), factor * _half(number)
    return f"{mean:.4g}{_plus_minus(half, 2)}" if plan.scale == "plain" else f"{mean:.2f}{_plus_minus(half, 2)}"


def _half(number: Number) -> float:
    """Half of the 95 % confidence interval of a mean over seeds."""
    from scipy.stats import t

    return float(t.ppf(0.975, number.of - 1)) * number.deviation / math.sqrt(number.of) if number.of > 1 else math.nan


def _interval(values: Any) -> tuple[float, float]:
    """The mean of some ranks, and half of its 95 % confidence interval over the panels."""
    return interval(values) if len(values) > 1 else (float(values[0]), math.nan)


def _plus_minus(half: float, decimals: int) -> str:
    return "" if math.isnan(half) else f" ± {half:.{decimals}f}"
