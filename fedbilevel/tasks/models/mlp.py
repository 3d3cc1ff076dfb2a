"""Fully connected layers, rectified in between."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

Layer = tuple[Array, Array]  # weights (inputs, outputs) and bias


def init(key: Array, widths: Sequence[int]) -> list[Layer]:
    """Layers of the given widths, weights normal with variance 2 / inputs (He et al., 2015), biases zero."""
    keys = jax.random.split(key, len(widths) - 1)
    return [
        (jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b))
        for k, a, b in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def apply(layers: Sequence[Layer], inputs: Array) -> Array:
    """The last layer's outputs."""
    for weights, bias in layers[:-1]:
        inputs = jax.nn.relu(inputs @ weights + bias)
    weights, bias = layers[-1]
    return inputs @ weights + bias
