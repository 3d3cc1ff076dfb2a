"""MNIST: handwritten digits (LeCun et al., Proc. IEEE 1998)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedbilevel.tasks.data import digits, idx
from fedbilevel.tasks.data.datasets import Images

WANTED, find = idx.WANTED, idx.find


def read(found: Sequence[Path]) -> Images:
    """The set, from what `find` found."""
    return idx.read(found, "mnist", digits.CLASSES)
