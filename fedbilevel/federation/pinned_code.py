"""Own code that a site runs: files and installed packages, pinned by their SHA-256 in the site's `site.toml`.

No message carries code. The server says the SHA-256 of its own copy, and a site looks for a pin of that very hash. It reads the
pinned file, or all files of the pinned package, and executes the bytes that it has hashed: no `.pyc`, no link and nothing that
is written meanwhile can change them. Not covered are other packages that the code imports, and files that it opens itself.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any

from fedbilevel import own_code
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import InputError, Withheld
from fedbilevel.registry import Entry, Registry
from fedbilevel.settings import nearest
from fedbilevel.tasks import TASKS
from fedbilevel.user_files import read_bytes

TABLES = {table.kind: table for table in (TASKS, ALGORITHMS)}
TABLE = "[trusted]"
PIN = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class OwnFile:
    """A file as it was read."""

    path: Path
    content: bytes

    @property
    def name(self) -> str:
        """The name of a pin: its path."""
        return str(self.path)

    @property
    def sha256(self) -> str:
        """The SHA-256 of its content."""
        return own_code.sha256_of(self.content)

    def load(self, kind: str, name: str) -> type:
        """Execute it, and return the class of that name."""
        module = _module(self.path, self.content)
        return getattr(module, own_code.name_in(module, self.path, kind, name))


@dataclass(frozen=True)
class OwnPackage:
    """An installed package as it was read: what it offers, and all of its files, by path from the folder that holds it."""

    name: str
    offered: Mapping[tuple[str, str], Entry]  # by kind and name
    files: Mapping[str, bytes]
    folder: Path

    @property
    def sha256(self) -> str:
        """A SHA-256 of what it offers and of all its files."""
        offered = sorted([kind, name, entry.module, entry.name] for (kind, name), entry in self.offered.items())
        files = sorted([path, own_code.sha256_of(content)] for path, content in self.files.items())
        return own_code.sha256_of(json.dumps([offered, files]).encode())

    def load(self, kind: str, name: str) -> type:
        """Import the class that it offers under that name, from the bytes that were read."""
        if (kind, name) not in self.offered:
            raise InputError(f"the package {self.name} offers no {kind} {name!r}")
        _FromMemory.serve(self)
        return self.offered[kind, name].load()


def read(name: str, beside: Path = Path()) -> OwnFile | OwnPackage:
    """The file of that name, relative to a folder, or the installed package that has or offers it; nothing is executed."""
    if own_code.is_reference(name):
        path = own_code.path_of(str(beside / Path(name).expanduser()))
        return OwnFile(path, read_bytes(path))
    offers = [(kind, n, e) for kind, table in TABLES.items() for n, e in table.items() if e.package]
    package = next((e.package for _, n, e in offers if name in (e.package, n)), None)
    if package is None:
        known = nearest(name, {e.package for *_, e in offers}) if offers else ""
        raise InputError(f"there is no file {name}.py and no installed package {name!r} with tasks or algorithms{known}")
    offered = {(kind, n): e for kind, n, e in offers if e.package == package}
    folders, files = set(), dict[str, bytes]()
    for top in sorted({entry.module.partition(".")[0] for entry in offered.values()}):
        folder, below = _sources(package, top)
        folders.add(folder)
        files |= below
    if len(folders) > 1:
        raise InputError(f"the package {package} lies in several folders ({', '.join(map(str, folders))}): it cannot be pinned")
    return OwnPackage(package, offered, files, folders.pop())


def sha256_here(table: Registry, name: str) -> str:
    """The SHA-256 of the user's code that defines a task or an algorithm; "" if it is one of the package's own."""
    if own_code.is_reference(name):
        return next(iter(own_code.hashes([name]).values()))[-1]
    return "" if name in table.bundled else read(table[name].package).sha256


def trusted(pins: Mapping[str, str], beside: Path, kind: str, name: str, sha256: str) -> type:
    """The class that a run names, from the pinned code with that hash; without one, `InputError` before anything is executed.

    The pins are hashes by file, relative to a folder, or by package.
    """
    pinned = next((where for where, pin in pins.items() if pin == sha256), None)
    if pinned is None:
        raise InputError(
            f"this site has pinned no code with the SHA-256 of the run's {kind} {name}, {sha256[:12]}: install the same there, "
            "read it, and pin it with 'fedbilevel federation trust'"
        )
    try:
        code = read(pinned, beside)
    except InputError:
        raise InputError(f"the {kind} {name} is pinned at this site, but cannot be read there: install it again") from None
    if code.sha256 != sha256:
        raise InputError(
            f"the code of the {kind} {name} has changed at this site since it was pinned (SHA-256 {sha256[:12]} then, "
            f"{code.sha256[:12]} now): restore it, or read it and pin it again"
        )
    try:
        return code.load(kind, name)
    except InputError as error:
        raise Withheld(f"the code of the {kind} {name} fails at this site; its log says why", f"{pinned}: {error}") from None


def check_pins(pins: Mapping[str, str]) -> None:
    """Raise `InputError` unless all are SHA-256 hashes."""
    for name, pin in pins.items():
        if not PIN.fullmatch(pin):
            raise InputError(f"trusted: {name} must be a SHA-256, 64 hexadecimal digits in lower case; given: {pin}")


def pin(file: Path, code: OwnFile | OwnPackage) -> None:
    """Write the code's pin into the table `[trusted]` of a `site.toml`, in place of an older one, and change nothing else."""
    key, text = json.dumps(code.name), read_bytes(file).decode(errors="replace")
    line = f"{key} = {json.dumps(code.sha256)}"
    lines = [old for old in text.splitlines() if not old.startswith(f"{key} = ")]
    if TABLE not in (starts := [old.partition("#")[0].strip() for old in lines]):
        lines, starts = [*lines, "", TABLE], [*starts, "", TABLE]
    place = starts.index(TABLE) + 1
    new = "\n".join([*lines[:place], line, *lines[place:], ""])
    before, after = (_parsed(content) for content in (text, new))
    if not (before and after) or after != {**before, "trusted": {**before.get("trusted", {}), code.name: code.sha256}}:
        raise InputError(f"{file} cannot be edited here: write {line} into its table {TABLE} yourself")
    file.write_text(new)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


@functools.cache
def _module(path: Path, content: bytes) -> types.ModuleType:
    """What the content defines, executed once in a process."""
    return own_code.executed(path, content)


def _sources(package: str, top: str) -> tuple[Path, dict[str, bytes]]:
    """The folder that holds a top-level module, and the module's files, without compiled ones."""
    spec = importlib.util.find_spec(top)
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        raise InputError(f"the package {package} offers what is in {top}, which is not installed: install it again")
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if len(places) > 1:
        raise InputError(f"{top}, of the package {package}, lies in several folders: it cannot be pinned")
    if not places:
        file = Path(spec.origin or "")
        return file.parent, {file.name: read_bytes(file)}
    folder, files = places[0].parent, {}
    for below, folders, names in os.walk(places[0]):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in (Path(below, name) for name in names if not name.endswith(".pyc")):
            files[path.relative_to(folder).as_posix()] = read_bytes(path)
    return folder, files


class _FromMemory(MetaPathFinder, Loader):
    """Imports the modules of one package from the bytes that were read, and none of them from anywhere else."""

    serving: Mapping[str, _FromMemory] = {}

    def __init__(self, package: OwnPackage):
        self.package = package
        self.tops = {path.partition("/")[0].removesuffix(".py") for path in package.files}

    @classmethod
    def serve(cls, package: OwnPackage) -> None:
        """Import the package from these bytes from now on; `InputError` if this process has imported others."""
        before = cls.serving.get(package.name)
        if before is not None and before.package.sha256 == package.sha256:
            return
        new = cls(package)
        if before is not None or any(top in sys.modules for top in new.tops):
            raise InputError(f"the package {package.name} was imported here before it was checked: start the site again")
        cls.serving = {**cls.serving, package.name: new}
        sys.meta_path.insert(0, new)

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in self.tops:
            return None
        file = self._file(fullname)
        is_package = file.endswith("/__init__.py")
        origin = self.package.folder / file
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(origin), is_package=is_package)
        spec.has_location = True  # so that it has a __file__
        if is_package:
            spec.submodule_search_locations = [str(origin.parent)]
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        file = self._file(module.__name__)
        code = compile(self.package.files[file], str(self.package.folder / file), "exec", dont_inherit=True)
        exec(code, vars(module))

    def _file(self, fullname: str) -> str:
        base = fullname.replace(".", "/")
        for file in (f"{base}/__init__.py", f"{base}.py"):
            if file in self.package.files:
                return file
        raise ModuleNotFoundError(f"{fullname} is not among the files of {self.package.name}", name=fullname)
