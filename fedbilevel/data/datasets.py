"""Image data sets: the digits that ship with scikit-learn, and MNIST-like sets from a folder of IDX files."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel.errors import InputError


class Images(NamedTuple):
    """uint8 images and their labels; `test_` parts are for judging only."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits(folder: Path | None = None) -> Images:
    """scikit-learn's 1,797 digits of 8 x 8 pixels; 400 of them, the same always, are the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    test, rest = order[:400], order[400:]
    return Images(images[rest], labels[rest], images[test], labels[test])


def mnist_like(name: str) -> Callable[[Path | None], Images]:
    """A loader for the four IDX files of a set, in the data folder or its subfolder of that name."""

    def load(folder: Path | None) -> Images:
        where = [folder, folder / name] if folder else []
        parts = [
            _idx(where, name, f"{split}-{kind}-ubyte", count)
            for split, count in (("train", 60_000), ("t10k", 10_000))
            for kind in ("images-idx3", "labels-idx1")
        ]
        return Images(parts[0], parts[1].astype(np.int32), parts[2], parts[3].astype(np.int32))

    return load


LOADERS: dict[str, Callable[[Path | None], Images]] = {
    "digits": digits,
    "mnist": mnist_like("mnist"),
    "fashion-mnist": mnist_like("fashion-mnist"),
}


def load(name: str, folder: str | os.PathLike[str] = "") -> Images:
    """The data set of that name; sets that are not bundled are read from `folder`, or from $FEDBILEVEL_DATA."""
    given = folder or os.environ.get("FEDBILEVEL_DATA", "")
    return LOADERS[name](existing_folder(given) if given else None)


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a data folder; `InputError` if there is none."""
    if not Path(path).is_dir():
        raise InputError(f"the data folder {path} does not exist: give the folder that holds the data sets")
    return Path(path)


def _idx(folders: list[Path], name: str, stem: str, count: int) -> np.ndarray:
    candidates = [folder / f"{stem}{end}" for folder in folders for end in (".gz", "")]
    for path in candidates:
        if path.is_file():
            return _read_idx(path, count)
    if not folders:
        raise InputError(f"{name} is not bundled: name the folder that holds its IDX files with --data, or in $FEDBILEVEL_DATA")
    raise InputError(f"{name}: no file {stem}[.gz] in {' or '.join(map(str, folders))}: put the set's four IDX files there")


def _read_idx(path: Path, count: int) -> np.ndarray:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        dimensions = data[3]
        shape = tuple(int.from_bytes(data[4 + 4 * k : 8 + 4 * k], "big") for k in range(dimensions))
        array = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
        if data[:3] != b"\0\0\x08" or shape not in ((count,), (count, 28, 28)):
            raise ValueError(f"shape {shape}")
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise InputError(f"{path} is not an IDX file of {count} entries ({error}): get it again") from None
    return array
