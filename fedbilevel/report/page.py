"""The report page: one self-contained HTML file, with charts drawn by Plotly's own script."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any


def page(contents: Mapping[str, Any], live: bool = False) -> str:
    """The page as HTML; a live page asks its server for newer contents."""
    from plotly.offline import get_plotlyjs

    parts = {
        "style": _part("page.css"),
        "live": "yes" if live else "",
        "data": encoded(contents).replace("<", "\\u003c"),  # nothing in it can close the element around it
        "plotly": get_plotlyjs(),
        "script": _part("page.js"),
    }
    return re.sub(r"{{(\w+)}}", lambda place: parts[place[1]], _part("page.html"))


def encoded(contents: Mapping[str, Any]) -> str:
    """The contents as JSON; `ValueError` for numbers that are not finite, which JSON cannot express."""
    return json.dumps(contents, allow_nan=False)


def _part(name: str) -> str:
    return resources.files("fedbilevel.report").joinpath(name).read_text(encoding="utf-8")
