"""MNIST and Fashion-MNIST: four IDX files, plain or gzip."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbilevel.data.datasets import Images, damaged

SHAPES = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}
WANTED = f"{', '.join(SHAPES)} (each plain or .gz)"


def find(folder: Path) -> list[Path]:
    """The four files in a folder; none unless all are there."""
    found = [next((p for end in (".gz", "") if (p := folder / f"{stem}{end}").is_file()), None) for stem in SHAPES]
    return [path for path in found if path] if all(found) else []


def read(found: Sequence[Path]) -> Images:
    """The set, from its four files in the order of `SHAPES`."""
    parts = [_array(path, shape) for path, shape in zip(found, SHAPES.values(), strict=True)]
    for path, labels in zip(found[1::2], parts[1::2], strict=True):
        if labels.max() > 9:
            raise damaged(path, f"holds the label {labels.max()}, and labels go from 0 to 9")
    return Images(parts[0], parts[1].astype(np.int32), parts[2], parts[3].astype(np.int32))


def _array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    header = b"\0\0\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
    size = len(header) + math.prod(shape)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(size + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, f"is not a whole gzip file ({error})") from None
    wanted = f"{' x '.join(map(str, shape))} bytes"
    if data[: len(header)] != header:
        raise damaged(path, f"does not begin as an IDX file of {wanted}")
    if len(data) != size:
        raise damaged(path, f"is {'longer' if len(data) > size else 'shorter'} than an IDX file of {wanted}")
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)
