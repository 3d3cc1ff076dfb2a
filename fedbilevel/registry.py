"""Tables of the names that the command line accepts. Reading one imports only this module."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fedbilevel.errors import InputError
from fedbilevel.settings import configure, nearest

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Entry(NamedTuple):
    """Where a class is defined, its summary in one line, and the paper it comes from."""

    module: str
    name: str
    summary: str
    paper: str
    preset: Mapping[str, Any] = NOTHING  # fixed settings that make this name a variant of the class
    defaults: Mapping[str, Any] = NOTHING  # the paper's values, which replace the class's own defaults
    ours: Mapping[str, Any] = NOTHING  # our values, where the paper gives none
    run: Mapping[str, Any] = NOTHING  # default options of a run

    def load(self) -> Any:
        """The class itself."""
        return getattr(importlib.import_module(self.module), self.name)

    def configure(self, name: str, values: Mapping[str, Any]) -> Any:
        """An instance with these settings; the preset ones cannot be changed."""
        for setting, value in self.preset.items():
            if str(values.get(setting, value)).lower() != str(value).lower():
                raise InputError(f"{name} is {self.name} with {setting} = {value}; given: {values[setting]}: use another name")
        return configure(self.load(), name, {**self.defaults, **self.ours, **values, **self.preset})


def find(table: Mapping[str, Entry], what: str, name: str) -> Entry:
    """The entry of that name; `InputError` with the nearest names if there is none."""
    if name not in table:
        raise InputError(f"there is no {what} {name!r}{nearest(name, table)}")
    return table[name]
