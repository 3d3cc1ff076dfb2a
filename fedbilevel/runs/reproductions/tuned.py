"""The values that were chosen for the lines of a plan: the file NAME.tuned.toml beside it, which `--tune` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from fedbilevel.user_files import Scalar, read_toml

FOLDER = Path(__file__).parents[3] / "reproductions"
Values = Mapping[str, Scalar]


class Choice(TypedDict):
    """The best cell of a line's grid, or candidate of its search, as a tuned file stores it, along with numbers for readers."""

    panel: str
    method: str
    values: Values
    cells: int
    diverged: int
    with_paper_values: NotRequired[float | str]  # the metric, or "diverged"
    boxes: NotRequired[Mapping[str, Sequence[float]]]  # of a search
    edges: NotRequired[Sequence[str]]  # what has its best value at an end of all that was searched


@dataclass(frozen=True)
class Tuned:
    """The values that tuning has chosen, by panel and method."""

    chosen: Sequence[Choice] = ()
    searched: bool = False  # by a search, and not over grids

    @classmethod
    def read(cls, path: Path) -> Tuned:
        """The values in a file; none if there is no such file."""
        return read_toml(path, cls) if path.exists() else cls()

    def values(self, panel: str, method: str) -> Values | None:
        """What was chosen for a line; None if it was not tuned."""
        return next((c["values"] for c in self.chosen if (c["panel"], c["method"]) == (panel, method)), None)


def tuned_file(name: str, folder: Path = FOLDER) -> Path:
    """The file of a reproduction's chosen values."""
    return folder / f"{name}.tuned.toml"


def tuned_text(name: str, metric: str, entries: Sequence[Mapping[str, Any]], searched: bool = False) -> str:
    """The text of a file with chosen values."""
    how = f"cell of each line's grid by {metric}"
    if searched:
        how = "candidate of each line's search by validation rows"
    lines = [f"# Written by `fedbilevel reproduce {name} --tune`: the best {how}.", *(["searched = true"] if searched else [])]
    for entry in entries:
        in_order = sorted(entry.items(), key=lambda item: item[0] == "values")
        lines += ["", "[[chosen]]", *(f"{k} = {_toml(v)}" for k, v in in_order)]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A number, a text, a list of these, or a table of any of them."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {json.dumps(v)}' for k, v in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)
