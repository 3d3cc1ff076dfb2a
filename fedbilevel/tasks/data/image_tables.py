"""A folder of images as a table: a row for each, with its pixels as columns.

    FOLDER/CLASS/*.png            images that may be labelled wrongly: their folder's name is their label
    FOLDER/checked/CLASS/*.png    images whose labels were checked

PNG and JPEG files are read in grey and made 16 x 16 pixels, which is enough for a linear model to tell simple classes apart.
Images in other formats are warned of and left out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.errors import InputError, warn
from fedbilevel.tasks.data import image_files
from fedbilevel.tasks.data.datasets import parsing
from fedbilevel.tasks.data.table_files import Opened

SIDE = 16  # pixels
LARGEST = 10_000  # pixels on a side: more are no photograph
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
OTHERS = (".bmp", ".dcm", ".gif", ".tif", ".tiff", ".webp")
LABEL, CHECKED = "label", "checked"
PIXELS = [f"p{k}" for k in range(SIDE * SIDE)]


def holds_images(folder: Path) -> bool:
    """Whether a folder has images in the folders of classes."""
    return folder.is_dir() and any(_files(folder, FORMATS))


def opened_images(folder: Path) -> Opened:
    """The images of a folder as a table whose cells have not been read yet."""
    files = list(_files(folder, FORMATS))
    if not files:
        raise InputError(f"{folder} holds no images: give a folder for each class with .png or .jpg files in it")
    if others := sorted({file.suffix.lower() for file in _files(folder, OTHERS)}):
        warn(f"{folder} also has images in {', '.join(others)} files, which are left out: make them .png files")
    names = [str(file.relative_to(folder)) for file in files]
    return Opened(str(folder), [LABEL, CHECKED, *PIXELS], enumerate(map(_cells, files), 1), lines=False, files=names)


def _files(folder: Path, suffixes: Container[str]) -> Iterator[Path]:
    for kind in (folder, folder / CHECKED):
        for of in sorted(place for place in kind.iterdir() if place.is_dir()) if kind.is_dir() else ():
            yield from sorted(file for file in of.iterdir() if file.suffix.lower() in suffixes)


def _cells(file: Path) -> Sequence[Any]:
    with parsing(file, "it is not an image"), image_files.opened(file, *set(FORMATS.values())) as image:
        if max(image.size) > LARGEST:
            raise InputError(f"{file} is {image.size[0]} x {image.size[1]} pixels: make it smaller than {LARGEST}")
        pixels = np.asarray(image_files.in_eight_bits(image).convert("L").resize((SIDE, SIDE)), float) / 255
    checked = "yes" if file.parent.parent.name == CHECKED else "no"
    return [file.parent.name, checked, *pixels.ravel().tolist()]
