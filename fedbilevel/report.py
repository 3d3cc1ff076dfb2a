"""Runs side by side: a table for the terminal and a picture of the curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from fedbilevel.errors import InputError
from fedbilevel.experiment import COUNTERS
from fedbilevel.registry import find
from fedbilevel.runs import RunFolder
from fedbilevel.tasks import TASKS

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, 2008
STYLES = ("-", "--", "-.", ":")


class Curve(NamedTuple):
    """One run's numbers along the way."""

    label: str
    rows: list[dict[str, Any]]
    status: str
    bytes_per_float: int
    headline: str

    def megabytes(self, row: dict[str, Any], *directions: str) -> float:
        """Sent in these directions until this row."""
        return sum(row[f"floats_{d}"] for d in directions) * self.bytes_per_float / 1e6


def curves(folders: Sequence[RunFolder]) -> list[Curve]:
    """What there is of each run; labels say in what the runs differ. `InputError` if a run has no metrics yet."""
    described = [_flat(folder.configuration.plain()) for folder in folders]
    differing = [k for k in dict.fromkeys(k for d in described for k in d) if len({str(d.get(k, "")) for d in described}) > 1]
    names = [d["algorithm"] for d in described]
    result = []
    for folder, values, name in zip(folders, described, names, strict=True):
        rows = folder.rows()
        if not rows:
            raise InputError(f"{folder.path} has no metrics yet: resume it, or leave it out")
        twins = names.count(name) > 1
        details = [f"{k} {values[k]}" for k in differing if k in values and k != "algorithm"] if twins else []
        ended = folder.result
        status = str(ended["status"]) if ended else "unfinished"
        task = find(TASKS, "task", folder.configuration.task).load()
        result.append(Curve(", ".join([name, *details]), rows, status, folder.bytes_per_float, task.headline))
    return result


def table(curves: Sequence[Curve]) -> Table:
    """The last row of every run, without its losses."""
    numbers = dict.fromkeys(name for curve in curves for name in curve.rows[-1])
    metrics = [name for name in numbers if name not in COUNTERS and not name.endswith("_loss")]
    headlines = list(dict.fromkeys(curve.headline for curve in curves))
    shown = [*headlines, *(m for m in metrics if m not in headlines)]
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


def picture(curves: Sequence[Curve], path: Path) -> None:
    """The headline metric against rounds and against megabytes, and the upper loss against rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    headline = curves[0].headline
    panels = [
        (axes[0], headline, "communication rounds", lambda curve, row: row["rounds"]),
        (axes[1], headline, "megabytes sent, up and down", lambda curve, row: curve.megabytes(row, "up", "down")),
        (axes[2], "upper_loss", "communication rounds", lambda curve, row: row["rounds"]),
    ]
    for axis, metric, label, position in panels:
        lowest, highest = float("inf"), 0.0
        for k, curve in enumerate(curves):
            rows = [row for row in curve.rows if row.get(metric) is not None]
            if not rows:
                continue
            values = [row[metric] for row in rows]
            lowest, highest = min(lowest, *values), max(highest, *values)
            style: dict[str, Any] = dict(color=COLOURS[k % len(COLOURS)], linestyle=STYLES[k // len(COLOURS) % len(STYLES)])
            axis.plot([position(curve, row) for row in rows], values, label=curve.label, **style)
        if 0 < lowest < highest / 100:
            axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.set_ylabel(metric.replace("_", " "))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """The values with those of inner dictionaries beside them."""
    inner = {k: v for value in values.values() if isinstance(value, dict) for k, v in value.items()}
    return {**{k: v for k, v in values.items() if not isinstance(v, dict)}, **inner}
