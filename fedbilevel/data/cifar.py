"""CIFAR-10: the Python batches, in their folder or archive, or an npz file of some of the images."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from fedbilevel.data import pickles
from fedbilevel.data.datasets import Images, damaged

FOLDER, ARCHIVE, SUBSET = "cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar10-subset.npz"
BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
WANTED = f"{FOLDER}/ (with {BATCHES[0]} to _5 and {BATCHES[-1]}), {ARCHIVE} or {SUBSET}"

Batch = tuple[np.ndarray, np.ndarray]  # images, labels


def find(folder: Path) -> list[Path]:
    """The six batches, or the archive, or the npz file; a folder may also be the batches' own."""
    for batches in (folder / FOLDER, folder):
        if all((batches / name).is_file() for name in BATCHES):
            return [batches / name for name in BATCHES]
    return next(([folder / name] for name in (ARCHIVE, SUBSET) if (folder / name).is_file()), [])


def read(found: Sequence[Path]) -> Images:
    """The set, from what `find` found."""
    if found[0].name == SUBSET:
        return _npz(found[0])
    images, labels = zip(*(_archived(found[0]) if found[0].name == ARCHIVE else _opened(found)), strict=True)
    return Images(np.concatenate(images[:5]), np.concatenate(labels[:5]), images[5], labels[5])


def _opened(paths: Sequence[Path]) -> Iterator[Batch]:
    for path in paths:
        with path.open("rb") as file:
            yield _batch(file, path)


def _archived(path: Path) -> Iterator[Batch]:
    """The batches in the archive, which is read in place."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            for name in BATCHES:
                file = archive.extractfile(f"{FOLDER}/{name}")
                if file is None:
                    raise damaged(path, f"has no file {FOLDER}/{name}")
                yield _batch(file, path / FOLDER / name)
    except (tarfile.TarError, EOFError, zlib.error, KeyError) as error:
        raise damaged(path, f"is not the whole archive ({error})") from None


def _batch(file: IO[bytes], path: Path) -> Batch:
    content = pickles.load(file, path)
    try:
        planes, labels = np.asarray(content["data"]), np.asarray(content["labels"])
    except (KeyError, TypeError, ValueError):
        raise damaged(path, "does not hold 'data' and 'labels'") from None
    if planes.shape != (10_000, 3072):
        raise damaged(path, f"holds images of shape {planes.shape}, not (10000, 3072)")
    return _checked(path, np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels)


def _npz(path: Path) -> Images:
    names = [f"{part}_{kind}" for part in ("train", "test") for kind in ("images", "labels")]
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            parts = [file[name] for name in names]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise damaged(path, f"is not an npz file of {', '.join(names)} ({error})") from None
    return Images(*_checked(path, *parts[:2]), *_checked(path, *parts[2:]))


def _checked(path: Path, images: np.ndarray, labels: np.ndarray) -> Batch:
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
        raise damaged(path, f"holds images of {images.dtype} {images.shape}, not of uint8 (n, 32, 32, 3)")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise damaged(path, f"holds labels of {labels.dtype} {labels.shape} for {len(images)} images")
    if not len(labels) or labels.min() < 0 or labels.max() > 9:
        raise damaged(path, "must hold labels from 0 to 9, and at least one")
    return images, labels.astype(np.int32)
