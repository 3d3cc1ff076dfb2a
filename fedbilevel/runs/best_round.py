"""Where the x and y of a run are taken from: its last moment, or the recorded round that is best on validation rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbilevel.aggregations.private import PrivateClients
from fedbilevel.algorithms import called
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.curvature import probe
from fedbilevel.core.problem import LOSSES, Tree
from fedbilevel.errors import InputError
from fedbilevel.runs.experiment import Experiment, Snapshot
from fedbilevel.tasks.base import Better, Judged, Task
from fedbilevel.tasks.validation import SHARE, criterion

AVERAGED = 3  # recorded rounds


@dataclass(frozen=True)
class BestRound:
    """A recorded round: its x and y, its metrics, and what the algorithm reported. Part of a checkpoint."""

    round: int
    x: np.ndarray
    y: np.ndarray
    numbers: Mapping[str, float | None]


class EndPoint:
    """The x and y that a run would end with now; it is shown one moment of the run after another.

    A round is as good as the metric is on average over it and the two recorded before it, since held-out rows are few. Of
    rounds that are equally good, the earliest is the best; a metric that is not finite is worse than any number.
    """

    def __init__(self, experiment: Experiment, best: BestRound | None = None, rows: Iterable[Mapping[str, Any]] = ()):
        """`rows` of metrics are those until now, where a run goes on, and `best` is the best of them."""
        self._experiment, self.best = experiment, best
        self._last: Snapshot | None = None
        self._metric: dict[int, float] = {}  # by recorded round; higher is better
        if experiment.options.keep_best:
            self._metric = {row["rounds"]: self._goodness(row) for row in rows}

    def note(self, moment: Snapshot) -> None:
        """Take this moment into account."""
        self._last = moment
        if self._experiment.options.keep_best and moment.metrics is not None:
            round, numbers = moment.totals.rounds, {**moment.metrics, **moment.reported}
            self._metric[round] = self._goodness(numbers)
            if self.best is None or self._recent(round) > self._recent(self.best.round):
                x, y = map(np.asarray, self._experiment.engine.point(moment.state))
                self.best = BestRound(round, x, y, numbers)

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

    def _recent(self, round: int) -> float:
        """The average of the metric over a recorded round and those before it."""
        return recent(list(self._metric.values()), list(self._metric).index(round))

    def _goodness(self, numbers: Mapping[str, float | None]) -> float:
        name, higher = _criterion(self._experiment)
        return goodness(numbers[name], higher)


def goodness(value: float | None, higher: bool) -> float:
    """A metric as a number that is better high; a metric that is not finite is worse than any."""
    return -np.inf if value is None else value if higher else -value


def recent(of_rounds: Sequence[float], at: int) -> float:
    """How good a recorded round is: the average over it and those before it."""
    return statistics.mean(of_rounds[max(0, at + 1 - AVERAGED) : at + 1])


def best_so_far(of_rounds: Sequence[float]) -> list[int]:
    """For each recorded round the one that a run would end with if it stopped there."""
    rounds = range(len(of_rounds))
    return [max(rounds[: now + 1], key=lambda at: recent(of_rounds, at)) for now in rounds]


def may_overfit(task: Task) -> bool:
    """Whether x can fit f's rows: it is hyperparameters alone, which f knows through y, and more than a fifth as many."""
    if task.own_x or SHARE * task.x.size <= int(np.sum(task.population.upper.size)):
        return False
    x, y = (at + probe(at) for at in (task.x, task.y))  # at the start itself, derivatives may be zero by chance
    return not bool(task.population.problem.fx(x, y, task.population.some_rows()).any())


def keeps_best(task: Task, judged: Judged | None, rule: Aggregation, private: bool) -> bool:
    """Whether a run ends with its best round if nobody says: where the last may be overfitted, and rows can be held out."""
    if private or rule.buffers or isinstance(rule, PrivateClients) or not may_overfit(task):
        return False
    return criterion(task, *headline_of(judged)).loss is not None


def headline_of(judged: Judged | None) -> tuple[str, Better]:
    """The metric by which a task is judged, and which values of its metrics are better; f's loss where nothing is known."""
    return (judged.headline, judged.better) if judged else (LOSSES[0], {})


def _criterion(experiment: Experiment) -> tuple[str, bool]:
    """The metric that rounds are compared by, and whether higher is better."""
    validation = experiment.task.validation
    if validation is None:
        raise InputError("keep_best needs validation rows, and the task has none")
    return validation.name, validation.higher
