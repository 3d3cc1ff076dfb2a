"""A run of `solve` in a folder, as the command makes them: with progress, checkpoints, and what it takes to resume it.

A folder describes what to run by names. A problem that no name describes, such as losses written in a notebook, is stored under
a name in angle brackets: its numbers, x and y are kept, and it cannot be resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.problem import LOSSES
from fedbilevel.errors import warn
from fedbilevel.library.interruptible import continue_with, interruptible
from fedbilevel.library.names import name_of, plain
from fedbilevel.library.solution import Solution
from fedbilevel.own_code import executed_hashes, is_unnamed
from fedbilevel.runs import progress
from fedbilevel.runs.best_round import EndPoint
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import Experiment, Snapshot
from fedbilevel.runs.folder import Beginning, RunFolder
from fedbilevel.tasks import TASKS


def recorded(experiment: Experiment, out: Path, described: bool, observe: Callable[[Snapshot], None] | None) -> Solution:
    """Run the experiment in a new folder; `described` says whether its options say who takes part.

    A signal stops it after a checkpoint, and then acts as it would have.
    """
    configuration = _configuration(experiment, described)
    declared = experiment.task.declared
    headline = declared.settings.headline if declared else LOSSES[0]
    code = {}
    if declared and not is_unnamed(configuration.task):
        parts = declared.settings, experiment.algorithm, experiment.options.aggregation()
        code = executed_hashes(dict(zip(configuration.names(), map(type, parts), strict=True)))
    beginning = Beginning.now(configuration, code, headline, list(experiment.algorithm.diagnostics()))
    folder, end = RunFolder(out).begin(beginning), EndPoint(experiment)

    def note(moment: Snapshot) -> None:
        end.note(moment)
        if observe:
            observe(moment)

    execute(folder, note, experiment)
    return Solution(**end.trees(), history=folder.rows(), preprocessing=experiment.task.preprocessing, best_round=end.round)


def execute(
    folder: RunFolder, observe: Callable[[Snapshot], None] = lambda moment: None, experiment: Experiment | None = None
) -> None:
    """Run to its end what a folder describes, with its progress shown; the experiment is the configuration's unless given.

    A signal stops it after a checkpoint, and then acts as it would have.
    """
    configuration = folder.configuration
    then = f"what is done is in {folder.path}" if is_unnamed(configuration.task) else continue_with(folder.path)
    with interruptible(then) as (console, stop), progress.shown(console, configuration, folder.headline) as show:

        def note(moment: Snapshot) -> None:
            show(moment)
            observe(moment)

        folder.execute(stop, note, experiment=experiment)
    ended = folder.result
    for line in ended.get("warnings", []) if ended else ():
        warn(line)


def _configuration(experiment: Experiment, described: bool) -> Configuration:
    algorithm, task, declared = experiment.algorithm, "<solve>", experiment.task.declared
    of_algorithm = name_of(ALGORITHMS, algorithm)
    if declared and declared.data is not None and described and not is_unnamed(of_algorithm):
        task = name_of(TASKS, declared.settings)
    return Configuration(
        task,
        plain(declared.settings) if declared else {},
        of_algorithm,
        plain(algorithm),
        experiment.options,
        (declared.data if declared else None) or "",
        precision=jax.numpy.zeros(()).dtype.name,
    )
