"""Runs for a paper: their comparison as a LaTeX table, and figures at the width of a column."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.report.curve_picture import panel
from fedbilevel.report.curves import Curve
from fedbilevel.report.styles import COLUMN, legend_above, save
from fedbilevel.report.table import compared

SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
SPECIAL |= {c: rf"\{c}" for c in "&%$#_{}"}
FIGURES: dict[str, tuple[str, Callable[[Curve, dict[str, Any]], float]]] = {
    "rounds.pdf": ("communication rounds", lambda curve, row: row["rounds"]),
    "megabytes.pdf": ("megabytes, up and down", lambda curve, row: curve.megabytes(row, "up", "down")),
}


def write_latex(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Write `table.tex`, for the package booktabs, and the headline metric against rounds and megabytes; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.tex").write_text(latex_table(curves), encoding="utf-8")
    return [folder / "table.tex", *(_figure(curves, folder / name, *of) for name, of in FIGURES.items())]


def latex_table(curves: Sequence[Curve]) -> str:
    """The comparison as a tabular, with the best of each metric in bold; exponents are typeset as such."""
    comparison = compared(curves)
    lines = [["run", *comparison.columns]]
    for line in comparison.lines:
        cells = [(_number(cell.text), cell.best) for cell in line.cells]
        lines.append([_escaped(line.label), *(rf"\textbf{{{text}}}" if best else text for text, best in cells)])
    header, *body = (" & ".join(line) + r" \\" for line in [[*map(_escaped, lines[0])], *lines[1:]])
    columns = "l" + "r" * len(comparison.columns)
    rows = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(rows) + "\n"


def _escaped(text: str) -> str:
    return "".join(SPECIAL.get(c, c) for c in text)


def _number(text: str) -> str:
    def power(match: re.Match[str]) -> str:
        return rf"$\cdot 10^{{{int(match[1])}}}$"

    return re.sub(r"e([+-]\d+)", power, _escaped(text))


def _figure(curves: Sequence[Curve], path: Path, label: str, position: Callable[[Curve, dict[str, Any]], float]) -> Path:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(COLUMN.settings):
        figure = Figure(figsize=(COLUMN.width, COLUMN.height), layout="constrained")
        axis = figure.subplots()
        panel(axis, curves, curves[0].headline, position)
        axis.set_xlabel(label)
        legend_above(figure, *axis.get_legend_handles_labels())
        save(figure, path, COLUMN)
    return path
