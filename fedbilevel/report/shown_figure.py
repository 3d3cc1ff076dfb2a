"""A figure of matplotlib's that a notebook shows, also where pyplot was never imported."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """The figure, which a notebook displays as a PNG picture."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
