"""How pictures look on a screen or in a paper, in colours that colour-blind readers can also tell apart."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.errors import InputError


class Style(NamedTuple):
    """A picture's size in inches, its resolution, and matplotlib's settings."""

    width: float
    height: float
    dpi: int
    settings: Any  # by name


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, 2008
DARK_COLOURS = ("#4DA8E8", "#FF8A47", "#2CC295", "#E79BC9", "#F5BE41", "#A5DAFF", "#F2F4F7")  # the same hues, on a dark page
LINES = ("-", "--", "-.", ":")
EMBEDDED = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "fedbilevel"}  # text stays text
SCREEN = Style(12, 3.8, 150, {**EMBEDDED, "font.size": 11, "axes.titlesize": 11, "lines.linewidth": 1.8})
PAPER = Style(  # the text width and caption size of the usual conference templates
    5.5,
    1.9,
    600,
    {
        **EMBEDDED,
        "font.family": "serif",
        "mathtext.fontset": "cm",
        "font.size": 8,
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 8,
        "lines.linewidth": 1.1,
        "axes.linewidth": 0.6,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "grid.linewidth": 0.4,
    },
)
COLUMN = Style(  # a column of a two-column template, in LaTeX's own letters
    3.25,
    2.3,
    600,
    {
        **PAPER.settings,
        "font.serif": ["cmr10", "DejaVu Serif"],
        "axes.formatter.use_mathtext": True,
        "legend.fontsize": 7,
    },
)
STYLES = {"screen": SCREEN, "paper": PAPER}


def find_style(name: str) -> Style:
    """The style of that name."""
    if name not in STYLES:
        raise InputError(f"--style must be one of {', '.join(STYLES)}; given: {name}")
    return STYLES[name]


def look(k: int) -> dict[str, Any]:
    """The colour and line style of the k-th curve, for matplotlib."""
    return dict(color=COLOURS[k % len(COLOURS)], linestyle=LINES[k // len(COLOURS) % len(LINES)])


def legend_above(figure: Any, handles: Collection[Any], names: Collection[str]) -> None:
    """Add a legend above the figure, across its whole width."""
    columns = min(len(names), max(1, int(figure.get_figwidth() * 90 / (9 * max(map(len, names)) + 40))))
    figure.legend(handles, names, loc="outside upper center", ncols=columns, frameon=False)


def save(figure: Any, path: Path, style: Style) -> None:
    """Save the figure; its bytes do not depend on the date."""
    figure.savefig(path, dpi=style.dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
