"""Tables of the names that the command line accepts. Reading one imports only this module.

A name is one of the package's own, one that another installed package offers through an entry point of the table's group, or
one of the user's files (`own_code`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedbilevel import own_code
from fedbilevel.errors import InputError, in_words, place
from fedbilevel.settings import configure, nearest, settings

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Entry(NamedTuple):
    """Where a class is defined, its summary in one line, and the paper or the package it comes from."""

    module: str
    name: str
    summary: str
    paper: str
    preset: Mapping[str, Any] = NOTHING  # fixed settings that make this name a variant of the class
    defaults: Mapping[str, Any] = NOTHING  # the paper's values, which replace the class's own defaults
    ours: Mapping[str, Any] = NOTHING  # our values, where the paper gives none
    run: Mapping[str, Any] = NOTHING  # default options of a run
    package: str = ""  # the package that offers it, if it is not this one
    kind: str = ""  # what that package offers it as: a task or an algorithm
    given: type | None = None  # the class itself, where no module offers it

    def load(self) -> Any:
        """The class itself."""
        if self.given is not None:
            return self.given
        if not self.package:
            return getattr(importlib.import_module(self.module), self.name)
        try:
            offered = getattr(importlib.import_module(self.module), self.name)
        except (Exception, SystemExit) as error:
            raise InputError(f"the package {self.package} is broken: {place(error)}{in_words(error)}") from error
        if not own_code.offers(offered, self.kind):
            decorated = own_code.DECORATORS[self.kind]
            raise InputError(f"the package {self.package} offers {self.name}, which is no {self.kind}: decorate {decorated}")
        return offered

    def configure(self, name: str, values: Mapping[str, Any]) -> Any:
        """An instance with these settings; the preset ones cannot be changed."""
        for setting, value in self.preset.items():
            if str(values.get(setting, value)).lower() != str(value).lower():
                raise InputError(f"{name} is {self.name} with {setting} = {value}; given: {values[setting]}: use another name")
        return configure(self.load(), name, {**self.defaults, **self.ours, **values, **self.preset})


class Registry(Mapping[str, Entry]):
    """The package's own entries, then those of other packages, which are looked up only when they are needed."""

    def __init__(self, kind: str, bundled: dict[str, Entry]):
        self.kind, self.bundled = kind, bundled

    @functools.cached_property
    def refused(self) -> dict[str, str]:
        """The names of other packages that cannot be used, each with the reason in one line."""
        lines = {}
        for name, entries in self._offered.items():
            packages = sorted({entry.package for entry in entries})
            if name in self.bundled:
                lines[name] = f"{packages[0]} offers {name!r}, but that is one of fedbilevel's own names: it needs another one"
            elif len(packages) > 1:
                lines[name] = f"{packages[0]} and {packages[1]} both offer {name!r}: uninstall one of them"
        return lines

    @functools.cached_property
    def _offered(self) -> dict[str, list[Entry]]:
        import importlib.metadata

        found: dict[str, list[Entry]] = {}
        for package in importlib.metadata.distributions():
            with contextlib.suppress(Exception):  # a damaged package is not ours to report
                for point in package.entry_points.select(group=f"fedbilevel.{self.kind}s"):
                    module, _, defined = (part.strip() for part in point.value.partition(":"))
                    name, summary = package.metadata["Name"], package.metadata["Summary"] or ""
                    entry = Entry(module, defined, summary, f"package {name}", package=name, kind=self.kind)
                    found.setdefault(point.name, []).append(entry)
        return dict(sorted(found.items()))

    def __getitem__(self, name: str) -> Entry:
        if name in self.bundled:
            return self.bundled[name]
        if name in self.refused:
            raise InputError(self.refused[name])
        return self._offered[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.bundled, *(name for name in self._offered if name not in self.refused)])

    def __len__(self) -> int:
        return len(list(iter(self)))


def find(table: Mapping[str, Entry], what: str, name: str) -> Entry:
    """The entry of that name, which a registry also finds in a file; `InputError` with the nearest names if there is none."""
    if isinstance(table, Registry) and own_code.is_reference(name):
        path, _, own = own_code.resolved(name, what).rpartition(":")
        if own in table:
            raise InputError(f"{path} has a {what} {own!r}, and so has {table[own].package or 'fedbilevel'}: rename yours")
        return Entry(own_code.load(Path(path)).__name__, own, "", path)
    if own_code.is_unnamed(name):
        if made := own_code.made(name, what):
            return Entry(made.__module__, made.__name__, "", "", given=made)
        raise InputError(f"its {what} was made in Python, and no file describes it: the run cannot be resumed, begin it again")
    if name not in table:
        raise InputError(f"there is no {what} {name!r}{nearest(name, table)}")
    return table[name]


def require_known(table: Registry, name: str) -> None:
    """Raise `InputError` unless there is such a name; a file is not opened."""
    if not (own_code.is_reference(name) or own_code.is_unnamed(name)):
        find(table, table.kind, name)


def in_full(table: Registry, name: str) -> str:
    """The name in the form that is stored: for a file, its full path and the name in it."""
    return own_code.resolved(name, table.kind) if own_code.is_reference(name) else name


def chosen(table: Registry, name: str) -> str:
    """The stored form of a name that the user gives, and so allows; `InputError` if nothing has that name."""
    own_code.allow(name)
    find(table, table.kind, name)
    return in_full(table, name)


def for_each(table: Registry, names: list[str], values: Mapping[str, Any], what: str) -> dict[str, dict[str, Any]]:
    """For each of the names its own among values by SETTING, or by NAME.SETTING, which holds for that name alone."""
    by_label = {own_code.label(name): name for name in names}
    if len(by_label) < len(names):
        raise InputError(f"an {table.kind} is named twice in {' '.join(map(own_code.label, names))}: name each once")
    fields = {short: settings(find(table, table.kind, name).load()) for short, name in by_label.items()}
    taken: dict[str, dict[str, Any]] = {short: {} for short in by_label}
    for name, value in sorted(values.items(), key=lambda pair: "." in pair[0]):
        owner, dot, field = name.rpartition(".")
        if dot and owner not in taken:
            raise InputError(f"{what} {name}: {owner!r} is not among the {table.kind}s {', '.join(by_label)}")
        takers = [owner] if dot else [a for a in by_label if field in fields[a]]
        known = list(dict.fromkeys(f for a in ([owner] if dot else by_label) for f in fields[a]))
        if field not in known:
            raise InputError(f"{owner or ' and '.join(by_label)} has no hyperparameter {field!r}{nearest(field, known)}")
        for taker in takers:
            taken[taker][field] = value
    return {by_label[short]: given for short, given in taken.items()}
