"""The four IDX files, plain or gzip, of MNIST and of Fashion-MNIST.

The files of both have the same names and sizes: the number of images per class tells them apart.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbilevel.errors import InputError
from fedbilevel.tasks.data.datasets import Images, damaged, parsing

SHAPES = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}
PER_CLASS = {  # training images, by label
    "mnist": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "fashion-mnist": [6000] * 10,
}
WANTED = f"{', '.join(SHAPES)} (each plain or .gz)"


def find(folder: Path) -> list[Path]:
    """The four files in a folder; none unless all are there."""
    found = [next((p for end in (".gz", "") if (p := folder / f"{stem}{end}").is_file()), None) for stem in SHAPES]
    return [path for path in found if path] if all(found) else []


def read(found: Sequence[Path], name: str, classes: tuple[str, ...]) -> Images:
    """The set of that name and of those classes, from its four files in the order of `SHAPES`."""
    parts = [_array(path, shape) for path, shape in zip(found, SHAPES.values(), strict=True)]
    for path, labels in zip(found[1::2], parts[1::2], strict=True):
        if labels.max() >= len(classes):
            raise damaged(path, f"holds the label {labels.max()}, but labels go from 0 to {len(classes) - 1}")
    _check_set(found[1], np.bincount(parts[1], minlength=len(classes)).tolist(), name)
    return Images(parts[0], parts[1].astype(np.int32), parts[2], parts[3].astype(np.int32), classes)


def _check_set(path: Path, per_class: list[int], name: str) -> None:
    if per_class == PER_CLASS[name]:
        return
    for other, its in PER_CLASS.items():
        if per_class == its:
            raise InputError(f"{path}: holds the labels of {other}, not of {name}: name the folder of {name} with --data")
    raise damaged(path, f"holds {per_class} labels from 0 to {len(per_class) - 1}, but those of {name} are {PER_CLASS[name]}")


def _array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    header = b"\0\0\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
    size = len(header) + math.prod(shape)
    with parsing(path, "is not a complete gzip file"), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read(size + 1)
    wanted = f"{' x '.join(map(str, shape))} bytes"
    if data[: len(header)] != header:
        raise damaged(path, f"does not begin as an IDX file of {wanted}")
    if len(data) != size:
        raise damaged(path, f"is {'longer' if len(data) > size else 'shorter'} than an IDX file of {wanted}")
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)
