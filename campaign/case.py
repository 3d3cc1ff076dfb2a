"""A case of the campaign: something to do in a folder of its own, and what is wrong with how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT = 90.0  # seconds, of which a first compilation can take twenty where other work goes on


@dataclass(frozen=True)
class Case:
    """`act` is given a fresh copy of the made files and returns what is wrong, or nothing."""

    name: str
    act: Callable[[Path], str]
    shown: str = ""  # the command, where it is not the name
