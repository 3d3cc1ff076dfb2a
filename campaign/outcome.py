"""What a command has left in a folder, for comparison with what it should have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def numbers(folder: Path) -> dict[str, Any]:
    """What all files of a folder say, but for times, identities and pictures."""
    found: dict[str, Any] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.suffix == ".jsonl":
            lines = [_plain(json.loads(line)) for line in file.read_bytes().splitlines()]
            found[name] = sorted(lines, key=str) if "sweep.json" in os.listdir(file.parent) else lines
        elif file.suffix == ".json":
            found[name] = _plain(json.loads(file.read_bytes()))
        elif file.suffix in (".csv", ".toml", ".npy", ".npz"):
            found[name] = file.read_bytes()
        elif file.suffix not in (".png", ".svg"):
            found[name] = "there"
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in ("seconds", "started", "identity")}
    return [_plain(v) for v in value] if isinstance(value, list) else value
