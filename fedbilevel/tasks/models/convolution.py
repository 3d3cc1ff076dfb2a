"""Convolutions as patches times a matrix, which with a matrix for each client is fast on CPU and GPU alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.tasks.models.mlp import Layer


def init(key: Array, size: int, channels: int, filters: int) -> Layer:
    """Weights for size x size patches, normal with variance 2 / inputs (He et al., 2015), biases zero."""
    inputs = size * size * channels
    return jax.random.normal(key, (inputs, filters)) * (2 / inputs) ** 0.5, jnp.zeros(filters)


def convolve(images: Array, layer: Layer, size: int, stride: int = 1) -> Array:
    """(batch, height, width, channels) -> (batch, height', width', filters), without padding."""
    weights, bias = layer
    height, width = ((n - size) // stride + 1 for n in images.shape[1:3])
    patches = jnp.concatenate(
        [
            images[:, i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
            for i in range(size)
            for j in range(size)
        ],
        axis=-1,
    )
    return patches @ weights + bias


def padded(images: Array, before: int, after: int | None = None) -> Array:
    """The images with a frame of zeros."""
    frame = (before, before if after is None else after)
    return jnp.pad(images, ((0, 0), frame, frame, (0, 0)))


def pooled_max(images: Array) -> Array:
    """The largest of every 2 x 2 pixels; an odd last row or column is dropped."""
    batch, height, width, channels = images.shape
    even = images[:, : height // 2 * 2, : width // 2 * 2]
    return even.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))
