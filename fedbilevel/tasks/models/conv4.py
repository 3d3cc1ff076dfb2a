"""Four 3 x 3 convolutions with batch normalisation: the few-shot backbone of C. Finn, P. Abbeel and S. Levine, ICML 2017.

Normalisation uses the statistics of the images given together, those of one task. The maps are halved after every
convolution by its stride (their Omniglot network, which ends in the mean over the last map) or by pooling (MiniImageNet).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.tasks.models import convolution
from fedbilevel.tasks.models.mlp import Layer

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
        images = jax.nn.relu(normalised(maps, scale, shift))
        images = images if strided else convolution.pooled_max(images)
    return images.mean((1, 2)) if strided else images.reshape(len(images), -1)


@jax.custom_vjp
def normalised(maps: Array, scale: Array, shift: Array) -> Array:
    """The maps with mean `shift` and, but for EPSILON, variance `scale`² over all but the channels.

    Its derivative is written out, since that takes fewer passes over the maps than the one JAX derives. The first
    derivative must be taken in reverse mode, the next in either mode.
    """
    return _forward(maps, scale, shift)[0]


def _forward(maps: Array, scale: Array, shift: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    centred = maps - maps.mean((0, 1, 2))
    inverse = jax.lax.rsqrt((centred**2).mean((0, 1, 2)) + EPSILON)
    standard = centred * inverse
    return standard * scale + shift, (standard, inverse, scale)


def _backward(kept: tuple[Array, Array, Array], slope: Array) -> tuple[Array, Array, Array]:
    standard, inverse, scale = kept
    mean, along = slope.mean((0, 1, 2)), (slope * standard).mean((0, 1, 2))
    count = slope[..., 0].size
    return inverse * scale * (slope - mean - along * standard), count * along, count * mean


normalised.defvjp(_forward, _backward)
