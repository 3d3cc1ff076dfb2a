"""Omniglot: handwritten characters of many alphabets, 20 drawings of each (Lake et al., Science 2015).

The drawings, 105 x 105 in black on white, become 28 x 28 with bright ink: each pixel is the share of its area that is
ink, times 255. Classes are sorted by alphabet, then character; the groups are the alphabets.
"""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from fedbilevel.tasks.data import image_files
from fedbilevel.tasks.data.datasets import Classes, damaged, parsing

DRAWINGS = 20
CHARACTERS = {"images_background": 964, "images_evaluation": 659}
SMALL = [f"images_background_small{k}.zip" for k in (1, 2)]
WANTED = f"{' and '.join(CHARACTERS)} (folders or .zip), or {' and '.join(SMALL)}"
LARGEST = 1 << 16  # bytes of a drawing's file; the originals have about 300

Drawings = dict[str, bytes]  # PNG by file name
Key = tuple[str, str]  # alphabet, character


def find(folder: Path) -> list[Path]:
    """The background and the evaluation part, or the one that is there; without them, the small zips."""
    parts = [next((p for p in (folder / part, folder / f"{part}.zip") if p.exists()), None) for part in CHARACTERS]
    return [part for part in parts if part] or [folder / name for name in SMALL if (folder / name).is_file()]


def read(found: Sequence[Path]) -> Classes:
    """The set, from folders or zips; characters that are in two of them are used once."""
    characters: dict[Key, np.ndarray] = {}
    for path in found:
        part: dict[Key, Drawings] = defaultdict(dict)
        for alphabet, character, name, png in _folder(path) if path.is_dir() else _zip(path):
            part[alphabet, character][name] = png
        wanted = CHARACTERS.get(path.stem, max(len(part), 1))
        if len(part) != wanted:
            raise damaged(path, f"holds {len(part)} characters, not {wanted}")
        for key in part.keys() - characters.keys():
            characters[key] = _character(path, key, part[key])
    keys = sorted(characters)
    alphabets = sorted({alphabet for alphabet, _ in keys})
    return Classes(
        np.concatenate([characters[key] for key in keys]),
        np.repeat(np.arange(len(keys), dtype=np.int32), DRAWINGS),
        np.array([alphabets.index(alphabet) for alphabet, _ in keys], np.int32),
        tuple(alphabets),
    )


def _folder(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    for file in sorted(path.glob("*/character*/*.png")):
        _check_size(path, file.relative_to(path), file.stat().st_size)
        yield file.parts[-3], file.parts[-2], file.name, file.read_bytes()


def _zip(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """The drawings in an archive; their names become keys and never paths."""
    with parsing(path, "is not a complete zip file"), zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            match PurePosixPath(entry.filename).parts:
                case (path.stem, alphabet, character, name) if name.endswith(".png") and character.startswith("character"):
                    _check_size(path, entry.filename, entry.file_size)
                    yield alphabet, character, name, archive.read(entry)


def _check_size(path: Path, name: object, size: int) -> None:
    if size > LARGEST:
        raise damaged(path, f"holds {name} of {size} bytes, too large for a drawing")


def _character(path: Path, key: Key, drawings: Drawings) -> np.ndarray:
    """A character's drawings as uint8 (20, 28, 28), sorted by file name."""
    if len(drawings) != DRAWINGS:
        raise damaged(path, f"holds {len(drawings)} drawings of {'/'.join(key)}, not {DRAWINGS}")
    paper = np.stack([_pixels(path, f"{'/'.join(key)}/{name}", png) for name, png in sorted(drawings.items())])
    return np.round(AREA @ (255 - paper) @ AREA.T).astype(np.uint8)


def _pixels(path: Path, name: str, png: bytes) -> np.ndarray:
    with parsing(path, f"holds {name}, which is not a PNG image"), image_files.opened(io.BytesIO(png), "PNG") as image:
        if image.size != (105, 105):
            raise damaged(path, f"holds {name} of {image.size[0]} x {image.size[1]} pixels, not 105 x 105")
        return np.asarray(image.convert("L"), np.float32)


def _area(pixels: int, into: int) -> np.ndarray:
    """Row i: the share of each of the `pixels` in the i-th of `into` equal parts of a line."""
    edges = np.arange(into + 1) * (pixels / into)
    covered = np.clip(edges[:, None] - np.arange(pixels), 0, 1)
    return (np.diff(covered, axis=0) * (into / pixels)).astype(np.float32)


AREA = _area(105, 28)
