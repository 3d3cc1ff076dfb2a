"""Runs that differ only in their seed, as one series with a confidence band."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Band(NamedTuple):
    """The mean over seeds, and its 95 % confidence interval."""

    at: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def series(configurations: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The numbers of the configurations, grouped with those that differ only in `seed`."""
    groups: dict[str, list[int]] = {}
    for k, configuration in enumerate(configurations):
        rest = {name: value for name, value in configuration.items() if name != "seed"}
        groups.setdefault(json.dumps(rest, sort_keys=True), []).append(k)
    return list(groups.values())


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds, and half the length of its 95 % confidence interval by Student's t."""
    from scipy.stats import t

    half = t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values)), float(half)


def band(positions: Sequence[Sequence[float]], values: Sequence[Sequence[float]]) -> Band | None:
    """The band of several curves, by Student's t; None if they have no stretch in common.

    Curves with other positions than the first one's are interpolated at those.
    """
    if any(len(p) == 0 for p in positions):
        return None
    first, last = max(p[0] for p in positions), min(p[-1] for p in positions)
    at = np.asarray([p for p in positions[0] if first <= p <= last])
    if len(at) == 0:
        return None
    each = np.stack([np.interp(at, p, v) for p, v in zip(positions, values, strict=True)])
    mean, half = np.transpose([interval(values) for values in each.T])
    return Band(*(a.tolist() for a in (at, mean, mean - half, mean + half)))
