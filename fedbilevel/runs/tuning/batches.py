"""A batch: runs that are one program, as plain values, so that any process can make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedbilevel.runs.checkpoint import Checkpoint
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import Experiment, Snapshot
from fedbilevel.runs.sweeps.batched_runs import Ended, Outcome, continue_together


class Made(NamedTuple):
    """How a run of a batch ended, its state there, none if it diverged, and its seconds of computing in this batch."""

    outcome: Outcome
    end: Checkpoint | None
    seconds: float


class Batch(NamedTuple):
    """Runs that differ only in their algorithm's real numbers and their seeds, and where each begins."""

    configurations: Sequence[Configuration]
    starts: Sequence[Checkpoint | None]

    def names(self) -> Sequence[str]:
        """The names of their task, their algorithm and their aggregation."""
        return self.configurations[0].names()

    def do(self, observe: Callable[[int], None] = lambda rounds: None) -> list[Made]:
        """Make the runs together; `observe` is called with their rounds."""
        first = self.configurations[0].experiment()
        if first.spending is None:
            experiments = [first.varied(one.configured_algorithm(), one.options.seed) for one in self.configurations]
        else:  # what privacy costs depends on the seed
            experiments = [one.experiment() for one in self.configurations]
        starts = [None if start is None else _moment(start, e) for start, e in zip(self.starts, experiments, strict=True)]
        return [
            Made(ended.outcome, _checkpoint(ended, experiment), ended.seconds)
            for ended, experiment in zip(continue_together(experiments, starts, observe), experiments, strict=True)
        ]


def _moment(stored: Checkpoint, experiment: Experiment) -> Snapshot:
    state = experiment.restored(list(stored.leaves))
    return Snapshot(state, stored.step, stored.totals, stored.seconds, reported=dict(stored.reported))


def _checkpoint(ended: Ended, experiment: Experiment) -> Checkpoint | None:
    at = ended.at
    return at and Checkpoint("", at.step, at.totals, at.seconds, experiment.saved(at), at.reported)
