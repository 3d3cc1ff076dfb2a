"""Where the x and y of a run are taken from: its last moment, or the recorded round that is best on validation rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbilevel.algorithms import called
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.runs.experiment import Experiment, Snapshot


@dataclass(frozen=True)
class BestRound:
    """A recorded round: its x and y, its metrics, and what the algorithm reported. Part of a checkpoint."""

    round: int
    x: np.ndarray
    y: np.ndarray
    numbers: Mapping[str, float | None]


class EndPoint:
    """The x and y that a run would end with now; it is shown one moment of the run after another.

    Of rounds that are equally good, the earliest is the best; a metric that is not finite is worse than any number.
    """

    def __init__(self, experiment: Experiment, best: BestRound | None = None):
        self._experiment, self.best = experiment, best
        self._last: Snapshot | None = None

    def note(self, moment: Snapshot) -> None:
        """Take this moment into account."""
        self._last = moment
        if self._experiment.options.keep_best and moment.metrics is not None:
            numbers = {**moment.metrics, **moment.reported}
            if self.best is None or self._goodness(numbers) > self._goodness(self.best.numbers):
                x, y = map(np.asarray, self._experiment.engine.point(moment.state))
                self.best = BestRound(moment.totals.rounds, x, y, numbers)

    def arrays(self) -> tuple[Any, Any]:
        """x and y, with a row per client where each has its own; `PerClient` where clients keep theirs."""
        if self.best is not None:
            return self.best.x, self.best.y
        assert self._last is not None  # a run has a moment before its first step
        return self._experiment.engine.point(self._last.state)

    def trees(self) -> dict[str, Tree]:
        """The same as the user's trees; without what the clients keep."""
        return self._experiment.trees(*self.arrays())

    @property
    def round(self) -> int | None:
        """The best round; None if the run ends with its last."""
        return None if self.best is None else self.best.round

    def result(self) -> dict[str, Any]:
        """What `result.json` has in place of the last row's metrics."""
        return {} if self.best is None else {**self.best.numbers, "best_round": self.best.round}

    def notes(self) -> list[str]:
        """A sentence that says which round it is, unless it is the last."""
        if self.best is None:
            return []
        name = called(self._experiment.algorithm)
        return [f"{name}: x, y and the metrics in the table are those of round {self.best.round}, the best on held-out rows."]

    def _goodness(self, numbers: Mapping[str, float | None]) -> float:
        name, higher = _criterion(self._experiment)
        value = numbers[name]
        return -np.inf if value is None else value if higher else -value


def _criterion(experiment: Experiment) -> tuple[str, bool]:
    """The metric that rounds are compared by, and whether higher is better."""
    validation = experiment.task.validation
    if validation is None:
        raise InputError("keep_best needs validation rows, and the task has none")
    return validation.name, validation.higher
