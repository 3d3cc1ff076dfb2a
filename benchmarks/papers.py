"""Experiments at the papers' sizes, on MNIST where it is given and on generated images of its shape where it is not."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.configuration import Configuration
from fedbilevel.data import idx
from fedbilevel.experiment import Experiment

TASK = "hyper-representation-mnist"  # an MLP 784-200-10, 100 clients, minibatches of 64
LOCAL_TASK = "few-shot"  # for the algorithms with a lower level per client


def experiment(algorithm: str, *, task: str = TASK, data: str = "", knobs: Any = (), **rest: Any) -> Experiment:
    """An algorithm on a task with the settings that suit it there; hyperparameters are among the rest."""
    run = {name: rest.pop(name) for name in ("clients_per_round", "seed", "chunk_size") if name in rest}
    data = data or (generated_mnist() if task.endswith("-mnist") else "")
    return Configuration.resolve(task, dict(knobs), algorithm, rest, steps=1, data=data, **run).experiment()


@functools.cache
def generated_mnist() -> str:
    """A folder with files of MNIST's shapes and numbers of labels, and random pixels."""
    folder = tempfile.TemporaryDirectory(prefix="fedbilevel-bench-")
    _kept.append(folder)
    rng = np.random.default_rng(0)
    for name, shape in idx.SHAPES.items():
        if name.startswith("train-labels"):
            content = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), idx.PER_CLASS["mnist"]))
        else:
            content = rng.integers(0, 256 if len(shape) == 3 else 10, shape, dtype=np.uint8)
        header = b"\0\0\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
        Path(folder.name, name).write_bytes(header + content.tobytes())
    return folder.name


_kept: list[tempfile.TemporaryDirectory] = []  # until the program ends
