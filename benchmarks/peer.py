"""What every simulator in `peers.py` is given, and how it answers; needs NumPy alone, since each has an environment of its own.

A peer is a script with `run(data, rounds, begin)`, which trains from the start for so many rounds and returns weights and
biases. It calls `begin` when all is ready and the first round begins.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

STEP, BATCH, LOCAL_STEPS = 0.1, 64, 5


class Data(NamedTuple):
    """100 clients, each with the rows of five minibatches; which ten take part in each round; and where training starts."""

    images: np.ndarray  # (clients, rows, 784), float32
    labels: np.ndarray  # (clients, rows), int32
    cohorts: np.ndarray  # (rounds, 10)
    w1: np.ndarray
    b1: np.ndarray
    w2: np.ndarray
    b2: np.ndarray

    def loss(self, w1: np.ndarray, b1: np.ndarray, w2: np.ndarray, b2: np.ndarray) -> float:
        """The mean cross-entropy over all rows."""
        logits = np.maximum(self.images.reshape(-1, 784) @ w1 + b1, 0) @ w2 + b2
        own = np.take_along_axis(logits, self.labels.reshape(-1, 1), 1)[:, 0]
        return float(np.mean(np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - own))


def answer(run: Callable[[Data, int, Callable[[], None]], tuple]) -> None:
    """Train for as many rounds as each line of the input says, and say how long that took and what the loss is then."""
    data = Data(**np.load(sys.argv[1]))
    for line in sys.stdin:
        began: list[float] = []
        reached = run(data, int(line), lambda: began.append(time.perf_counter()))
        seconds = time.perf_counter() - began[0]
        print(json.dumps({"seconds": seconds, "loss": data.loss(*map(np.asarray, reached))}), flush=True)
