"""Image files, which are not decoded before their size is known."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image


@contextlib.contextmanager
def opened(file: IO[bytes] | Path, *formats: str) -> Iterator[Image.Image]:
    """An image file in one of the formats, with only its header read so far. The decoder's warnings are not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(file, formats=formats) as image:
            yield image


def in_eight_bits(image: Image.Image) -> Image.Image:
    """The image with values up to 255: a grey one of 16 bits has larger ones, which conversions would make white."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
