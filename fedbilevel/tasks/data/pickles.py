"""Pickles of arrays, dictionaries, lists, text and numbers, read without running anything that they name.

A pickle is a program that may call anything it can import. Here it can import nothing: the few names that pickled
arrays need stand for the classes below, which take bytes and a plain number type, and every other name is refused.
The pickle's memo cannot grow beyond what a data set needs.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
from collections import OrderedDict
from typing import IO, Any

import numpy as np

from fedbilevel.errors import InputError
from fedbilevel.tasks.data.datasets import parsing

MEMO = 1 << 22  # many times what any of the sets needs
ARGUMENTS = {operation.code.encode("latin1"): operation.arg for operation in pickletools.opcodes}
COUNTED = {  # how many bytes hold the number of bytes that follow
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def load(file: IO[bytes], path: str | os.PathLike[str]) -> Any:
    """The content of the pickle in `file`, with arrays still to be passed to `array`; Python 2 text is read as Latin-1.

    The file is read twice. `path` names it in errors: `InputError` if it asks for anything but arrays, or cannot be read.
    """
    with parsing(path, "is not a readable pickle"):
        start = file.tell()
        _check_memo(file)
        file.seek(start)
        return _Reader(file, path).load()


def array(value: Any) -> np.ndarray:
    """The array, or list of whole numbers, that a pickle holds; `TypeError` if it is anything else, such as nested lists."""
    if isinstance(value, _Array) or (isinstance(value, list) and all(isinstance(n, int) for n in value)):
        return np.asarray(value)
    raise TypeError(f"neither an array nor a list of whole numbers: {type(value).__name__}")


def _check_memo(file: IO[bytes]) -> None:
    """Raise `ValueError` if the pickle uses a memo index above `MEMO`, since memory grows with it."""
    while (code := file.read(1)) not in (b"", pickle.STOP):
        if code not in ARGUMENTS:
            raise ValueError(f"unknown operation {code!r}")
        if (argument := ARGUMENTS[code]) is None:
            continue
        if argument.n == pickletools.UP_TO_NEWLINE:
            line = file.readline()
            if code in (pickle.GLOBAL, pickle.INST):
                file.readline()
            index = int(line) if code == pickle.PUT else 0
        elif argument.n < 0:  # bytes after their number
            file.seek(int.from_bytes(file.read(COUNTED[argument.n]), "little"), os.SEEK_CUR)
            continue
        else:
            data = file.read(argument.n)
            index = int.from_bytes(data, "little") if code == pickle.LONG_BINPUT else 0
        if index > MEMO:
            raise ValueError(f"it uses the memo index {index}")


class _Number:
    """A number type, in place of np.dtype."""

    def __init__(self, name: str, *_: Any):
        if not re.fullmatch("[biuf][1248]", name):
            raise ValueError(f"arrays of type {name!r}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """An array, in place of np.ndarray."""

    def __init__(self, *_: Any):
        self._value = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, number, by_columns, data = state
        self._fill(data, number, shape, "F" if by_columns else "C")

    def _fill(self, data: Any, number: _Number, shape: tuple[int, ...], order: Any) -> _Array:
        raw = data.encode("latin1") if isinstance(data, str) else data  # Python 2's bytes
        self._value = np.frombuffer(raw, number.dtype).reshape(shape, order=order)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._value, dtype, copy=copy)


def _from_buffer(data: Any, number: _Number, shape: tuple[int, ...], order: str, *_: Any) -> _Array:
    return _Array()._fill(data, number, shape, order)


def _scalar(number: _Number, data: Any) -> int | float:
    return np.asarray(_from_buffer(data, number, (), "C")).item()


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


ALLOWED = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Number,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _latin1,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Reader(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: str | os.PathLike[str]):
        super().__init__(file, encoding="latin1")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        known = ALLOWED.get((module.replace("numpy._core", "numpy.core"), name))
        if known is None:
            raise InputError(f"{self._path} asks to run {module}.{name}, which no data set needs: do not trust this file")
        return known
