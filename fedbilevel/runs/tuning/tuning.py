"""What is tuned, and the budget: rungs of successive halving, in one or more passes over boxes."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import InputError, require
from fedbilevel.own_code import label
from fedbilevel.registry import require_known
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps.ranking import criterion_of
from fedbilevel.runs.sweeps.sweep import untied
from fedbilevel.runs.tuning.boxes import Boxes, boxes_of, require_box
from fedbilevel.settings import unwrapped, whole_number
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.base import Better
from fedbilevel.tasks.validation import Criterion
from fedbilevel.user_files import Scalar, fitted

BOUNDS = {  # of the numbers in a budget
    "candidates": (1, 100_000),
    "rungs": (1, 16),
    "keep": (2, 1000),
    "passes": (1, 1000),
    "more": (0, 1000),
    "seeds": (1, 1000),
}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """An algorithm to be tuned on a task.

    A pass begins with `candidates` on the first rung. After each rung the best one in `keep` go on, from where they are, to
    `keep` times the rounds; those on the last rung make all rounds of `options`, with `seeds` seeds. The first pass draws
    candidates from `boxes`, and each further one from boxes half as wide around the best so far, which reach beyond the old
    ones if that is near their ends. While the best is at an end of all that was searched, up to `more` further passes are
    made, with boxes as wide as the last. A budget in seconds replaces the number of passes.
    """

    task: str
    knobs: Mapping[str, Scalar]
    algorithm: str
    hyperparameters: Mapping[str, Scalar]  # of all candidates
    boxes: Boxes
    options: RunOptions  # of the last rung's runs, except for the seed
    candidates: int = 64
    rungs: int = 3
    keep: int = 4
    passes: int = 2
    more: int = 0
    seconds: float | None = None  # of computing, without compiling
    seeds: int = 3
    data: str = ""
    metric: str = "upper_loss"
    better: Better = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_known(TASKS, self.task)
        require_known(ALGORITHMS, self.algorithm)
        self.options.require_for_several()
        for name, (least, most) in BOUNDS.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least, most))
        for name, ends in self.boxes.items():
            require_box(name, ends)
        if self.seconds is not None:
            object.__setattr__(self, "seconds", unwrapped(self.seconds))
            fits = isinstance(self.seconds, int | float) and 0 < self.seconds < math.inf
            require(fits, "seconds", "a number above 0", self.seconds)
        if self.options.rounds is None:
            raise InputError("the budget of a tuning is in rounds: give rounds, not steps")
        if self.options.rounds < self.keep ** (self.rungs - 1):
            raise InputError(f"{self.options.rounds} rounds are too few for {self.rungs} rungs: give more, or fewer rungs")

    @classmethod
    def prepared(
        cls,
        task: str,
        knobs: Mapping[str, Any],
        algorithm: str,
        hyperparameters: Mapping[str, Any],
        boxes: Mapping[str, Sequence[Any]],
        options: RunOptions,
        *,
        fixed: Collection[str] = (),
        by: str = "",
        data: str = "",
        **budget: Any,
    ) -> tuple[Tuning, Criterion]:
        """The tuning with all boxes, those of the algorithm's fields included, and what ranks its candidates.

        The hyperparameters in `fixed` are not tuned; the values of others are where the boxes' centers are.
        """
        options.require_for_several()  # before noise is calibrated in vain
        described = Configuration.resolve(task, knobs, algorithm, hyperparameters, options, data=data)
        how = criterion_of(described, by)
        searched = boxes_of(described, fixed, boxes)
        if not searched:
            budget |= {"candidates": 1, "passes": 1, "more": 0, "seconds": None}
        tuning = cls(
            task=task,
            knobs=knobs,
            algorithm=algorithm,
            hyperparameters=hyperparameters,
            boxes=searched,
            options=replace(options, validation=how.loss is not None),
            data=data,
            metric=how.metric,
            better={how.metric: "higher" if how.higher else "lower"},
            **budget,
        )
        tuning.configuration({}, 0, 0).experiment()  # raises if the first rung is too short for a step
        return tuning, how

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Tuning:
        """The tuning from what `plain` returned."""
        return fitted(values, cls)

    def plain(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return json.loads(json.dumps(asdict(self)))

    def names(self) -> tuple[str, str, str]:
        """The names of its task, its algorithm and its aggregation."""
        return self.task, self.algorithm, self.options.rule()

    def problem(self) -> tuple[str, Mapping[str, Scalar], str]:
        """What its algorithm solves: the task, its knobs and its data."""
        return self.task, self.knobs, self.data

    def packages(self) -> list[str]:
        """The other packages that offer one of these."""
        return self.configuration({}, 0, 0).packages()

    def title(self) -> str:
        """What is tuned, in words."""
        return f"{label(self.algorithm)} on {label(self.task)}"

    def rounds(self, rung: int) -> int:
        """How many rounds the runs on a rung have behind them at its end."""
        return -(-(self.options.rounds or 0) // self.keep ** (self.rungs - 1 - rung))

    def places(self, rung: int) -> int:
        """How many candidates may be on a rung."""
        return max(1, self.candidates // self.keep**rung)

    def seed_numbers(self, rung: int) -> range:
        """The seeds on a rung: all on the last, and one before."""
        return range(self.seeds if rung == self.rungs - 1 else 1)

    def pass_rounds(self) -> int:
        """The rounds of all runs of a pass together, if none diverges."""
        reached = [0, *map(self.rounds, range(self.rungs))]
        climbed = sum(self.places(rung) * (reached[rung + 1] - reached[rung]) for rung in range(self.rungs))
        return climbed + self.places(self.rungs - 1) * (self.seeds - 1) * reached[-1]

    def chosen(self, values: Mapping[str, float]) -> dict[str, Any]:
        """The hyperparameters of a candidate that differ from the defaults."""
        return {**self.hyperparameters, **untied(values)}

    def configuration(self, values: Mapping[str, float], seed: int, rung: int) -> Configuration:
        """The run of a candidate up to the end of a rung."""
        options = replace(self.options, seed=seed, rounds=self.rounds(rung))
        return Configuration.resolve(self.task, self.knobs, self.algorithm, self.chosen(values), options, data=self.data)

    def in_force(self) -> list[dict[str, float]]:
        """The candidate that has the values of a run without tuning, if they are in the boxes."""
        values = self.configuration({}, 0, 0).hyperparameters
        own = {name: float(values[name.split("+")[0]]) for name in self.boxes}  # type: ignore[arg-type]
        return [own] if all(low <= own[name] <= high for name, (low, high) in self.boxes.items()) else []
