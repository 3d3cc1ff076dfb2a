"""Rows of numbers as stored in files: one for each time metrics were due, with the counters and the metrics by name."""

from __future__ import annotations

from collections.abc import Callable

from fedbilevel.errors import InputError
from fedbilevel.runs.experiment import COUNTERS
from fedbilevel.runs.options import RunOptions

Row = dict[str, int | float | None]  # None: not finite
BYTES = {"bytes_up": "floats_up", "bytes_down": "floats_down"}  # what version 0.1 did not count, and what it did instead


def row_check(options: RunOptions) -> Callable[[Row], None]:
    """A check for one row after another: `InputError` unless they are, in order, rows of a run with these options.

    Every step takes at least one round.
    """
    least, last = 0, options.steps or options.rounds or 0

    def check(row: Row) -> None:
        nonlocal least
        missing = [name for name in COUNTERS if name not in BYTES and row.get(name) is None]
        if missing:
            raise InputError(f"the row has no number {missing[0]!r}")
        huge = [name for name, value in row.items() if isinstance(value, int) and abs(value) >= 2**63]
        if huge:
            raise InputError(f"{huge[0]} must be a whole number below 2⁶³")
        step = row["step"]
        if not isinstance(step, int) or not least <= step <= last:
            raise InputError(f"step must be a whole number from {least} to {last}; given: {step}")
        least = step + 1

    return check


def with_bytes(row: Row, bytes_per_float: int) -> Row:
    """The row with the bytes that crossed, if they were not counted."""
    sent = {name: bytes_per_float * (row[floats] or 0) for name, floats in BYTES.items() if name not in row}
    return {**row, **sent}
