"""Runs side by side in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fedbilevel.core.problem import LOSSES
from fedbilevel.report.curves import Curve, metrics


def table(curves: Sequence[Curve]) -> Table:
    """The last row of every run, without the upper and the lower loss."""
    shown = [name for name in metrics(curves) if name not in LOSSES]
    out = Table(box=None, pad_edge=False, header_style="bold")
    out.add_column("run", overflow="fold")
    for name in [*(m.replace("_", " ") for m in shown), "rounds", "MB up", "MB down", "seconds"]:
        out.add_column(name, justify="right")
    for curve in curves:
        last = curve.rows[-1]
        label = curve.label if curve.status == "finished" else f"{curve.label} ({curve.status})"
        values = ["" if last.get(m) is None else f"{last[m]:.4g}" for m in shown]
        traffic = [f"{curve.megabytes(last, d):.2f}" for d in ("up", "down")]
        out.add_row(label, *values, str(int(last["rounds"])), *traffic, f"{last['seconds']:.1f}")
    return out
