"""A grid of hyperparameters with several seeds each, and which of its cells is best."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import InputError
from fedbilevel.own_code import label
from fedbilevel.registry import find, require_known
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import COUNTERS
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps.cell import Cell
from fedbilevel.runs.sweeps.ranking import criterion_of, ranked
from fedbilevel.settings import nearest, parsed, settings
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.base import Better
from fedbilevel.tasks.validation import Criterion
from fedbilevel.user_files import Scalar, fitted

MOST_RUNS = 100_000  # in a sweep: at a second each, more than a day


@dataclass(frozen=True)
class Sweep:
    """What is swept: every combination of the grid's values, each with seeds `first_seed`, `first_seed` + 1, ...

    A name in the grid is a hyperparameter, or a knob of the task if the algorithm has no hyperparameter of that name. It may
    stand for several that share a value, as in "eta_x+gamma_x". The values in the grid are checked, and converted to their
    setting's type.
    """

    task: str
    knobs: Mapping[str, Scalar]
    algorithm: str
    hyperparameters: Mapping[str, Scalar]  # of all cells
    grid: Mapping[str, Sequence[Scalar]]
    seeds: int
    options: RunOptions  # of all runs, except for the seed
    data: str = ""  # folder of the data set, if it is not bundled
    first_seed: int = 0
    headline: str = ""  # the task's own metric, which `settle` fills in
    better: Better = field(default_factory=dict)  # by metric, whether higher or lower is better; filled in by `settle`

    def __post_init__(self) -> None:
        require_known(TASKS, self.task)
        require_known(ALGORITHMS, self.algorithm)
        self.options.require_for_several()
        if self.task in TASKS.bundled and self.algorithm in ALGORITHMS.bundled:
            self.settle()
        self._require_distinct()
        if not 0 <= self.first_seed < self.first_seed + self.seeds <= 2**32:
            raise InputError(f"seeds must be a whole number of at least 1, and below 2³²; given: {self.seeds}")
        runs = self.seeds * math.prod(map(len, self.grid.values()))
        if runs > MOST_RUNS:
            raise InputError(f"this sweep has {runs:,} runs, but may have at most {MOST_RUNS:,}: give it fewer seeds or cells")

    def settle(self) -> None:
        """Check all values, convert the grid's, and fill in what the task says about its metrics.

        A sweep of the package's own task and algorithm is settled at once; one with other code only when it is to be run.
        """
        task, algorithm = find(TASKS, "task", self.task), find(ALGORITHMS, "algorithm", self.algorithm)
        hyperparameters, knobs = settings(algorithm.load()), settings(task.load())
        known = {**hyperparameters, **knobs, **hyperparameters}
        names = [name for tied in self.grid for name in tied.split("+")]
        for name in names:
            if name not in known:
                raise InputError(f"{label(self.algorithm)} has no hyperparameter {name!r}{nearest(name, known)}")
            if names.count(name) > 1:
                raise InputError(f"the grid has {name} twice: name each hyperparameter once")
            if name in self.knobs and name not in hyperparameters:
                raise InputError(f"{name} is in the grid and among the knobs: leave one out")
        values = {}
        for tied, given in self.grid.items():
            first = tied.split("+")[0]
            owner = label(self.algorithm if first in hyperparameters else self.task)
            values[tied] = [parsed(owner, first, known[first], value) for value in given]
        task.configure(label(self.task), self.knobs)
        algorithm.configure(label(self.algorithm), self.hyperparameters)
        filled = {"grid": values, "headline": task.load().headline, "better": {**self.better, **task.load().better}}
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        self._require_distinct()

    def _require_distinct(self) -> None:
        for name, given in self.grid.items():
            if not given:
                raise InputError(f"the grid has no value for {name}: give at least one")
            if len(set(given)) < len(given):
                raise InputError(f"the grid must name each value of {name} once; given: {', '.join(map(str, given))}")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Sweep:
        """The sweep from what `plain` returned, or from a file of version 0.1, which has the data folder among the options."""
        values = dict(values)
        run = values.pop("run", None)
        if isinstance(run, dict) and "data" in run:
            run = dict(run)
            values.setdefault("data", run.pop("data"))
        return fitted({**values, "options": run}, cls)

    def plain(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        values = asdict(self)
        values["run"] = values.pop("options")
        return json.loads(json.dumps(values))

    def cells(self) -> list[dict[str, Any]]:
        """The combinations, the last name's values running fastest."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]

    def seed_numbers(self) -> range:
        """The seeds of every cell."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def configuration(self, cell: Mapping[str, Any], seed: int) -> Configuration:
        """The configuration of one run."""
        knobs, hyperparameters = self.chosen(cell)
        options = replace(self.options, seed=seed)
        return Configuration.resolve(self.task, knobs, self.algorithm, hyperparameters, options, data=self.data)

    def chosen(self, cell: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The knobs and the hyperparameters of a cell."""
        known, values = settings(find(ALGORITHMS, "algorithm", self.algorithm).load()), untied(cell)
        of_task = {name: value for name, value in values.items() if name not in known}
        return {**self.knobs, **of_task}, {**self.hyperparameters, **{n: v for n, v in values.items() if n in known}}

    def names(self) -> tuple[str, str, str]:
        """The names of its task, its algorithm and its aggregation."""
        return self.task, self.algorithm, self.options.rule()

    def packages(self) -> list[str]:
        """The other packages that offer one of these."""
        return self.configuration(self.cells()[0], self.first_seed).packages()

    def title(self) -> str:
        """What is swept, in words."""
        return f"{label(self.algorithm)} on {label(self.task)}, {self.seeds} seeds"

    def judged(self, by: str = "") -> tuple[Sweep, Criterion]:
        """The sweep with what ranks it: the metric of that name, or one on validation rows, which its runs then hold out."""
        self.settle()
        how = criterion_of(self.configuration(self.cells()[0], self.first_seed), by)
        if how.loss is None:
            return self, how
        better: Better = {how.metric: "higher" if how.higher else "lower"}
        return replace(self, options=replace(self.options, validation=True), better={**self.better, **better}), how

    def ranked(self, cells: Sequence[Cell], metric: str) -> list[Cell]:
        """The cells from best to worst by this metric; those with a run that diverged come last."""
        return ranked(cells, metric, self.better)

    def table(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """For each cell its values, how many of its runs diverged, and the mean and the deviation of every metric."""
        rows = (row for cell in cells for outcome in cell.outcomes for row in outcome.rows)
        names = [name for name in next(rows, {}) if name not in COUNTERS]
        return [
            {
                **cell.values,
                "diverged": cell.diverged,
                **{f"{n} {what}": value for n in names for what, value in cell.summary(n).items()},
            }
            for cell in cells
        ]

    def metrics(self) -> list[str]:
        """The names of its runs' metrics."""
        return self.configuration(self.cells()[0], self.first_seed).experiment().task.metric_names()


def untied(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every single hyperparameter and knob in a cell."""
    return {name: value for tied, value in cell.items() for name in tied.split("+")}


def higher_is_better(task: str, metric: str) -> bool:
    """Whether higher values of a metric are better; lower ones are unless the task says otherwise."""
    return find(TASKS, "task", task).load().better.get(metric) == "higher"
