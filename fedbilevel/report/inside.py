"""What only a run's experiment knows: the work it took, who holds what, and what its x says. Finding out takes seconds."""

from __future__ import annotations

import base64
import functools
import io
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.errors import InputError, computing
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.derivative_counts import Tally, Work
from fedbilevel.runs.folder import RunFolder
from fedbilevel.tasks.base import Holdings
from fedbilevel.tasks.shown import Bars, Gallery, Histogram, Shown

BINS = 40  # of a histogram


class Inside(NamedTuple):
    """What looking into a run found."""

    work: list[Work]  # up to each row
    holdings: Holdings | None = None
    learned: list[dict[str, Any]] | None = None


def look_inside(folder: RunFolder) -> Inside:
    """Build what the run describes and look into it; `InputError` if that is not possible here."""
    folder.confirm_code()
    configuration = folder.configuration
    tally = _tally(json.dumps({**configuration.plain(), "seed": 0}))
    work = tally.at([row["step"] for row in folder.rows()], configuration.options.seed)
    if folder.data_elsewhere:
        return Inside(work)
    task, x = tally.experiment.task, folder.x()
    start = np.asarray(task.start[0])
    if x is not None and (x.shape != start.shape or x.dtype.kind != "f" or not np.isfinite(x).all()):
        raise InputError(f"x.npy must hold {start.size} finite numbers; given: {x.dtype}{list(x.shape)}")
    if x is None or np.array_equal(x, start):
        return Inside(work, task.holdings)
    with computing("shown(x)"):
        return Inside(work, task.holdings, learned_parts(task.shown(x)))


def learned_parts(sections: Iterable[Shown]) -> list[dict[str, Any]]:
    """What a task shows of its x, as plain values."""
    return [{**shown._asdict(), "parts": [_part(part) for part in shown.parts]} for shown in sections]


@functools.lru_cache(maxsize=64)
def _tally(configuration: str) -> Tally:
    """One tally for all seeds, counted once however often a page is made."""
    return Tally(Configuration.read(json.loads(configuration)).experiment())


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
