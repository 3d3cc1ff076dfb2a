"""MiniImageNet: photographs of 100 classes, 84 x 84 in colour (Vinyals et al., NeurIPS 2016).

Read from the usual pickles, which hold `image_data` and `class_dict` (class to row numbers), or from folders of images,
one per class, in `train/`, `val/` and `test/` or side by side. Photographs of another size are resized to 84 x 84
(bilinear, averaged over the area of a pixel). Classes are sorted by split, then name; the groups are the splits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fedbilevel.errors import InputError
from fedbilevel.tasks.data import image_files, pickles
from fedbilevel.tasks.data.datasets import Classes, damaged, parsing

SIDE = 84
SPLITS = {"train": ["train"], "validation": ["val", "validation"], "test": ["test"]}  # as files and folders call them
CLASSES, PER_CLASS = (64, 16, 20), 600  # per split, and images per class: the pickles must have them, folders need not
PIXELS = 1 << 26  # per photograph at most; decoded they take 192 MiB
SUFFIXES = {".jpg", ".jpeg", ".png"}
WANTED = "mini-imagenet-cache-{train,val,test}.pkl, folders train/, val/ and test/ of class folders, or class folders n0..."


def find(folder: Path) -> list[Path]:
    """Three pickles, or three folders of class folders, or class folders."""
    for pattern in ("mini-imagenet-cache-{}.pkl", "{}"):
        parts = [
            next((p for name in names if (p := folder / pattern.format(name)).exists()), None) for names in SPLITS.values()
        ]
        if all(parts):
            return [part for part in parts if part]
    return _class_folders(folder)


def read(found: Sequence[Path]) -> Classes:
    """The set, from what `find` found."""
    if found[0].suffix == ".pkl":
        return _joined(tuple(SPLITS), [_pickled(*pair) for pair in zip(found, CLASSES, strict=True)])
    if found[0].name in SPLITS["train"]:
        return _joined(tuple(SPLITS), [_photographed(path, _class_folders(path)) for path in found])
    return _joined(("all",), [_photographed(found[0].parent, found)])


def _class_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("n*") if re.fullmatch(r"n\d+", path.name) and path.is_dir())


def _pickled(path: Path, classes: int) -> list[np.ndarray]:
    """The images of each class, sorted by the class's name."""
    with path.open("rb") as file:
        content = pickles.load(file, path)
    try:
        images = pickles.array(content["image_data"])
        rows = [pickles.array(rows) for _, rows in sorted(content["class_dict"].items())]
    except (KeyError, TypeError, AttributeError):
        raise damaged(path, "does not hold 'image_data' and 'class_dict'") from None
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE, 3):
        raise damaged(path, f"holds images of {images.dtype} {images.shape}, not of uint8 (n, {SIDE}, {SIDE}, 3)")
    plain = rows and all(index.ndim == 1 and index.dtype.kind in "iu" for index in rows)
    if not plain or not np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(images))):
        raise damaged(path, f"must have each of its {len(images)} images in one class")
    sizes = [len(index) for index in rows]
    if sizes != [PER_CLASS] * classes:
        raise damaged(path, f"holds {len(rows)} classes of {min(sizes)} to {max(sizes)} images, not {classes} of {PER_CLASS}")
    return [images[index] for index in rows]


def _photographed(path: Path, folders: Sequence[Path]) -> list[np.ndarray]:
    if not folders:
        raise InputError(f"{path} holds no class folders n0...: put the images of each class into a folder of its name")
    return [np.stack([_photograph(file) for file in _photographs(folder)]) for folder in folders]


def _photographs(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise InputError(f"{folder} holds no .jpg or .png image: put the images of the class there, or remove the folder")
    return files


def _photograph(path: Path) -> np.ndarray:
    with parsing(path, "is not a JPEG or PNG image"), image_files.opened(path, "JPEG", "PNG") as image:
        if image.width * image.height > PIXELS:
            raise damaged(path, f"has {image.width} x {image.height} pixels, but at most {PIXELS} are read")
        colour = image.convert("RGB")
        return np.asarray(colour if colour.size == (SIDE, SIDE) else colour.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def _joined(groups: tuple[str, ...], splits: list[list[np.ndarray]]) -> Classes:
    classes = [images for split in splits for images in split]
    return Classes(
        np.concatenate(classes),
        np.repeat(np.arange(len(classes), dtype=np.int32), [len(images) for images in classes]),
        np.repeat(np.arange(len(groups), dtype=np.int32), [len(split) for split in splits]),
        groups,
    )
