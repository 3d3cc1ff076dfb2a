"""CIFAR-10: the Python batches, in their folder or archive, or an npz file of some of the images."""

from __future__ import annotations

import gzip
import io
import math
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from fedbilevel.tasks.data import pickles
from fedbilevel.tasks.data.datasets import Images, damaged, parsing

FOLDER, ARCHIVE, SUBSET = "cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar10-subset.npz"
BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
WANTED = f"{FOLDER}/ (with {BATCHES[0]} to _5 and {BATCHES[-1]}), {ARCHIVE} or {SUBSET}"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PER_BATCH = 10_000
LARGEST = 1 << 28  # bytes of a part of an archive, unpacked

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
    return Images(np.concatenate(images[:5]), np.concatenate(labels[:5]), images[5], labels[5], CLASSES)


def _opened(paths: Sequence[Path]) -> Iterator[Batch]:
    for path in paths:
        with path.open("rb") as file:
            yield _batch(file, path)


def _archived(path: Path) -> Iterator[Batch]:
    """The batches in the archive, which is read in place."""
    with (
        parsing(path, "is not the complete archive"),
        _Unpacked(path) as unpacked,
        tarfile.open(fileobj=unpacked, mode="r:") as archive,
    ):
        for name in BATCHES:
            member = archive.getmember(f"{FOLDER}/{name}")
            file = archive.extractfile(member) if member.isfile() and member.size <= LARGEST else None
            if file is None:
                raise damaged(path, f"has no file {FOLDER}/{name} of at most {LARGEST} bytes")
            yield _batch(io.BytesIO(file.read()), path / FOLDER / name)


class _Unpacked(gzip.GzipFile):
    """An unpacked archive, of which no part larger than `LARGEST` is read, even if its headers ask for that."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= LARGEST:
            raise ValueError(f"a part of {size} bytes")
        return super().read(size)


def _batch(file: IO[bytes], path: Path) -> Batch:
    content = pickles.load(file, path)
    try:
        planes, labels = pickles.array(content["data"]), pickles.array(content["labels"])
    except (KeyError, TypeError):
        raise damaged(path, "does not hold 'data' and 'labels'") from None
    if planes.shape != (PER_BATCH, 3072):
        raise damaged(path, f"holds images of shape {planes.shape}, not ({PER_BATCH}, 3072)")
    return _checked(path, np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels)


def _npz(path: Path) -> Images:
    names = [f"{part}_{kind}" for part in ("train", "test") for kind in ("images", "labels")]
    with parsing(path, f"is not an npz file of {', '.join(names)}"), zipfile.ZipFile(path) as archive:
        parts = [_member(archive, archive.getinfo(f"{name}.npy")) for name in names]
    return Images(*_checked(path, *parts[:2]), *_checked(path, *parts[2:]), CLASSES)


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """An array of an npz file; `ValueError` before anything larger than the file says it holds is allocated."""
    if entry.file_size > LARGEST:
        raise ValueError(f"{entry.filename} of {entry.file_size} bytes")
    with archive.open(entry) as file:
        first = np.lib.format.read_magic(file) == (1, 0)
        header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
    if math.prod(shape) * dtype.itemsize > entry.file_size:
        raise ValueError(f"{entry.filename} of {dtype} {shape} in {entry.file_size} bytes")
    with archive.open(entry) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _checked(path: Path, images: np.ndarray, labels: np.ndarray) -> Batch:
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
        raise damaged(path, f"holds images of {images.dtype} {images.shape}, not of uint8 (n, 32, 32, 3)")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise damaged(path, f"holds labels of {labels.dtype} {labels.shape} for {len(images)} images")
    if not len(labels) or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise damaged(path, f"must hold labels from 0 to {len(CLASSES) - 1}, and at least one")
    return images, labels.astype(np.int32)
