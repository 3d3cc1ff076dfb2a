"""A picture of one run's numbers along the way, for a notebook or a script."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from fedbilevel.report.curve_picture import panel
from fedbilevel.report.curves import Curve
from fedbilevel.report.styles import SCREEN

WIDTH, HEIGHT = 4.0, 3.0  # inches of a panel


def figure(history: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    """A figure of matplotlib's with a panel for each of these numbers, against rounds."""
    import matplotlib

    from fedbilevel.report.shown_figure import ShownFigure

    curve = Curve("", [dict(row) for row in history], "", "")
    with matplotlib.rc_context(SCREEN.settings):
        drawn = ShownFigure(figsize=(WIDTH * len(names), HEIGHT), layout="constrained")
        for axis, name in zip(drawn.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            panel(axis, [curve], name, lambda curve, row: row["rounds"])
            axis.set_xlabel("communication rounds")
    return drawn


def data_url(drawn: Any) -> str:
    """The figure as an SVG picture within a page."""
    file = io.BytesIO()
    drawn.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
