"""A folder with a JSON file that says what is run in it, the versions it began with, and the SHA-256 of the user's code."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fedbilevel.own_code import Hashes, confirmed, hashes
from fedbilevel.runs.files import locked, write_atomically
from fedbilevel.runs.versions import changes_since, note_on_changes, versions_here
from fedbilevel.user_files import naming, read_json


@dataclass(frozen=True)
class Began:
    """What the file holds besides the description; nothing in version 0.1."""

    versions: Mapping[str, str] = field(default_factory=dict)
    code: Hashes = field(default_factory=dict)  # the SHA-256 of the user's files that define its task or its algorithm
    started: str = ""  # when, in UTC


class Description(Protocol):
    """What is run in a folder."""

    def plain(self) -> dict[str, Any]:
        """A dictionary for JSON."""

    def names(self) -> tuple[str, str, str]:
        """The names of its task, its algorithm and its aggregation."""

    def packages(self) -> list[str]:
        """The other packages that offer one of these."""


Described = TypeVar("Described", bound=Description)


class DescribedFolder(abc.ABC, Generic[Described]):
    """A folder whose `FILE` describes what is run in it."""

    FILE: ClassVar[str]

    def __init__(self, path: Path):
        self.path = path

    @abc.abstractmethod
    def read(self, values: Mapping[str, Any]) -> Described:
        """The description from what its `plain` returned."""

    @abc.abstractmethod
    def begun(self) -> bool:
        """Whether any run in it has ended."""

    @property
    def described(self) -> Described:
        """What is run."""
        values = read_json(self.path / self.FILE, dict[str, Any])
        for other in fields(Began):
            values.pop(other.name, None)
        with naming(self.path / self.FILE):
            return self.read(values)

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions that it began with."""
        return read_json(self.path / self.FILE, Began).versions

    @property
    def started(self) -> str:
        """When it began, in UTC; empty if its version did not note it."""
        return read_json(self.path / self.FILE, Began).started

    def note_on_versions(self) -> str:
        """A sentence on what has changed since its first runs; empty if nothing has."""
        return note_on_changes(self.path, changes_since(self.versions, *self.described.packages())) if self.begun() else ""

    def begin(self, given: Described) -> None:
        """Write the description, with the versions and the code of this process."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._write(given, Began(versions_here(*given.packages()), hashes(given.names()), started))

    def move_data(self, given: Described) -> None:
        """Write the same description with the place where the data is now; versions and code stay those of its beginning."""
        with locked(self.path):
            self._write(given, read_json(self.path / self.FILE, Began))

    def confirm_code(self, *, changed: bool = False, trusted: bool = False) -> None:
        """Raise `InputError` if the user's code that it needs may not be executed, or has changed and must not have."""
        given, began = self.described, read_json(self.path / self.FILE, Began)
        code = confirmed(given.names(), began.code, changed=changed, trusted=trusted)
        if code != began.code:
            with locked(self.path):
                self._write(given, replace(began, code=code))

    def _write(self, given: Described, began: Began) -> None:
        stored = {**given.plain(), **asdict(began)}
        write_atomically(self.path / self.FILE, (json.dumps(stored, indent=2) + "\n").encode())
