"""What a run's x says about the data: which samples it trusts, how it weighs the classes."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from fedbilevel.tasks.base import Task
from fedbilevel.tasks.data import datasets
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.loss_tuning import LossTuning, VectorScaling

PICTURES = 20  # of the most, and of the least trusted samples
BINS = 40


def learned(settings: Any, data: str, task: Task, x: np.ndarray) -> dict[str, Any] | None:
    """What there is to show of x, for a page; None where x has not moved, or the task's x says nothing by itself."""
    if np.array_equal(x, np.asarray(task.x)):
        return None
    match settings:
        case DataCleaning():
            return {"samples": _sample_weights(settings, data, task, x)}
        case LossTuning():
            return {
                "classes": {name: list(map(float, part)) for name, part in VectorScaling(*x.reshape(3, -1))._asdict().items()}
            }
        case _:
            return None


def _sample_weights(settings: DataCleaning, data: str, task: Task, x: np.ndarray) -> dict[str, Any]:
    """Histograms of the weights of clean and of corrupted samples, and the samples at both ends."""
    source: datasets.Images = datasets.load(settings.dataset, data)
    samples = np.concatenate(settings.dealt(source.labels)[0])
    true, given = source.labels[samples], np.asarray(task.population.lower.rows.labels)
    weights = 1 / (1 + np.exp(-x)) if settings.weighting == "sigmoid" else x
    corrupted, edges = true != given, np.histogram_bin_edges(weights, BINS)
    order = np.argsort(weights)

    def described(n: int) -> dict[str, Any]:
        return {
            "picture": _picture(source.images[samples[n]]),
            "weight": float(weights[n]),
            "given": int(given[n]),
            "true": int(true[n]),
        }

    return {
        "edges": edges.tolist(),
        "clean": np.histogram(weights[~corrupted], edges)[0].tolist(),
        "corrupted": np.histogram(weights[corrupted], edges)[0].tolist(),
        "most": [described(n) for n in order[::-1][:PICTURES]],
        "least": [described(n) for n in order[:PICTURES]],
    }


def _picture(image: np.ndarray) -> str:
    """A PNG as a data URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
