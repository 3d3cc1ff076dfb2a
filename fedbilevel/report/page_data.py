"""Everything that the report page shows, as plain values."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedbilevel.errors import InputError
from fedbilevel.own_code import label
from fedbilevel.report.breakdown import breakdowns
from fedbilevel.report.cells_table import cells_table
from fedbilevel.report.command_line import run_commands, sweep_command
from fedbilevel.report.confidence import band, series
from fedbilevel.report.curves import Curve, curves, described, diagnostics, differences, labels, metrics
from fedbilevel.report.grid_picture import heat_map
from fedbilevel.report.inside import Inside, look_inside
from fedbilevel.report.styles import COLOURS, DARK_COLOURS
from fedbilevel.report.table import compared
from fedbilevel.report.tuning_picture import lines as tuning_lines
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.tuning.folder import TuningFolder

AXES = {
    "rounds": "communication rounds",
    "megabytes": "megabytes, up and down",
    "gradients": "gradient evaluations",
    "seconds": "seconds",
}
COUNTED = {"gradients": "gradients", "second-order products": "second_order"}


def contents(
    folders: Sequence[RunFolder],
    sweeps: Sequence[SweepFolder] = (),
    tunings: Sequence[TuningFolder] = (),
    look: Callable[[RunFolder], Inside | None] = look_inside,
) -> dict[str, Any]:
    """The page's values; runs without metrics are named and left out.

    `look` finds what only a run's experiment knows, or returns None if that is not known yet.
    """
    begun = [folder for folder in folders if folder.rows()]
    shown, notes = curves(begun), [_without_rows(folder) for folder in folders if folder not in begun]
    configurations = [folder.configuration for folder in begun]
    settings, holdings, runs = [described(configuration) for configuration in configurations], dict[str, Any](), []
    for folder, curve, values in zip(begun, shown, settings, strict=True):
        run = _run(folder, curve, values)
        try:
            inside = look(folder)
        except InputError as error:
            inside = None
            notes.append(f"{folder.path} is shown without the details of its task: {error}")
        if inside:
            _add_inside(run, inside, folder, holdings)
        runs.append(run)
    metric_names, reported = metrics(shown), diagnostics(shown)
    commands = [*run_commands(configurations), *(sweep_command(folder.sweep, folder.metric) for folder in sweeps)]
    started = [*(f.started for f in begun), *(f.started for f in sweeps), *(f.started for f in tunings)]
    tasks = [*(c.task for c in configurations), *(f.described.task for f in sweeps), *(f.described.task for f in tunings)]
    return {
        "version": importlib.metadata.version("fedbilevel"),
        "tasks": list(dict.fromkeys(map(label, tasks))),
        "started": min((when for when in started if when), default=""),
        "commands": [command for command in commands if command],
        "axes": AXES,
        "colours": {"light": COLOURS, "dark": DARK_COLOURS},
        "metrics": metric_names,
        "diagnostics": reported,
        "table": _table(shown, runs),
        "runs": runs,
        "series": _series(runs, [c.plain() for c in configurations], settings, [*metric_names, *reported]),
        "breakdowns": [dataclasses.asdict(one) for one in breakdowns(shown, configurations)],
        "differences": differences(settings),
        "holdings": list(holdings.values()),
        "sweeps": [_sweep(folder) for folder in sweeps],
        "tunings": [_tuning(folder) for folder in tunings],
        "notes": list(dict.fromkeys(notes)),
    }


def _without_rows(folder: RunFolder) -> str:
    ended = folder.result
    return f"{folder.path} has no metrics: {ended.get('reason')}" if ended else f"{folder.path} has no metrics yet."


def _table(shown: Sequence[Curve], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The comparison, with the derivatives that were counted and how the runs stand."""
    comparison, lines = compared(shown), []
    for line in comparison.lines:
        numbers = [k for k, curve in enumerate(shown) if any(curve is run for run in line.series.runs)]
        counted = [[(runs[k]["columns"].get(name) or [None])[-1] for k in numbers] for name in COUNTED.values()]
        means = [None if None in counts else float(np.mean(counts)) for counts in counted]
        work = [{"text": "" if mean is None else f"{mean:,.0f}", "value": mean, "best": False} for mean in means]
        cells = [*(cell._asdict() for cell in line.cells[:-1]), *work, line.cells[-1]._asdict()]
        lines.append({"label": line.series.name, "runs": numbers, "cells": cells})
    *columns, seconds = comparison.columns
    return {"columns": [*columns, *COUNTED, seconds], "lines": lines}


def _sweep(folder: SweepFolder) -> dict[str, Any]:
    """The finished cells: a heat map, and a table with the command that runs each of them."""
    sweep, metric = folder.sweep, folder.metric
    cells = sweep.ranked(folder.cells(), metric)
    drawn = heat_map(sweep, cells, metric)._asdict()
    drawn["numbers"] = [[None if math.isnan(n) else n for n in row] for row in drawn["numbers"]]
    head, *rows = cells_table(sweep, cells, metric)
    best = cells[0].mean(metric) if cells else math.nan
    places = [[r, c] for r, row in enumerate(drawn["numbers"]) for c, number in enumerate(row) if number == best]
    return {
        "title": sweep.title(),
        "done": len(cells),
        "of": len(sweep.cells()),
        "metric": metric,
        "better": sweep.better.get(metric, "lower"),
        "folder": str(folder.path),
        "best": places[0] if places else None,
        "head": head,
        "cells": [
            {"texts": row, "command": _command(partial(sweep.configuration, cell.values, sweep.first_seed))}
            for row, cell in zip(rows, cells, strict=True)
        ],
        **drawn,
    }


def _command(configuration: Callable[[], Configuration]) -> str:
    """The command that makes a run; empty if there is none."""
    try:
        return "".join(run_commands([configuration()]))
    except InputError:  # its data, or its code, is not here
        return ""


def _tuning(folder: TuningFolder) -> dict[str, Any]:
    """The rungs, the candidates in parallel coordinates, and the command that runs the best."""
    found = folder.found()
    tuning, best = found.tuning, found.best()
    drawn = [
        {**line._asdict(), "numbers": [None if math.isnan(n) else n for n in line.numbers]} for line in tuning_lines(found)
    ]
    return {
        "title": found.summary(),
        "metric": tuning.metric,
        "folder": str(folder.path),
        "command": _command(partial(tuning.configuration, best.values, 0, tuning.rungs - 1)) if best else "",
        "names": list(tuning.boxes),
        "lines": drawn,
    }


def _run(folder: RunFolder, curve: Curve, settings: dict[str, Any]) -> dict[str, Any]:
    rows, ended, options = curve.rows, folder.result, folder.configuration.options
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}
    columns["megabytes"] = [curve.megabytes(row, "up", "down") for row in rows]
    return {
        "label": curve.label,
        "folder": str(folder.path),
        "status": curve.status,
        "unit": "round" if options.rounds else "step",
        "done": rows[-1]["rounds" if options.rounds else "step"],
        "of": options.rounds or options.steps,
        "reason": ended.get("reason", "") if ended else "",
        "caveats": ended.get("caveats", []) if ended else [],
        "warnings": ended.get("warnings", []) if ended else [],
        "columns": columns,
        "configuration": settings,
        "versions": {**folder.versions, **{path: f"SHA-256 {used[-1]}" for path, used in folder.code.items() if used}},
    }


def _add_inside(run: dict[str, Any], inside: Inside, folder: RunFolder, holdings: dict[str, Any]) -> None:
    """Add to a run what was found inside; rows that have come since then have no counts yet."""
    rows = len(run["columns"]["step"])
    later = [None] * max(0, rows - len(inside.work))
    run["columns"] |= {name: [*(getattr(w, name) for w in inside.work[:rows]), *later] for name in COUNTED.values()}
    if inside.learned is not None:
        run["learned"] = inside.learned
    held, configuration = inside.holdings, folder.configuration
    if held is not None:
        where = json.dumps([configuration.task, dict(configuration.knobs)])
        counts = {purpose: numbers.tolist() for purpose, numbers in held.counts.items()}
        first = {"task": label(configuration.task), "runs": [], "unit": held.unit, "classes": held.classes, "counts": counts}
        holdings.setdefault(where, first)["runs"].append(run["label"])


def _series(
    runs: list[dict[str, Any]], plain: list[dict[str, Any]], settings: list[dict[str, Any]], metric_names: list[str]
) -> list[dict[str, Any]]:
    """The curves of a chart: one for every configuration, over all of its seeds."""
    groups = series(plain)
    names = labels([{k: v for k, v in settings[group[0]].items() if k != "seed"} for group in groups])
    result = []
    for group, name in zip(groups, names, strict=True):
        bands: dict[str, dict[str, Any]] = {}
        for axis in AXES if len(group) > 1 else ():
            for metric in metric_names:
                points = [_points(runs[k]["columns"], axis, metric) for k in group]
                found = band(*zip(*points, strict=True)) if all(p[0] for p in points) else None
                if found is not None:
                    bands.setdefault(axis, {})[metric] = found._asdict()
        result.append({"label": f"{name}, {len(group)} seeds" if len(group) > 1 else name, "runs": group, "bands": bands})
    return result


def _points(columns: dict[str, list], axis: str, metric: str) -> tuple[list[float], list[float]]:
    """The positions where a metric is known, and its values there."""
    both = zip(columns.get(axis, []), columns.get(metric, []), strict=False)
    known = [(at, value) for at, value in both if at is not None and value is not None]
    return [at for at, _ in known], [value for _, value in known]
