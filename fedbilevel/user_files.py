"""Files that users can touch. Each is read as a value of a type; one that does not fit is refused in one line.

The types are dataclasses, named tuples and containers of them; msgspec checks the content of a file against them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import stat
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from fedbilevel.errors import InputError, in_one_line
from fedbilevel.settings import nearest

if TYPE_CHECKING:
    import numpy as np

Kind = TypeVar("Kind")
Scalar = bool | int | float | str | None  # a value of a setting


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    try:
        require_file(path)
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None


def require_file(path: Path) -> None:
    """Raise `InputError` if the path exists and is not a file: reading a pipe or a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path} cannot be read: it is not a file")


def read_toml(path: Path, kind: type[Kind], **given: Any) -> Kind:
    """The content of a TOML file, together with what is given, as a value of a type; unknown names are refused."""
    content = read_bytes(path)
    try:
        values = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a TOML file ({in_one_line(error)})") from None
    with naming(path):
        for name in given.keys() & values.keys():
            raise InputError(f"unknown entry {name!r}: leave it out")
        return fitted({**values, **given}, kind)


def read_json(path: Path, kind: type[Kind]) -> Kind:
    """The content of a JSON file as a value of a type; unknown names are ignored."""
    content = read_bytes(path)
    with naming(path):
        return decoded(content, kind)


def read_json_lines(path: Path, kind: type[Kind], check: Callable[[Kind], None] = lambda value: None) -> Iterator[Kind]:
    """The checked values of a file with one on each line; a last line cut off by a kill is left out."""
    *lines, rest = read_bytes(path).split(b"\n")
    if _is_json(rest):
        lines.append(rest)
    for number, line in enumerate(lines, 1):
        if line.strip():
            with naming(f"{path}, line {number}"):
                value = decoded(line, kind)
                check(value)
            yield value


def read_array(path: Path) -> np.ndarray:
    """The array in an .npy file."""
    import numpy as np

    with _opened(path, "an .npy file of plain numbers") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays in an .npz file, by name."""
    import numpy as np

    with _opened(path, "an .npz file of plain arrays") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as content:
        return {name: content[name] for name in content.files}


def fitted(values: Any, kind: type[Kind]) -> Kind:
    """Plain values as a value of a type; an `InputError` names the place and what is expected there."""
    import msgspec

    _check_entries(values, kind, "")
    with _in_words():
        return msgspec.convert(values, kind)


@contextlib.contextmanager
def naming(file: Path | str) -> Iterator[None]:
    """During the block, have every `InputError` name this file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def decoded(data: bytes, kind: type[Kind]) -> Kind:
    """A JSON text as a value of a type; `InputError` if it is something else. Unknown names are ignored."""
    import msgspec

    with _in_words():
        return msgspec.json.decode(data, type=kind)


def _is_json(data: bytes) -> bool:
    try:
        decoded(data, object)
    except InputError:
        return False
    return True


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """During the block, turn what msgspec finds into an `InputError` that begins with the place."""
    import msgspec

    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = str(error)
        what, at, place = text.rpartition(" - at `$")
        raise InputError(in_one_line(f"{place.strip('.`')}: {what}" if at else text)) from None
    except RecursionError:
        raise InputError("it is nested too deeply") from None


@contextlib.contextmanager
def _opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """The open file, for NumPy alone to read: on foreign bytes it may raise anything."""
    try:
        require_file(path)
        with path.open("rb") as file:
            yield file
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except Exception as error:
        raise InputError(f"{path} is not {what} ({in_one_line(error)})") from None


def _check_entries(values: Any, kind: Any, place: str) -> None:
    """Raise `InputError` for an unknown name, and, by its name, for an entry of a mapping that does not fit."""
    import msgspec

    if dataclasses.is_dataclass(kind) and isinstance(values, Mapping):
        kinds = typing.get_type_hints(kind)
        for name, value in values.items():
            if name not in kinds:
                raise InputError(f"{place and f'{place}: '}unknown entry {name!r}{nearest(name, kinds)}")
            _check_entries(value, kinds[name], f"{place}.{name}".strip("."))
    elif typing.get_origin(kind) is Mapping and isinstance(values, Mapping):
        for name, value in values.items():
            within, inner = f"{place}.{name}".strip("."), typing.get_args(kind)[1]
            _check_entries(value, inner, within)
            with naming(within), _in_words():  # msgspec does not name the entry
                msgspec.convert(value, inner)
    elif typing.get_origin(kind) is Sequence and isinstance(values, list):
        for k, value in enumerate(values):
            _check_entries(value, typing.get_args(kind)[0], f"{place}[{k}]")
    elif typing.get_origin(kind) is UnionType:
        for inner in typing.get_args(kind):
            _check_entries(values, inner, place)
