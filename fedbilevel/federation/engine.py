"""Whether NVIDIA FLARE is here, said in one line where it is not."""

from __future__ import annotations

import importlib.util

from fedbilevel.errors import InputError


def require_flare() -> None:
    """Raise `InputError` unless NVIDIA FLARE is installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise InputError("a federation needs NVIDIA FLARE, which is not installed: pip install 'fedbilevel[deploy]'")
