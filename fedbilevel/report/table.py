"""Runs side by side in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from fedbilevel.core.problem import LOSSES
from fedbilevel.report.confidence import interval
from fedbilevel.report.curves import Curve, metrics

NUMBERS = ("rounds", "MB up", "MB down", "seconds")


def table(curves: Sequence[Curve]) -> Table:
    """The last row of every run, or its mean over seeds with a confidence interval; the best of each metric is bold.

    Of the two losses it shows one only if runs are compared by it.
    """
    shown = [name for name in metrics(curves) if name not in LOSSES or name in {curve.headline for curve in curves}]
    series: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        series.setdefault((curve.series or curve.label, curve.status), []).append(curve)
    best = {name: _best(name, list(series.values())) for name in shown}
    out = Table(box=None, pad_edge=False, header_style="bold")
    out.add_column("run", overflow="fold")
    for name in [*(m.replace("_", " ") for m in shown), *NUMBERS]:
        out.add_column(name, justify="right")
    for alike in series.values():
        values = [_shown(name, alike, bold=alike is best[name]) for name in shown]
        last = [curve.rows[-1] for curve in alike]
        rounds, seconds = (np.mean([row[name] for row in last]) for name in ("rounds", "seconds"))
        up, down = (np.mean([c.megabytes(row, d) for c, row in zip(alike, last, strict=True)]) for d in ("up", "down"))
        out.add_row(_label(alike), *values, f"{rounds:.0f}", f"{up:.2f}", f"{down:.2f}", f"{seconds:.1f}")
    return out


def _label(alike: Sequence[Curve]) -> str:
    one = alike[0]
    name = one.label if len(alike) == 1 else f"{one.series}, {len(alike)} seeds"
    return name if one.status == "finished" else f"{name} ({one.status})"


def _ends(name: str, alike: Sequence[Curve]) -> list[float]:
    """A metric of the runs at their ends; nothing if one of them does not have it."""
    found = [row[name] for curve in alike if (row := curve.rows[-1]).get(name) is not None]
    return found if len(found) == len(alike) else []


def _shown(name: str, alike: Sequence[Curve], bold: bool) -> Text:
    ends = _ends(name, alike)
    if not ends:
        return Text("")
    mean, half = interval(ends) if len(ends) > 1 else (ends[0], None)
    text = f"{mean:.4g}" if half is None else f"{mean:.4g} ± {half:.2g}"
    return Text(text, "bold" if bold else "")


def _best(name: str, series: Sequence[Sequence[Curve]]) -> Sequence[Curve] | None:
    """The runs with the best mean of a metric, of those that finished; None if there is nothing to compare."""
    sign = -1 if series[0][0].better.get(name) == "higher" else 1
    found = [
        (sign * float(np.mean(ends)), alike)
        for alike in series
        if alike[0].status == "finished"
        if (ends := _ends(name, alike))
    ]
    return min(found, key=lambda one: one[0])[1] if len(found) > 1 else None
