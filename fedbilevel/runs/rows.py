"""Rows of numbers as stored in files: one for each time metrics were due, with the counters and the metrics by name."""

from __future__ import annotations

from typing import Any

from fedbilevel.errors import InputError
from fedbilevel.runs.experiment import COUNTERS
from fedbilevel.runs.options import RunOptions

Row = dict[str, int | float | None]  # None: not finite


def check_row(row: Row, options: RunOptions) -> None:
    """Raise `InputError` unless it is a row of a run with these options: every step takes at least one round."""
    missing = [name for name in COUNTERS if row.get(name) is None]
    if missing:
        raise InputError(f"the row has no number {missing[0]!r}")
    step: Any = row["step"]
    last = options.steps or options.rounds
    if not isinstance(step, int) or not 0 <= step <= (last or 0):
        raise InputError(f"step must be a whole number from 0 to {last}; given: {step}")
