"""What several commands take from their command line."""

from __future__ import annotations

from pathlib import Path

from fedbilevel.errors import InputError


def assignments(texts: list[str] | None) -> dict[str, str]:
    """NAME=VALUE pairs as a dictionary."""
    pairs = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{text!r} is not of the form NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def picture_path(path: Path) -> Path:
    """The path, if a picture can be written under such a name."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"the picture's name must end in .png, .svg or .pdf; given: {path}")
    return path
