"""What a tuning has found so far: how far every candidate came, and which is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedbilevel.runs.sweeps.batched_runs import Outcome
from fedbilevel.runs.sweeps.cell import Cell
from fedbilevel.runs.sweeps.ranking import ranked
from fedbilevel.runs.sweeps.sweep import untied
from fedbilevel.runs.tuning.boxes import Boxes, at_edges
from fedbilevel.runs.tuning.tuning import Tuning


@dataclass(frozen=True)
class Pass:
    """The boxes of a pass, and the candidates drawn from them."""

    boxes: Boxes
    candidates: Sequence[Mapping[str, float]]


class Run(NamedTuple):
    """Which run on which rung."""

    search: int  # the number of its pass
    rung: int
    candidate: int
    seed: int


class Result(NamedTuple):
    """What came of a run on a rung, and its seconds of computing there, without compiling."""

    outcome: Outcome
    seconds: float


class Climbed(NamedTuple):
    """A candidate, and what came of it on each rung that it reached."""

    search: int
    candidate: int
    rungs: list[Cell]


@dataclass(frozen=True)
class Found:
    """The passes of a tuning, and the results of its runs."""

    tuning: Tuning
    passes: Sequence[Pass]
    results: Mapping[Run, Result]

    def climbed(self) -> list[Climbed]:
        """Every candidate that has a result, in the order of its number."""
        return [
            Climbed(search, number, cells)
            for search, one in enumerate(self.passes)
            for number in range(len(one.candidates))
            if (cells := self.cells(search, number))
        ]

    def cells(self, search: int, candidate: int) -> list[Cell]:
        """A candidate's outcomes on each rung that it has reached with all seeds."""
        values, cells = self.passes[search].candidates[candidate], list[Cell]()
        for rung in range(self.tuning.rungs):
            runs = [Run(search, rung, candidate, seed) for seed in self.tuning.seed_numbers(rung)]
            if not all(run in self.results for run in runs):
                break
            cells.append(Cell(values, [self.results[run].outcome for run in runs]))
        return cells

    def survivors(self, search: int, rung: int, candidates: Sequence[int]) -> list[int]:
        """Which of these candidates go on after a rung: the best ones that have not diverged."""
        cells = {number: self.cells(search, number)[rung] for number in candidates}
        alive = [cell for cell in cells.values() if not math.isnan(cell.mean(self.tuning.metric))]
        best = self._ranked(alive)[: self.tuning.places(rung + 1)]
        return [number for number, cell in cells.items() if any(cell is one for one in best)]

    def finalists(self) -> list[Cell]:
        """The candidates of the last rung, from best to worst."""
        return self._ranked([c.rungs[-1] for c in self.climbed() if len(c.rungs) == self.tuning.rungs])

    def best(self) -> Cell | None:
        """The best candidate of the last rung; None if all diverged."""
        cells = self.finalists()
        return cells[0] if cells and not math.isnan(cells[0].mean(self.tuning.metric)) else None

    def chosen(self) -> dict[str, Any]:
        """The best candidate's values, by name of the hyperparameter; empty if all diverged."""
        best = self.best()
        return untied(best.values) if best else {}

    def edges(self) -> list[str]:
        """The hyperparameters whose best value is at an end of what was searched."""
        best = self.best()
        return at_edges([one.boxes for one in self.passes], best.values) if best else []

    def summary(self) -> str:
        """The best candidate in a line."""
        best, count, metric = self.best(), len(self.climbed()), self.tuning.metric
        if best is None:
            return f"{self.tuning.title()}: all of {count} candidates diverged"
        return (
            f"{self.tuning.title()}: the best of {count} candidates has {metric} {best.mean(metric):.4g}, deviation "
            f"{best.deviation(metric):.2g} over {len(best.outcomes)} seeds"
        )

    def seconds(self, passes: int) -> float:
        """The seconds of computing that all runs of the first passes took, those that diverged included."""
        return sum(result.seconds for run, result in self.results.items() if run.search < passes)

    def _ranked(self, cells: Sequence[Cell]) -> list[Cell]:
        return ranked(cells, self.tuning.metric, self.tuning.better)
