"""Data sets from their public mirrors, checked by SHA-256. Interrupted downloads are resumed, damaged ones restarted.

A file grows as `FILE.part` and is renamed once its hash is right, so that a file with the final name is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedbilevel.core.locks import held
from fedbilevel.errors import InputError
from fedbilevel.tasks.data.datasets import cache_folder, source

CHUNK = 1 << 16
ATTEMPTS = 3  # per mirror, as long as it sends something
TIMEOUT = 30.0  # seconds without a byte


class File(NamedTuple):
    """A file of a data set, the same at each of its addresses."""

    name: str
    sha256: str
    size: int
    addresses: tuple[str, ...]


class FetchError(OSError):
    """No mirror worked for a file: its name, and what each mirror did instead."""

    def __init__(self, name: str, reason: str):
        super().__init__(reason)
        self.filename, self.strerror = name, reason

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def _files(mirrors: Sequence[str], *files: tuple[str, int, str]) -> tuple[File, ...]:
    return tuple(File(name, sha256, size, tuple(mirror + name for mirror in mirrors)) for name, size, sha256 in files)


FILES = {  # the hashes are those of TensorFlow Datasets, and of Keras for CIFAR-10
    "mnist": _files(
        ["https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"],
        ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "fashion-mnist": _files(
        [
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ],
        ("train-images-idx3-ubyte.gz", 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1-ubyte.gz", 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3-ubyte.gz", 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1-ubyte.gz", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    "cifar-10": _files(
        ["https://www.cs.toronto.edu/~kriz/"],
        ("cifar-10-python.tar.gz", 170498071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    ),
    "omniglot": _files(
        [
            "https://github.com/brendenlake/omniglot/raw/master/python/",
            "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
        ],
        ("images_background.zip", 9464212, "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640"),
        ("images_evaluation.zip", 6462886, "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee"),
    ),
}


def fetch(
    name: str,
    to: str | os.PathLike[str] | None = None,
    progress: Callable[[File, int], None] = lambda file, done: None,
    files: Sequence[File] | None = None,
) -> list[Path]:
    """Download a data set, and return the paths of the files downloaded: none if all were there and intact.

    Args:
        name: The data set.
        to: Folder in which to create the set's own folder; the cache folder by default.
        progress: Called with a file and how many of its bytes are there, as they arrive.
        files: Files to download instead of those in `FILES`.

    Raises:
        FetchError: No mirror worked for a file; what has arrived of it is kept, to resume from.
        InputError: The set cannot be downloaded, or another process is doing so.
    """
    files = files or _known(name)
    folder = Path(to or cache_folder()) / name
    missing = [file for file in files if _hash(folder / file.name) != file.sha256]
    if not missing:  # the folder may be read-only
        return []
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        missing = [file for file in missing if _hash(folder / file.name) != file.sha256]  # another process may have been first
        for file in missing:
            _download(file, folder / file.name, progress)
    return [folder / file.name for file in missing]


def _known(name: str) -> tuple[File, ...]:
    get = source(name).get
    if not get:
        raise InputError(f"{name} is bundled: nothing to fetch")
    if name not in FILES:
        raise InputError(
            f"{name} has no free mirror: {get}, and put it into {cache_folder() / name}, or name its folder with --data"
        )
    return FILES[name]


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    (folder / ".lock").touch()
    with held(folder / ".lock", f"another process is fetching to {folder}: wait until it is done"):
        yield


def _hash(path: Path) -> str:
    """A file's SHA-256; empty if there is no file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Broken(Exception):
    """What a mirror did instead of sending the file."""


def _download(file: File, path: Path, progress: Callable[[File, int], None]) -> None:
    part = path.with_name(f"{path.name}.part")
    problems = []
    for address in file.addresses:
        for _ in range(ATTEMPTS):
            before = _size(part)
            try:
                _go_on(file, part, address, progress)
            except _Broken as broken:
                problem = str(broken)
                if before < _size(part):
                    continue
                break
            if _hash(part) == file.sha256:
                os.replace(part, path)
                return
            part.unlink()
            problem = "sent a file whose SHA-256 is wrong"
            if before == 0:  # otherwise the wrong bytes may have been there before: try once more, from the start
                break
        problems.append(f"{urllib.parse.urlsplit(address).netloc}: {problem}")
    left = f"; {_size(part)} of {file.size} bytes are kept, and the next fetch resumes from there" if _size(part) else ""
    raise FetchError(
        file.name, f"no mirror worked ({'; '.join(problems)}){left}; check the network, or put the file into {path.parent}"
    )


def _go_on(file: File, part: Path, address: str, progress: Callable[[File, int], None]) -> None:
    """Append to `part` what is missing; `_Broken` if the mirror does not send it."""
    start = _size(part) if _size(part) <= file.size else 0
    if start == file.size:
        return
    begun, chunks = _sent(address, start)
    with part.open("r+b" if part.exists() else "wb") as out:
        out.truncate(begun)
        out.seek(begun)
        done = begun
        progress(file, done)
        for chunk in chunks:
            done += len(chunk)
            if done > file.size:
                out.truncate(0)
                raise _Broken(f"sent more than the file's {file.size} bytes")
            out.write(chunk)
            progress(file, done)
    if done < file.size:
        raise _Broken(f"broke off after {done} of {file.size} bytes")


def _sent(address: str, start: int) -> tuple[int, Iterator[bytes]]:
    """Where the mirror begins, at `start` or at 0 if it cannot resume, and the bytes that it sends."""
    headers = {"User-Agent": "fedbilevel"} | ({"Range": f"bytes={start}-"} if start else {})
    with _problems_of_a_mirror():
        response = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        response.close()
        raise _Broken(f"sent the bytes {response.headers.get('Content-Range')} instead of those from {start}")

    def chunks() -> Iterator[bytes]:
        with response:
            while True:
                with _problems_of_a_mirror():
                    chunk = response.read1(CHUNK)
                if not chunk:
                    return
                yield chunk

    return start if response.status == 206 else 0, chunks()


@contextlib.contextmanager
def _problems_of_a_mirror() -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise _Broken(f"{error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise _Broken(str(getattr(reason, "strerror", None) or reason or type(reason).__name__)) from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
