"""How a task shows what its x says: plain values of a few kinds, which a report draws without knowing the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Histogram(NamedTuple):
    """How numbers are distributed, all groups of them in one chart; the second group stands out from the first."""

    horizontal: str  # what the numbers are
    vertical: str  # what is counted
    groups: Mapping[str, np.ndarray]  # name -> numbers


class Picture(NamedTuple):
    """An image with a caption, and a description for readers who point at it or cannot see it."""

    image: np.ndarray  # uint8 (height, width) or (height, width, 3)
    caption: str
    description: str
    marked: bool = False  # framed by a dashed line in the colour of a histogram's second group


class Gallery(NamedTuple):
    """Pictures side by side."""

    title: str
    pictures: Sequence[Picture]


class Bars(NamedTuple):
    """A number for each of several names, such as classes; bars of several runs with the same title share a chart."""

    title: str
    horizontal: str  # what the names denote
    names: Sequence[str]
    numbers: ArrayLike


class Shown(NamedTuple):
    """A section of the report; runs that give the same heading and text share it."""

    heading: str
    text: str  # how to read it
    parts: Sequence[Histogram | Gallery | Bars]


def nothing(x: np.ndarray) -> tuple[Shown, ...]:
    """For tasks whose x has nothing to show."""
    return ()
