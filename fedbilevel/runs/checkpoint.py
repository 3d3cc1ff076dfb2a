"""A checkpoint: where a run stood between two steps, in a file that tells whether it is whole and whose it is.

The file is a line that says what it is, a line with the SHA-256 of the rest, and the values in the engines' wire format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedbilevel.engines import wire
from fedbilevel.errors import InputError

MAGIC = b"fedbilevel checkpoint 1\n"


class Checkpoint(NamedTuple):
    """All that it takes to go on from there."""

    run: str  # the fingerprint of its configuration
    step: int
    totals: list[int]
    seconds: float
    leaves: list[np.ndarray]  # of the state
    reported: Mapping[str, float | None] = MappingProxyType({})  # by the last step

    def encoded(self) -> bytes:
        """What the file holds."""
        payload = wire.encode({**self._asdict(), "reported": dict(self.reported)})
        return MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload

    @classmethod
    def read(cls, file: Path, run: str) -> Checkpoint:
        """The run's checkpoint; `InputError` if the file is damaged or not of this run."""
        data = file.read_bytes()
        if not data.startswith(MAGIC):
            raise InputError(f"{file} is not a checkpoint of fedbilevel: remove it to start this run over")
        digest, _, payload = data[len(MAGIC) :].partition(b"\n")
        if hashlib.sha256(payload).hexdigest().encode() != digest:
            raise InputError(f"{file} is truncated or damaged: remove it to start this run over")
        checkpoint = cls(**wire.decode(payload))
        if checkpoint.run != run:
            raise InputError(f"{file} belongs to a run with another configuration: remove it to start this run over")
        return checkpoint
