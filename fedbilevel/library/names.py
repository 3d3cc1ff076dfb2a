"""What a folder calls the tasks and algorithms of a Python program, and their settings as plain values."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedbilevel.own_code import is_ours, name_of_class
from fedbilevel.registry import Registry


def name_of(table: Registry, settings: Any) -> str:
    """The name of a task or an algorithm with these settings: the package's own, or the user's (`own_code`)."""
    cls = type(settings)
    if is_ours(cls):
        for name, entry in table.bundled.items():
            if entry.load() is cls and all(getattr(settings, setting) == value for setting, value in entry.preset.items()):
                return name
    return name_of_class(cls, table.kind)


def plain(settings: Any) -> dict[str, Any]:
    """The settings as numbers, texts and Booleans, by name."""
    return {name: as_python(value) for name, value in dataclasses.asdict(settings).items()}


def as_python(value: Any) -> Any:
    """A number or an array of NumPy or JAX as Python's numbers, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
