"""TOML files that users write."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedbilevel.errors import InputError


def read_toml(path: Path) -> dict[str, Any]:
    """The file's content; `InputError` if it is missing or cannot be read."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a TOML file ({error})") from None
