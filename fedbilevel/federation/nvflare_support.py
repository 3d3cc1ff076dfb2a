"""Support for NVIDIA FLARE: an error line if it is missing, and its decorators."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from fedbilevel.errors import InputError


def require_flare() -> None:
    """Raise `InputError` unless NVIDIA FLARE is installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise InputError("a federation needs NVIDIA FLARE, which is not installed: pip install 'fedbilevel[deploy]'")


def documented(decorator: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A FLARE decorator that keeps a method's docstring, which it would otherwise lose."""

    def decorate(method: Any) -> Any:
        decorated = decorator(method)
        decorated.__doc__ = method.__doc__
        return decorated

    return decorate
