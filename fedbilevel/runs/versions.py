"""The versions that a run's numbers may depend on."""

from __future__ import annotations

import importlib.metadata
import platform

import jax


def versions_here() -> dict[str, str]:
    """Those of Python and of the packages, and the device, by name."""
    packages = {
        name: importlib.metadata.version(name) for name in ("fedbilevel", "jax", "jaxlib", "numpy", "optax", "scikit-learn")
    }
    device = jax.devices()[0]
    return {"python": platform.python_version(), **packages, "device": f"{device.platform} {device.device_kind}"}
