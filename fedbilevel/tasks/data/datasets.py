"""The data sets: what they are, where their files are looked for, and `load`.

A set that is not bundled is looked for in a given folder, then in $FEDBILEVEL_DATA, then in the cache folder, to which
`fedbilevel data fetch` writes; in each of them first in the subfolder of the set's name, then directly. Reading this
module imports no loader. A bundled set's module has `make()`; that of any other has

    WANTED                  the files it looks for, in words
    find(folder)            the set's files in a folder; none unless it is all there
    read(found)             the set of these files, checked; `InputError` names a file that is not as it should be
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbilevel.errors import InputError
from fedbilevel.settings import nearest

if TYPE_CHECKING:
    import numpy as np


class Images(NamedTuple):
    """Images of some classes: uint8 (n, height, width) or (n, height, width, 3); `test_` parts are for metrics only."""

    images: np.ndarray
    labels: np.ndarray  # int32, positions in `classes`
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]  # their names, any number of them


class Classes(NamedTuple):
    """Many classes of few images, for few-shot learning; rows are sorted by label, labels count from 0."""

    images: np.ndarray  # uint8 (n, height, width) or (n, height, width, 3)
    labels: np.ndarray  # int32 (n,)
    group: np.ndarray  # int32 (classes,): the group of each class, an index of `groups`
    groups: tuple[str, ...]  # alphabets, or the splits of MiniImageNet


class Source(NamedTuple):
    """Where a set's loader is, what the set is in one line, and how to get it."""

    module: str
    summary: str
    get: str = ""  # empty: bundled


IMAGES = {
    "digits": Source("digits", "1,797 handwritten digits, 8 x 8"),
    "mnist": Source("mnist", "70,000 handwritten digits, 28 x 28", "fedbilevel data fetch mnist"),
    "fashion-mnist": Source("fashion_mnist", "70,000 articles of clothing, 28 x 28", "fedbilevel data fetch fashion-mnist"),
    "cifar-10": Source("cifar", "60,000 photographs, 32 x 32 in colour", "fedbilevel data fetch cifar-10"),
}
CLASSES = {
    "glyphs": Source("glyphs", "48 generated characters of 6 alphabets, 28 x 28"),
    "omniglot": Source("omniglot", "1,623 characters of 50 alphabets, 28 x 28", "fedbilevel data fetch omniglot"),
    "mini-imagenet": Source(
        "mini_imagenet",
        "100 classes of 600 photographs, 84 x 84 in colour",
        "make it from ImageNet (image-net.org), whose terms you must accept",
    ),
}
SETS = {**IMAGES, **CLASSES}


def load(name: str, folder: str | os.PathLike[str] = "") -> Any:
    """The data set of that name: `Images` if it is one of `IMAGES`, `Classes` if it is one of `CLASSES`."""
    loader = _loader(name)
    return loader.read(_found(name, folder)[1]) if SETS[name].get else loader.make()


def folder_of(name: str, folder: str | os.PathLike[str] = "") -> Path:
    """The folder in which `load` finds a set that is not bundled; passed as `folder`, it leads to the same files."""
    return _found(name, folder)[0]


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a data folder; `InputError` if there is none."""
    if not Path(path).is_dir():
        problem = "is a file, not a folder" if Path(path).exists() else "does not exist"
        raise InputError(f"the data folder {path} {problem}: give the folder that holds the data")
    return Path(path)


def data_folder(given: str) -> str:
    """The full path of the folder, if one is given."""
    return str(existing_folder(given).resolve()) if given else ""


def cache_folder() -> Path:
    """Where fetched data sets are: `fedbilevel` in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fedbilevel"


def source(name: str) -> Source:
    """The table's entry for a data set; `InputError` with the nearest names if there is none."""
    if name not in SETS:
        raise InputError(f"there is no data set {name!r}{nearest(name, SETS)}")
    return SETS[name]


def damaged(path: str | os.PathLike[str], problem: object) -> InputError:
    """The error for a file that is not what its name says."""
    return InputError(f"{os.fspath(path)}: {' '.join(str(problem).split())}: get the file again")


@contextlib.contextmanager
def parsing(path: str | os.PathLike[str], problem: str) -> Iterator[None]:
    """During the block, turn any error that a file's content causes into `damaged`, but not those of the file system."""
    try:
        yield
    except InputError:
        raise
    except MemoryError:
        raise InputError(f"{os.fspath(path)}: needs too much memory: get the file again if it is damaged") from None
    except Exception as error:  # a parser can fail in any way, at an impossible offset with EINVAL
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise damaged(path, f"{problem} ({str(error) or type(error).__name__})") from None


def _loader(name: str) -> Any:
    return importlib.import_module(f"fedbilevel.tasks.data.{source(name).module}")


def _found(name: str, folder: str | os.PathLike[str]) -> tuple[Path, list[Path]]:
    """The folder that holds the set, and the set's files there."""
    loader, tried = _loader(name), []
    given = [existing_folder(folder)] if folder else []
    environment = os.environ.get("FEDBILEVEL_DATA")
    for place in (*given, *([Path(environment)] if environment else []), cache_folder()):
        for candidate in (place / name, place):
            if found := loader.find(candidate):
                return candidate.absolute(), found
            tried.append(str(candidate))
    get = f"get it with '{SETS[name].get}'" if SETS[name].get.startswith("fedbilevel ") else SETS[name].get
    raise InputError(
        f"{name} was not found: looked for {loader.WANTED} in {', '.join(dict.fromkeys(tried))}; {get}, "
        "or name its folder with --data or in $FEDBILEVEL_DATA"
    )
