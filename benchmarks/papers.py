"""Experiments at the papers' sizes, on MNIST if it is given and otherwise on generated images of its shape.

They compile as the command does, except that nothing is cached between processes.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.command import compilation
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.options import RunOptions
from fedbilevel.tasks.data import idx

compilation.compile_fast()
TASK = "hyper-representation-mnist"  # an MLP 784-200-10, 100 clients, minibatches of 64


def experiment(algorithm: str, *, task: str = TASK, data: str = "", knobs: Any = (), **rest: Any) -> Experiment:
    """An algorithm on a task with the settings that suit it there; hyperparameters are among the rest."""
    run = {name: rest.pop(name) for name in ("clients_per_round", "seed", "steps", "every", "products") if name in rest}
    data = data or (generated_mnist() if task.endswith("-mnist") else "")
    return Configuration.resolve(task, dict(knobs), algorithm, rest, RunOptions(**{"steps": 1, **run}), data=data).experiment()


@functools.cache
def generated_mnist() -> str:
    """A folder with files of MNIST's shapes and numbers of labels; an image is a pattern of its class, and noise."""
    folder = tempfile.TemporaryDirectory(prefix="fedbilevel-bench-")
    _kept.append(folder)
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 64, (10, 28, 28), dtype=np.uint8)
    train = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), idx.PER_CLASS["mnist"]))
    labels = (train, rng.integers(0, 10, 10_000, dtype=np.uint8))
    contents = [a for of in labels for a in (patterns[of] + rng.integers(0, 192, (len(of), 28, 28), dtype=np.uint8), of)]
    for (name, shape), content in zip(idx.SHAPES.items(), contents, strict=True):
        header = b"\0\0\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
        Path(folder.name, name).write_bytes(header + content.tobytes())
    return folder.name


_kept: list[tempfile.TemporaryDirectory] = []  # until the program ends
