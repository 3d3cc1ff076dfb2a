"""Pickles of arrays, dictionaries, lists, text and numbers, read without running anything that they name.

A pickle is a program that may call whatever it can import. Here it can import nothing: the few names that pickled
arrays need stand for the classes below, which take bytes and a plain number type, and every other name is refused.
"""

from __future__ import annotations

import os
import pickle
import re
from collections import OrderedDict
from typing import IO, Any

import numpy as np

from fedbilevel.data.datasets import damaged
from fedbilevel.errors import InputError


def load(file: IO[bytes], path: str | os.PathLike[str]) -> Any:
    """What the pickle in `file` holds, arrays as things for `np.asarray`; text of Python 2 is read as Latin-1.

    `path` names it in errors: `InputError` if it asks for anything but arrays, or cannot be read.
    """
    try:
        return _Reader(file, path).load()
    except InputError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise damaged(path, f"is not a readable pickle ({type(error).__name__}: {error})") from None


class _Number:
    """A type of numbers, in place of np.dtype."""

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
        raw = data.encode("latin1") if isinstance(data, str) else data  # Python 2 has no other bytes
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
