"""The digits that ship with scikit-learn."""

from __future__ import annotations

import numpy as np

from fedbilevel.tasks.data.datasets import Images

CLASSES = tuple("0123456789")


def make() -> Images:
    """scikit-learn's 1,797 digits of 8 x 8 pixels; 400 of them, always the same, are the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    test, rest = order[:400], order[400:]
    return Images(images[rest], labels[rest], images[test], labels[test], CLASSES)
