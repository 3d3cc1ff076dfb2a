"""A checkpoint: a run between two steps, in a file that shows whether it is intact and which run it belongs to.

The file is a line that says what it is, a line with the SHA-256 of the rest, and the values in the engines' wire format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedbilevel.core.traffic import Totals
from fedbilevel.engines import wire
from fedbilevel.errors import InputError
from fedbilevel.runs.best_round import BestRound
from fedbilevel.user_files import fitted, naming, read_bytes

MAGIC = b"fedbilevel checkpoint 1\n"


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to continue a run."""

    run: str  # the fingerprint of its configuration
    step: int
    totals: Totals
    seconds: float
    leaves: Sequence[np.ndarray]  # of the state
    reported: Mapping[str, float | None] = field(default_factory=dict)  # what the last step reported
    rows: int | None = None  # how many rows of metrics precede it; version 0.1 did not say
    rows_sha256: str | None = None  # of the lines that have them
    best: BestRound | None = None  # so far, if the run keeps it

    def encoded(self) -> bytes:
        """The content of the file."""
        payload = wire.encode({**vars(self), "totals": list(self.totals), "best": vars(self.best) if self.best else None})
        return MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload

    @classmethod
    def read(cls, file: Path, run: str) -> Checkpoint:
        """The run's checkpoint; `InputError` if the file is damaged or belongs to another run."""
        data = read_bytes(file)
        if not data.startswith(MAGIC):
            raise InputError(f"{file} is not a checkpoint of fedbilevel: remove it to start this run over")
        digest, _, payload = data[len(MAGIC) :].partition(b"\n")
        if hashlib.sha256(payload).hexdigest().encode() != digest:
            raise InputError(f"{file} is truncated or damaged: remove it to start this run over")
        with naming(file):
            checkpoint = fitted(wire.decode(payload), cls)
        if checkpoint.run != run:
            raise InputError(f"{file} belongs to a run with another configuration: remove it to start this run over")
        return checkpoint
