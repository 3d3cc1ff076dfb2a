"""What a task is: a problem with its data, its start, and how to judge a solution."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from jax import Array

from fedbilevel.algorithms.base import LowerLevel
from fedbilevel.population import Population

Metrics = Callable[[Array, Any], dict[str, Array]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A federated bilevel problem that an experiment can run.

    `metrics(x, y)` gives named numbers beside the two losses, which an experiment computes from the clients' data; it is
    compiled, and looks at no client's data, so that a server can do it; `y` has a row per client if the lower level is
    local. `truths` names those of the metrics that compare with what is known of simulated data alone.
    `strongly_convex` says whether Σ w_m g_m is so in y, which most methods assume.
    """

    population: Population
    x: Array
    y: Array
    metrics: Metrics
    lower_level: LowerLevel = "global"
    strongly_convex: bool = True
    truths: tuple[str, ...] = ()


class TaskSettings(Protocol):
    """The class of a task: its knobs, and how it is judged."""

    headline: ClassVar[str]  # the metric to compare methods by
    suited: ClassVar[Mapping[str, Mapping[str, Any]]]  # hyperparameters that suit the task, by algorithm

    def build(self, data: str = "") -> Task:
        """The task; `data` is the folder of data sets that are not bundled."""
