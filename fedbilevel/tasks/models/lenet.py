"""LeNet-5, the seven-layer network of Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, 1998, with rectified units.

Images are framed with zeros to 32 x 32; 5 x 5 convolutions with 6 and 16 filters, each followed by pooling of 2 x 2,
then fully connected layers of 120, 84 and as many units as there are classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array

from fedbilevel.tasks.models import convolution, mlp
from fedbilevel.tasks.models.mlp import Layer

SIDE = 32


def init(key: Array, channels: int, classes: int) -> list[Layer]:
    """The five layers that have weights."""
    first, second, rest = jax.random.split(key, 3)
    return [
        convolution.init(first, 5, channels, 6),
        convolution.init(second, 5, 6, 16),
        *mlp.init(rest, [16 * 5 * 5, 120, 84, classes]),
    ]


def apply(layers: Sequence[Layer], images: Array) -> Array:
    """Logits of images (batch, height, width, channels) of at most 32 x 32 pixels."""
    missing = SIDE - images.shape[1]
    images = convolution.padded(images, missing // 2, missing - missing // 2)
    for layer in layers[:2]:
        images = convolution.pooled_max(jax.nn.relu(convolution.convolve(images, layer, 5)))
    return mlp.apply(layers[2:], images.reshape(len(images), -1))
