"""A site's list of suspected rows as a CSV file, and a page with the rows that are trusted least and most."""

from __future__ import annotations

import base64
import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from fedbilevel.runs.files import write_atomically
from fedbilevel.tasks.data import image_files
from fedbilevel.tasks.data.image_tables import FORMATS
from fedbilevel.tasks.data.table_files import is_number
from fedbilevel.tasks.data.table_sums import SiteTable
from fedbilevel.tasks.label_errors import Verdict

LIST, PAGE = "suspects.csv", "page.html"
SHOWN = 24  # rows at each end
THUMBNAIL = 96  # pixels
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that spreadsheets may execute

HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem clamp(.5rem, 2vw, 1.5rem) .25rem 0; }
td { overflow-wrap: anywhere; } td.number { font-variant-numeric: tabular-nums; overflow-wrap: normal; }
tr.suspected td:nth-child(3) { font-weight: bold; }
img { width: 64px; height: 64px; object-fit: contain; object-position: left; image-rendering: pixelated; display: block; }
"""


@dataclass(frozen=True)
class SiteRows:
    """The unchecked rows of a site's table: what each is called, its label's number, and where its images are if it has any."""

    site: str
    rows: Sequence[str]
    labels: np.ndarray
    classes: Sequence[str]
    images: Path | None = None

    @classmethod
    def of(cls, site: str, table: SiteTable, source: Path, labels: ArrayLike, classes: Sequence[str]) -> SiteRows:
        """Those of a table that was read from that file or folder of images."""
        return cls(site, table.training_rows, np.asarray(labels), classes, source if source.is_dir() else None)

    def write(self, folder: Path, verdict: Verdict) -> int:
        """Write the list and the page; returns the number of suspects."""
        trust, suggested, suspected, weight = map(np.asarray, verdict)
        order = np.argsort(trust, kind="stable")
        suspects = [int(n) for n in order if suspected[n]]
        content = io.StringIO()
        table = csv.writer(content)
        table.writerow(["row", "label", "suggested label", "trust", "weight"])
        for n in suspects:
            texts = self.rows[n], self._label(self.labels[n]), self._label(suggested[n])
            table.writerow([*map(_inert, texts), f"{trust[n]:.4f}", f"{weight[n]:.4f}"])
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / LIST, _encoded(content.getvalue()))
        most = [int(n) for n in order[::-1] if not suspected[n]][:SHOWN]
        parts = [
            f"<h1>{html.escape(self.site)}</h1>",
            f"<p>{len(suspects)} of {len(order)} unchecked rows are suspected: they are listed in {LIST}.</p>",
            "<h2>Least trusted</h2>" + self._table([int(n) for n in order[:SHOWN]], trust, suggested, suspected),
            "<h2>Most trusted</h2>" + self._table(most, trust, suggested, suspected),
        ]
        head = f"{HEAD}<title>{html.escape(self.site)}</title><style>{STYLE}</style>"
        write_atomically(folder / PAGE, _encoded(f"{head}<body>{''.join(parts)}</body></html>"))
        return len(suspects)

    def _label(self, number: int) -> str:
        return self.classes[int(number)]

    def _table(self, shown: Sequence[int], trust: np.ndarray, suggested: np.ndarray, suspected: np.ndarray) -> str:
        lines = ["<table><tr><th>row</th><th>label</th><th>suggested label</th><th>trust</th></tr>"]
        for n in shown:
            picture = f'<img alt="" src="{_thumbnail(self.images / self.rows[n])}">' if self.images else ""
            cells = [self.rows[n], self._label(self.labels[n]), self._label(suggested[n])]
            row, *labels = map(html.escape, cells)
            lines.append(
                f"<tr{' class=suspected' if suspected[n] else ''}><td>{picture}{row}</td>"
                f'<td>{"</td><td>".join(labels)}</td><td class="number">{trust[n]:.2f}</td></tr>'
            )
        return "".join(lines) + "</table>"


def _inert(cell: str) -> str:
    """The cell, with an apostrophe in front if a spreadsheet would take it for a formula."""
    return f"'{cell}" if cell.startswith(FORMULA) and not is_number(cell) else cell


def _encoded(content: str) -> bytes:
    """The content in UTF-8, where bytes of file names that are not are written as escapes."""
    return content.encode(errors="backslashreplace")


def _thumbnail(file: Path) -> str:
    """An image as a PNG within the page."""
    content = io.BytesIO()
    with image_files.opened(file, *set(FORMATS.values())) as image:
        picture = image_files.in_eight_bits(image)
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        picture.convert("RGB").save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
