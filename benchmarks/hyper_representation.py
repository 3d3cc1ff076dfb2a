"""Hyper-representation at the papers' size: an MLP 784-200-10 whose hidden layer is x and whose head is y."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.models import mlp
from fedbilevel.population import Population
from fedbilevel.problem import from_trees

INPUTS, HIDDEN, CLASSES = 784, 200, 10
CLIENTS, ROWS, BATCH = 100, 300, 64
RIDGE = 0.05


def population() -> tuple[Population, jax.Array, jax.Array]:
    """Random images for each client, and the start (x, y)."""
    rng = np.random.default_rng(0)

    def rows() -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (rng.integers(0, 256, (ROWS, INPUTS), dtype=np.uint8), rng.integers(0, CLASSES, ROWS, dtype=np.int32))
            for _ in range(CLIENTS)
        ]

    def f(x, y, batch):
        images, labels = batch
        return mlp.cross_entropy(mlp.apply([x, y], mlp.pixels(images)), labels).mean()

    def g(x, y, batch):
        return f(x, y, batch) + RIDGE * sum(jnp.sum(leaf**2) for leaf in y)

    hidden, head = mlp.init(jax.random.key(0), [INPUTS, HIDDEN, CLASSES])
    problem, x, y, _, _ = from_trees(f, g, hidden, head)
    return Population.build(problem, rows(), rows(), batch_size=BATCH), x, y


def operations(share_batch: bool) -> int:
    """Floating-point operations that the derivatives of one client's local step must do.

    A product of the hidden layer with a batch, forward or for the layer's gradient, takes 2 · 64 · 784 · 200; what
    the head takes is at most a fiftieth of that and counted as three products of its own for each pass.
    ∇_x f and ∇²_xy g u need a forward and a gradient product each; with batches of their own, ∇_y g, ∇²_yy g u and
    ∇_y f need a forward product each besides.
    """
    hidden, head = 2 * BATCH * INPUTS * HIDDEN, 2 * BATCH * HIDDEN * CLASSES
    passes = 2 if share_batch else 5
    return (passes + 2) * hidden + 3 * passes * head
