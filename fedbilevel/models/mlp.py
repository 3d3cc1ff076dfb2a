"""Fully connected layers as pytrees of (weights, bias) pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

Layers = list[tuple[Array, Array]]


def init(key: Array, widths: Sequence[int]) -> Layers:
    """Layers of the given widths, weights normal with variance 2 / inputs (He et al., 2015), biases zero."""
    keys = jax.random.split(key, len(widths) - 1)
    return [
        (jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b))
        for k, a, b in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def apply(layers: Any, inputs: Array) -> Array:
    """The last layer's outputs, rectified between layers."""
    for weights, bias in layers[:-1]:
        inputs = jax.nn.relu(inputs @ weights + bias)
    weights, bias = layers[-1]
    return inputs @ weights + bias


def pixels(images: ArrayLike) -> Array:
    """uint8 images as flat rows of floats in [0, 1]."""
    images = jnp.asarray(images)
    return images.reshape(len(images), -1).astype(float) / 255


def cross_entropy(logits: Array, labels: ArrayLike) -> Array:
    """-log softmax(logits) at the label, for each row."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(labels)[:, None], 1)[:, 0]
