"""Warnings that others can cause as often as they like: of very many, which would fill the disk, only some are logged."""

from __future__ import annotations

import logging
import time

MOST_LINES, WITHIN, THEN = 200, 3600.0, 1000  # within so many seconds so many lines are logged, and then one in so many


class SparseLog:
    """A logger for such warnings."""

    def __init__(self, logger: logging.Logger):
        self._logger, self._count, self._since = logger, 0, time.monotonic()

    def warning(self, line: str) -> None:
        """Log a line, or leave it out."""
        now = time.monotonic()
        if now - self._since > WITHIN:
            self._count, self._since = 0, now
        self._count += 1
        if self._count <= MOST_LINES or self._count % THEN == 0:
            self._logger.warning("%s", line)
        if self._count == MOST_LINES:
            self._logger.warning("there were %d such warnings: for an hour one in %d is logged", MOST_LINES, THEN)
