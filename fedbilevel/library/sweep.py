"""The command `sweep` as a call: a grid of hyperparameters and knobs, with several seeds each."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.errors import InputError, require, warn
from fedbilevel.library.interruptible import continue_with, interruptible
from fedbilevel.library.names import as_python
from fedbilevel.library.parts import algorithm_part, given_knobs, known, task_part
from fedbilevel.library.paths import path_of
from fedbilevel.library.sweep_result import SweepResult, concluded
from fedbilevel.own_code import label
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.progress import Pace, counted
from fedbilevel.runs.stopping import StopRequest
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep, untied
from fedbilevel.tasks.base import Task
from fedbilevel.user_files import naming


def sweep(
    task: str | type | Task,
    algorithm: str | Algorithm,
    grid: Mapping[str, Iterable[Any]],
    *,
    seeds: int = 3,
    by: str = "",
    rounds: int | None = None,
    steps: int | None = None,
    clients_per_round: int | None = None,
    bernoulli: float | None = None,
    dropout: float | None = None,
    weights: str | None = None,
    every: int = 100,
    loss_bound: float = 1e6,
    knobs: Mapping[str, Any] | None = None,
    data: str | Path = "",
    out: str | Path | None = None,
) -> SweepResult:
    """Run a grid of hyperparameters with several seeds each, and find the best; small runs share one program.

    Args:
        task: a name as in the command (one of the package's, or `FILE.py`), a function or class declared by `@fedbilevel.task`,
            or a `Task`.
        algorithm: a name in `fedbilevel.ALGORITHMS`, or an instance, whose hyperparameters hold where the grid has no others.
        grid: for each hyperparameter, or knob of the task, the values to try: `{"eta_x": [0.1, 1], "lam": [0.01, 0.1]}`.
            The name "eta_x+gamma_x" gives both the same value.
        seeds: how many runs every cell has, each with its own seed.
        by: the metric to rank cells by. Unless given, it is the task's own on validation rows, one in five of each client's
            upper rows, which are then held out of the losses; or the upper loss, where a task has no rows to hold out.
        rounds, steps: how long a run is, in communication rounds or in outer steps; give one of the two.
        clients_per_round, bernoulli, dropout: who takes part: that many at random, or each with this probability; and with
            which probability one that was drawn drops out. Everyone takes part unless given.
        weights: the clients' weights: "equal", "rows", or numbers separated by commas; the task's own unless given.
        every: rounds between two rows of a run's numbers.
        loss_bound: a loss above it counts as divergence.
        knobs: knobs of the task, where it is a name or a declaration; a `Task` has its own.
        data: the folder of its data, likewise.
        out: a folder for the sweep, as the command writes it, with a table, pictures and the best settings. Ctrl-C leaves the
            runs that are done, and `resume`, or the same call again, makes the others.

    Raises:
        InputError: something given cannot be used.
    """
    seeds = as_python(seeds)
    require(isinstance(seeds, int) and not isinstance(seeds, bool), "seeds", "a whole number of at least 1", seeds)
    require(isinstance(by, str), "by", "the name of a metric", by)
    recorded = None if out is None else path_of("out", out)
    tried = _tried(grid)
    of_algorithm = algorithm_part(algorithm, untied(tried))
    of_task = task_part(task, given_knobs(knobs), data, untied(tried))
    options = RunOptions(
        rounds=rounds,
        steps=steps,
        clients_per_round=clients_per_round,
        bernoulli=bernoulli,
        dropout=dropout,
        weights=weights,
        every=every,
        loss_bound=loss_bound,
    )
    with contextlib.ExitStack() as kept:
        kept.enter_context(known([(of_task, "task"), (of_algorithm, "algorithm")]))
        described = Sweep(
            of_task.name, of_task.settings, of_algorithm.name, of_algorithm.settings, tried, seeds, options, of_task.data
        )
        described, how = described.judged(by)
        if recorded is None:
            place = Path(kept.enter_context(tempfile.TemporaryDirectory()))
            return _stoppable(SweepFolder.create(place, described, metric=how.metric), "give out=FOLDER to keep what is done")
        unnamed = of_task.unnamed or of_algorithm.unnamed
        if unnamed and (recorded / "sweep.json").exists():
            raise InputError(f"{recorded} holds a sweep, and no file describes what this one runs: choose another folder")
        folder = SweepFolder.create(recorded, described, metric=how.metric)
        return _stoppable(folder, f"what is done is in {recorded}" if unnamed else continue_with(recorded))


def continued(folder: SweepFolder, said: Mapping[str, bool]) -> SweepResult:
    """Run what is missing in a sweep, given what the user says about its code."""
    with naming(folder.path):
        folder.confirm_code(**said)
    if note := folder.note_on_versions():
        warn(note)
    return _stoppable(folder, continue_with(folder.path))


def execute(folder: SweepFolder, console: Console, stop: StopRequest) -> None:
    """Run what is missing in a sweep, with its progress shown. Raises `Interrupted`."""
    swept, begun = folder.sweep, len(folder.results())
    algorithm, budget = label(swept.algorithm), swept.options.rounds
    with counted(console, algorithm, "run", len(swept.cells()) * swept.seeds) as show:
        first = Pace(console, f"the first runs of {algorithm}", budget or 0)

        def observe(done: int, together: int, rounds: int) -> None:
            show(done + (together * rounds / budget if budget else 0), f"round {rounds}" if rounds else "")
            if rounds and done == begun:
                first.note(rounds)
            stop.check()

        folder.execute(observe)


def _stoppable(folder: SweepFolder, then: str) -> SweepResult:
    with interruptible(then) as (console, stop):
        execute(folder, console, stop)
    return concluded(folder)


def _tried(grid: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    require(isinstance(grid, Mapping), "grid", "a dictionary of values to try by name", grid)
    for name, values in grid.items():
        listed = isinstance(values, Iterable) and not isinstance(values, str | bytes)
        require(isinstance(name, str) and listed, f"grid: {name}", "a list of values to try", values)
    return {name: [as_python(value) for value in grid[name]] for name in grid}
