"""The entries of a kit's logs: printable and of bounded length, and nothing in one can pass for another entry."""

from __future__ import annotations

import logging

from nvflare.fuel.utils.log_utils import BaseFormatter

MOST_CHARACTERS = 20_000  # of an entry
CONTINUED = "\n    | "


class PlainFormatter(BaseFormatter):
    """FLARE's entries, with every line after the first one marked as such."""

    def format(self, record: logging.LogRecord) -> str:
        """The entry as text."""
        lines = str(super().format(record))[:MOST_CHARACTERS].splitlines()
        return CONTINUED.join("".join(c for c in line if c.isprintable() or c == "\t") for line in lines)
