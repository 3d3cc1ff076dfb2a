"""Tasks and algorithms in the user's own files, named as `FILE.py` or `FILE.py:NAME`, and whether a file may be executed.

A file is executed only if the user of this machine has allowed it, by naming it in a command or by a flag of `resume`. This is
remembered in the user's state folder, only for that path with that content. So a run folder, which anybody may have written,
can name any file and ship any file, but neither `resume` nor `report` executes one that the user has not run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedbilevel.errors import InputError, in_one_line, in_words, place, users_code
from fedbilevel.settings import nearest
from fedbilevel.user_files import read_bytes

REFERENCE = re.compile(r"([^\0]+\.py)(?::(.*))?", re.S)
OFFERED_AS = "__fedbilevel_offers__"  # the attribute of a class that a file or a package offers
EXECUTED_AS = "__fedbilevel_sha256__"  # its attribute with the SHA-256 of the file that defines it, when that was executed
DECORATORS = {
    "task": "a function or a class with @fedbilevel.task",
    "algorithm": "a class with @fedbilevel.algorithm",
    "aggregation": "a class with @fedbilevel.aggregation",
}
Hashes = Mapping[str, Sequence[str]]  # path of a file -> its SHA-256 in the course of a run, the newest last
Class = TypeVar("Class", bound=type)

_said: set[str] = set()  # what the user has allowed in this process, even if the state folder cannot be written
_modules: dict[Path, tuple[str, types.ModuleType]] = {}  # what this process has executed, with the SHA-256 of the file
_made: dict[tuple[str, str], type] = {}  # adopted classes that no file offers, by name and kind


def offered(cls: Class, kind: str) -> Class:
    """The class, marked as a task or an algorithm on offer, with the SHA-256 of the user's file as it is executed."""
    setattr(cls, OFFERED_AS, kind)
    if not is_ours(cls) and (file := _file_of(cls)).is_file():
        with contextlib.suppress(InputError):
            setattr(cls, EXECUTED_AS, sha256_of(read_bytes(file)))
    return cls


def offers(value: Any, kind: str) -> bool:
    """Whether it is a class that is itself marked as a task or an algorithm."""
    return isinstance(value, type) and vars(value).get(OFFERED_AS) == kind


def is_ours(cls: type) -> bool:
    """Whether a class is the package's own."""
    return cls.__module__.startswith("fedbilevel.")


def is_reference(name: str) -> bool:
    """Whether a task or an algorithm is named by a file."""
    return REFERENCE.fullmatch(name) is not None


def is_unnamed(name: str) -> bool:
    """Whether it stands for something made in Python that neither a table nor a file describes."""
    return name.startswith("<")


def label(name: str) -> str:
    """The name alone, without the file."""
    found = REFERENCE.fullmatch(name)
    return found[2] or Path(found[1]).stem if found else name


def allow(name: str) -> None:
    """Record that the user allows the file to be executed, if the name refers to one."""
    if is_reference(name):
        path = path_of(name)
        _allow(path, sha256_of(read_bytes(path)))


def resolved(name: str, kind: str) -> str:
    """The name with the full path of its file; `InputError` unless the user allows the file and one class in it is meant."""
    path, wanted = path_of(name), (REFERENCE.fullmatch(name) or ["", "", None])[2]
    return f"{path}:{name_in(load(path), path, kind, wanted)}"


def name_in(module: types.ModuleType, path: Path, kind: str, wanted: str | None = None) -> str:
    """The name of the task or the algorithm in a file's module that is wanted, or of the only one; `InputError` if none is."""
    found = [n for n, value in vars(module).items() if offers(value, kind) and value.__module__ == module.__name__]
    if not found:
        raise InputError(f"{path} has no {kind}: decorate {DECORATORS[kind]}")
    if wanted is None and len(found) > 1:
        raise InputError(f"{path} has several {kind}s: choose from {', '.join(f'{path.name}:{n}' for n in found)}")
    if wanted is not None and wanted not in found:
        raise InputError(f"{path} has no {kind} {wanted!r}{nearest(wanted, found)}")
    return wanted or found[0]


@contextlib.contextmanager
def adopted(cls: type, kind: str) -> Iterator[str]:
    """During the block, find a user's class under the name that is yielded, without executing its file again.

    The user has executed the file, as by importing it, and so allows it.
    """
    name = name_of_class(cls, kind)
    if is_unnamed(name):
        with _holding(_made, (name, kind), cls):
            yield name
        return
    path, sha256 = _as_executed(name, cls)
    with _holding(_modules, path, (sha256, sys.modules[cls.__module__])):
        yield name


def made(name: str, kind: str) -> type | None:
    """The class that is adopted under a name in angle brackets; None if none is."""
    return _made.get((name, kind))


def name_of_class(cls: type, kind: str) -> str:
    """The name of a user's class: its place in the file that offers it, or its name in angle brackets if none does."""
    file, is_there = _file_of(cls), getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    is_in_file = is_there and file.suffix == ".py" and file.is_file() and EXECUTED_AS in vars(cls)
    return f"{file.resolve()}:{cls.__name__}" if is_in_file and offers(cls, kind) else f"<{cls.__name__}>"


def _file_of(cls: type) -> Path:
    return Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")


@contextlib.contextmanager
def _holding(table: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    before = {key: table[key]} if key in table else {}
    table[key] = value
    try:
        yield
    finally:
        del table[key]
        table.update(before)


def load(path: Path) -> types.ModuleType:
    """The module that a file defines, under a name of its own; `InputError` unless the user allows it.

    A process executes it only once, so editing the file does not change what is already running.
    """
    return _loaded(path)[1]


def hashes(names: Iterable[str]) -> dict[str, list[str]]:
    """The SHA-256 of every file among the names, as this process has loaded it."""
    return {str(path): [_loaded(path)[0]] for path in map(path_of, filter(is_reference, names))}


def executed_hashes(classes: Mapping[str, type]) -> dict[str, list[str]]:
    """The same for classes by name whose files the user has executed, as by importing them; this executes none again."""
    found = (_as_executed(name, cls) for name, cls in classes.items() if is_reference(name))
    return {str(path): [sha256] for path, sha256 in found}


def _as_executed(name: str, cls: type) -> tuple[Path, str]:
    """The file of a user's class and the SHA-256 that it was executed with, which the user so allows.

    Raises:
        InputError: the file has changed since, so nobody could run the class again.
    """
    path, then = path_of(name), vars(cls).get(EXECUTED_AS, "")
    if sha256_of(read_bytes(path)) != then:
        raise InputError(f"{path} has changed since Python imported it: start Python again, or restore the file")
    _allow(path, then)
    return path, then


def confirmed(names: Iterable[str], recorded: Hashes, *, changed: bool = False, trusted: bool = False) -> Hashes:
    """The hashes with which a run continues; `InputError` if a file is not as recorded, or was not run by the user.

    The user can accept files that have `changed`, and files that were not run here (`trusted`).
    """
    found = dict(recorded)
    for path in map(path_of, filter(is_reference, names)):
        now, known = sha256_of(read_bytes(path)), recorded.get(str(path), [])
        then = known[-1] if known else ""
        if not trusted and not is_allowed(path, then):
            raise InputError(_not_allowed(path))
        if not changed and now != then:
            raise InputError(
                f"{path} has changed since the run began (SHA-256 {then[:12]} then, {now[:12]} now): "
                "restore it, or continue with it as it is with 'fedbilevel resume DIR --changed-code'"
            )
        _allow(path, now)
        found[str(path)] = known if now == then else [*known, now]
    return found


def path_of(name: str) -> Path:
    """The full path of the file that a name refers to; `InputError` if it refers to none."""
    found = REFERENCE.fullmatch(name)
    if found is None or found[2] == "":
        raise InputError(f"{name!r} must be of the form FILE.py or FILE.py:NAME")
    try:
        path = Path(found[1]).expanduser()
        path = path.parent.resolve() / path.name  # a link to a file keeps its own name, which ends in .py
        str(path).encode()  # raises for a path that no file of ours could name
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{in_one_line(found[1])} cannot be the path of a file: {in_one_line(error)}") from None
    return path


def sha256_of(content: bytes) -> str:
    """The SHA-256 of some bytes, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "fedbilevel" / "allowed-code"


def _seal(path: Path, sha256: str) -> str:
    return sha256_of(f"{path}\n{sha256}".encode())


def _allow(path: Path, sha256: str) -> None:
    seal, folder = _seal(path, sha256), _state_folder()
    _said.add(seal)
    if path in _modules and _modules[path][0] != sha256:
        del _modules[path]
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / seal).touch()


def is_allowed(path: Path, sha256: str) -> bool:
    """Whether the user has run this content of the file here."""
    seal = _seal(path, sha256)
    return seal in _said or (_state_folder() / seal).exists()


def _not_allowed(path: Path) -> str:
    return (
        f"{path} would be executed, and you have not run it here as it is: read it, and if you trust it, allow it with "
        "'fedbilevel resume DIR --trust-code'"
    )


def _loaded(path: Path) -> tuple[str, types.ModuleType]:
    """The SHA-256 of a file and its module."""
    if path not in _modules:
        content = read_bytes(path)
        if not is_allowed(path, sha256_of(content)):
            raise InputError(_not_allowed(path))
        _modules[path] = sha256_of(content), executed(path, content)
    return _modules[path]


def executed(path: Path, content: bytes) -> types.ModuleType:
    """The module that the content of a file defines; whoever calls this has seen to it that the content may be executed."""
    module = types.ModuleType(f"_fedbilevel_own_{path.stem}_{sha256_of(str(path).encode())[:8]}")
    module.__file__ = str(path)
    try:
        code = compile(content, str(path), "exec", dont_inherit=True)
    except Exception as error:
        raise InputError(f"{place(error, str(path)) or f'{path}: '}{in_words(error)}") from None
    sys.modules[module.__name__] = module  # dataclasses look their module up
    with users_code(str(path)):
        exec(code, vars(module))
    return module
