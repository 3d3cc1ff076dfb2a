"""The versions that a run's numbers may depend on."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping

import jax


def versions_here() -> dict[str, str]:
    """The versions of Python and the packages, and the device, by name."""
    packages = {
        name: importlib.metadata.version(name) for name in ("fedbilevel", "jax", "jaxlib", "numpy", "optax", "scikit-learn")
    }
    device = jax.devices()[0]
    return {"python": platform.python_version(), **packages, "device": f"{device.platform} {device.device_kind}"}


def changes_since(versions: Mapping[str, str]) -> str:
    """What has changed since these versions, in words; empty if nothing has."""
    here = versions_here()
    return ", ".join(f"{name} {old} (now {here[name]})" for name, old in versions.items() if here.get(name, old) != old)
