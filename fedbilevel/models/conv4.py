"""Four 3 x 3 convolutions with batch normalisation: the few-shot backbone of C. Finn, P. Abbeel and S. Levine, ICML 2017.

Normalisation is by the statistics of the images given together, which are those of one task. The maps are halved after
every convolution by its stride (their Omniglot network, which ends in the mean over the last map) or by pooling
(MiniImageNet).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.models import convolution
from fedbilevel.models.mlp import Layer

EPSILON = 1e-3  # added to the variance


def init(key: Array, channels: int, filters: int) -> list[tuple[Layer, Layer]]:
    """Four blocks: a convolution, and the scale and shift of its normalised outputs."""
    return [
        (convolution.init(k, 3, channels if layer == 0 else filters, filters), (jnp.ones(filters), jnp.zeros(filters)))
        for layer, k in enumerate(jax.random.split(key, 4))
    ]


def apply(blocks: Sequence[tuple[Layer, Layer]], images: Array, strided: bool) -> Array:
    """Features of images (batch, height, width, channels) that belong together."""
    for layer, (scale, shift) in blocks:
        maps = convolution.convolve(convolution.padded(images, 1), layer, 3, stride=2 if strided else 1)
        mean, variance = maps.mean((0, 1, 2)), maps.var((0, 1, 2))
        images = jax.nn.relu((maps - mean) * jax.lax.rsqrt(variance + EPSILON) * scale + shift)
        images = images if strided else convolution.pooled_max(images)
    return images.mean((1, 2)) if strided else images.reshape(len(images), -1)
