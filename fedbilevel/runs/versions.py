"""The versions that a run's numbers may depend on."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

import jax

PACKAGES = ("fedbilevel", "jax", "jaxlib", "numpy", "optax", "scikit-learn")


def versions_here(*others: str) -> dict[str, str]:
    """The versions of Python, of our packages and of others, and the device, by name."""
    packages = {name: importlib.metadata.version(name) for name in (*PACKAGES, *others)}
    device = jax.devices()[0]
    return {"python": platform.python_version(), **packages, "device": f"{device.platform} {device.device_kind}"}


def note_on_changes(began: Path, changes: str) -> str:
    """A sentence on what has changed since something that is now continued began; empty if nothing has."""
    return f"{began} began with {changes}: bits may differ from those of one uninterrupted run" if changes else ""


def changes_since(versions: Mapping[str, str], *others: str) -> str:
    """What has changed since these versions, with those of other packages, in words; empty if nothing has."""
    here = versions_here(*others)
    return ", ".join(f"{name} {old} (now {here[name]})" for name, old in versions.items() if here.get(name, old) != old)
