"""What the tasks on labelled images share: rows, networks, losses and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fedbilevel.core import randomness
from fedbilevel.core.devices import require_memory
from fedbilevel.core.problem import Named
from fedbilevel.errors import InputError
from fedbilevel.settings import choice
from fedbilevel.tasks.base import Holdings
from fedbilevel.tasks.data.datasets import Images
from fedbilevel.tasks.data.partition import Parts
from fedbilevel.tasks.models import lenet, mlp
from fedbilevel.tasks.models.mlp import Layer

TESTED_AT_ONCE = 500  # test images


class Labelled(NamedTuple):
    """Images and their classes."""

    images: ArrayLike  # uint8 until a network uses them
    labels: ArrayLike


class Network(NamedTuple):
    """A classifier of uint8 images, as layers one after another."""

    layers: list[Layer]  # at the start
    apply: Callable[[Sequence[Layer], ArrayLike], Array]  # layers, images -> logits
    head: int  # how many of the layers come after the representation


def model(default: str = "mlp") -> Any:
    """The knob for `network`."""
    return choice(default, "the network: fully connected (mlp) or LeNet-5 (cnn)", ("mlp", "cnn"))


def scaling(default: str = "unit") -> Any:
    """The knob for how pixels become numbers."""
    return choice(
        default, "pixels: from 0 to 1 (unit), or with mean 0 and deviation 1 over the set (standard)", ("unit", "standard")
    )


def network(kind: str, source: Images, layers: int, hidden: int, scaling: str, seed: int) -> Network:
    """An MLP of so many layers, the hidden ones of the given width, or LeNet-5, for the images of a set."""
    key, classes = randomness.key(seed), len(source.classes)
    side, channels = source.images.shape[1], int(np.prod(source.images.shape[3:]))
    center, spread = (source.images.mean() / 255, source.images.std() / 255) if scaling == "standard" else (0.0, 1.0)

    def pixels(images: ArrayLike) -> Array:
        return (jnp.asarray(images).astype(float) / 255 - center) / spread

    if kind == "mlp":
        inputs = side * side * channels
        require_memory("the network", 4 * hidden * max(inputs, hidden) * (layers - 1), "lower hidden or layers")
        start = mlp.init(key, [inputs, *[hidden] * (layers - 1), classes])
        return Network(start, lambda layers, images: mlp.apply(layers, pixels(images).reshape(len(images), -1)), head=1)  # type: ignore[arg-type]
    start = lenet.init(key, channels, classes)
    return Network(start, lambda layers, images: lenet.apply(layers, pixels(images).reshape(-1, side, side, channels)), head=2)


def cross_entropy(logits: Array, labels: ArrayLike) -> Array:
    """-log softmax(logits) at the label, for each row."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(labels)[:, None], 1)[:, 0]


def squared_norm(tree: Any) -> Array:
    """The sum of all squared entries."""
    return sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)), jnp.zeros(()))


def guesses(net: Network, layers: Sequence[Layer], images: Array) -> Array:
    """The class with the largest logit, image by image."""
    return lax.map(lambda image: net.apply(layers, image[None])[0].argmax(), images, batch_size=TESTED_AT_ONCE)


def accuracy(net: Network, layers: Sequence[Layer], images: Array, labels: Array) -> Array:
    """The share of images whose largest logit is their label's."""
    return jnp.mean(guesses(net, layers, images) == labels)


def tests(net: Network, layers: Callable[[Array, Array], Sequence[Layer]]) -> Named:
    """The accuracy on rows that a client holds out, of the layers that x and y make."""

    def test_accuracy(x: Array, y: Array, rows: Labelled) -> Array:
        return accuracy(net, layers(x, y), jnp.asarray(rows.images), jnp.asarray(rows.labels))

    return (("test_accuracy", test_accuracy),)


def split(parts: Parts, train: int, validation: int, seed: int, owner: str) -> tuple[Parts, Parts]:
    """Split every client's part into `train` and `validation` samples, or a small part in the same proportion."""
    rng, wanted = np.random.default_rng(seed), train + validation
    longest = max(len(part) for part in parts)
    if longest < wanted:
        raise InputError(
            f"{owner}: {len(parts)} clients get at most {longest} samples each, fewer than {train} for training and "
            f"{validation} for validation: lower one of the three"
        )
    for_training, for_validation = [], []
    for m, part in enumerate(parts):
        mine = rng.permutation(part)[:wanted]
        cut = min(max(round(len(mine) * train / wanted), 1), len(mine) - 1)
        if cut < 1:
            raise InputError(
                f"{owner}: client {m} is dealt too few samples ({len(part)}; it needs two, for training and validation): deal "
                "them more evenly, such as with a larger ALPHA or LEAST in partition=dirichlet:ALPHA:LEAST, or to fewer clients"
            )
        for_training.append(mine[:cut])
        for_validation.append(mine[cut:])
    return for_training, for_validation


def holdings(labels: np.ndarray, classes: tuple[str, ...], **parts: Parts) -> Holdings:
    """How many samples of each class every client holds, by purpose."""
    counts = {what: np.stack([np.bincount(labels[p], minlength=len(classes)) for p in dealt]) for what, dealt in parts.items()}
    return Holdings(classes, counts)
