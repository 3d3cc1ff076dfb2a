"""Everything that the report page shows, as plain values."""

from __future__ import annotations

import base64
import functools
import importlib.metadata
import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.core.problem import LOSSES
from fedbilevel.errors import InputError, computing
from fedbilevel.own_code import label
from fedbilevel.report.confidence import band, series
from fedbilevel.report.curves import Curve, curves, described, diagnostics, differences, labels, metrics
from fedbilevel.report.grid_picture import heat_map
from fedbilevel.report.styles import COLOURS
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.derivative_counts import Tally
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.tasks.shown import Bars, Gallery, Histogram

AXES = {
    "rounds": "communication rounds",
    "megabytes": "megabytes, up and down",
    "gradients": "gradient evaluations",
    "seconds": "seconds",
}
BINS = 40  # of a histogram


def contents(folders: Sequence[RunFolder], sweeps: Sequence[SweepFolder] = ()) -> dict[str, Any]:
    """The page's values; runs without metrics are named and left out."""
    begun = [folder for folder in folders if folder.rows()]
    shown, notes = curves(begun), [f"{f.path} has no metrics yet." for f in folders if f not in begun]
    plain = [folder.configuration.plain() for folder in begun]
    settings, holdings, runs = [described(folder.configuration) for folder in begun], dict[str, Any](), []
    for folder, curve, values in zip(begun, shown, settings, strict=True):
        run = _run(folder, curve, values)
        try:
            _look_inside(folder, run, holdings)
        except InputError as error:
            notes.append(f"{folder.path} is shown without the details of its task: {error}")
        runs.append(run)
    metric_names, reported = metrics(shown), diagnostics(shown)
    return {
        "version": importlib.metadata.version("fedbilevel"),
        "axes": AXES,
        "colours": COLOURS,
        "metrics": metric_names,
        "diagnostics": reported,
        "losses": LOSSES,
        "runs": runs,
        "series": _series(runs, plain, settings, [*metric_names, *reported]),
        "differences": differences(settings),
        "holdings": list(holdings.values()),
        "sweeps": [_sweep(folder) for folder in sweeps],
        "notes": list(dict.fromkeys(notes)),
    }


def _sweep(folder: SweepFolder) -> dict[str, Any]:
    """A heat map of the finished cells."""
    sweep, cells = folder.sweep, folder.cells()
    metric = folder.metric
    drawn = heat_map(sweep, cells, metric)._asdict()
    drawn["numbers"] = [[None if math.isnan(n) else n for n in row] for row in drawn["numbers"]]
    title = f"{sweep.title()}: {len(cells)} of {len(sweep.cells())} cells"
    return {"title": title, "metric": metric, "folder": str(folder.path), **drawn}


def _run(folder: RunFolder, curve: Curve, settings: dict[str, Any]) -> dict[str, Any]:
    rows, ended = curve.rows, folder.result
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}
    columns["megabytes"] = [curve.megabytes(row, "up", "down") for row in rows]
    return {
        "label": curve.label,
        "folder": str(folder.path),
        "status": curve.status,
        "reason": ended.get("reason", "") if ended else "",
        "caveats": ended.get("caveats", []) if ended else [],
        "warnings": ended.get("warnings", []) if ended else [],
        "megabytes_up": curve.megabytes(rows[-1], "up"),
        "megabytes_down": curve.megabytes(rows[-1], "down"),
        "columns": columns,
        "configuration": settings,
        "versions": {**folder.versions, **{path: f"SHA-256 {used[-1]}" for path, used in folder.code.items() if used}},
    }


def _look_inside(folder: RunFolder, run: dict[str, Any], holdings: dict[str, Any]) -> None:
    """Add what only the run's experiment knows: the work done, who holds what, and what x says."""
    folder.confirm_code()
    configuration, steps = folder.configuration, run["columns"]["step"]
    tally = _tally(json.dumps({**configuration.plain(), "seed": 0}))
    work = tally.at(steps, configuration.options.seed)
    run["columns"] |= {"gradients": [w.gradients for w in work], "second_order": [w.second_order for w in work]}
    if folder.data_elsewhere:
        return
    task = tally.experiment.task
    where = json.dumps([configuration.task, dict(configuration.knobs)])
    if task.holdings is not None and where not in holdings:
        counts = {purpose: numbers.tolist() for purpose, numbers in task.holdings.counts.items()}
        holdings[where] = {"task": label(configuration.task), "runs": [], "classes": task.holdings.classes, "counts": counts}
    if where in holdings:
        holdings[where]["runs"].append(run["label"])
    x = folder.x()
    if x is not None and (x.shape != task.x.shape or x.dtype.kind != "f" or not np.isfinite(x).all()):
        raise InputError(f"x.npy must hold {task.x.size} finite numbers; given: {x.dtype}{list(x.shape)}")
    if x is not None and not np.array_equal(x, np.asarray(task.x)):
        with computing("shown(x)"):
            run["learned"] = [{**shown._asdict(), "parts": [_part(part) for part in shown.parts]} for shown in task.shown(x)]


def _part(part: Histogram | Gallery | Bars) -> dict[str, Any]:
    """One thing that a task shows."""
    match part:
        case Histogram(groups=groups):
            edges = np.histogram_bin_edges(np.concatenate(list(groups.values())), BINS)
            counts = {name: np.histogram(numbers, edges)[0].tolist() for name, numbers in groups.items()}
            return {**part._asdict(), "kind": "histogram", "edges": edges.tolist(), "groups": counts}
        case Gallery(pictures=pictures):
            encoded = [{**picture._asdict(), "image": _data_url(picture.image)} for picture in pictures]
            return {**part._asdict(), "kind": "gallery", "pictures": encoded}
        case Bars(numbers=numbers):
            return {**part._asdict(), "kind": "bars", "numbers": np.asarray(numbers, float).tolist()}


def _data_url(image: np.ndarray) -> str:
    """The image as a PNG within the page."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@functools.lru_cache(maxsize=64)
def _tally(configuration: str) -> Tally:
    """One tally for all seeds, counted once however often a page is made."""
    return Tally(Configuration.read(json.loads(configuration)).experiment())


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
