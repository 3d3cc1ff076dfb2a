"""Fashion-MNIST: articles of clothing, in files named and formatted like MNIST's (Xiao et al., arXiv 1708.07747)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedbilevel.tasks.data import idx
from fedbilevel.tasks.data.datasets import Images

WANTED, find = idx.WANTED, idx.find
CLASSES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def read(found: Sequence[Path]) -> Images:
    """The set, from what `find` found."""
    return idx.read(found, "fashion-mnist", CLASSES)
