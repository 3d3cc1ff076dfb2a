"""A run of `solve` in a folder, as the command makes them: with progress, checkpoints, and what it takes to resume it.

A folder describes what to run by names. A problem that no name describes, such as losses written in a notebook, is stored under
a name in angle brackets: its numbers, x and y are kept, and it cannot be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.problem import LOSSES
from fedbilevel.errors import warn
from fedbilevel.library.solution import Solution
from fedbilevel.own_code import executed_hashes, is_ours, is_unnamed
from fedbilevel.runs import progress
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import Experiment, Snapshot
from fedbilevel.runs.folder import Beginning, RunFolder
from fedbilevel.runs.stopping import Interrupted, StopRequest, stop_request


def recorded(experiment: Experiment, out: Path, described: bool, observe: Callable[[Snapshot], None] | None) -> Solution:
    """Run the experiment in a new folder; `described` says whether its options say who takes part.

    A signal stops it after a checkpoint, and then acts as it would have.
    """
    configuration = _configuration(experiment, described)
    declared = experiment.task.declared
    headline = declared.settings.headline if declared else LOSSES[0]
    code = executed_hashes(() if is_unnamed(configuration.task) else configuration.names())
    beginning = Beginning.now(configuration, code, headline, list(experiment.algorithm.diagnostics()))
    folder, last = RunFolder(out).begin(beginning), list[Snapshot]()
    console = Console(stderr=True, highlight=False, markup=False)

    def note(moment: Snapshot) -> None:
        last[:] = [moment]
        show(moment)
        if observe:
            observe(moment)

    try:
        with _stop_request() as stop, progress.shown(console, configuration, headline) as show:
            folder.execute(stop, note, experiment=experiment)
    except Interrupted as interrupted:
        then = f"what is done is in {out}" if is_unnamed(configuration.task) else f"continue with: fedbilevel resume {out}"
        console.print(f"stopped; {then}", soft_wrap=True)
        signal.raise_signal(interrupted.signum)
    ended = folder.result
    for line in ended.get("warnings", []) if ended else ():
        warn(line)
    return Solution(**experiment.point(last[0]), history=folder.rows(), preprocessing=experiment.task.preprocessing)


def _stop_request() -> contextlib.AbstractContextManager[StopRequest]:
    """Signals are for the main thread alone."""
    main = threading.current_thread() is threading.main_thread()
    return stop_request() if main else contextlib.nullcontext(StopRequest())


def _configuration(experiment: Experiment, described: bool) -> Configuration:
    algorithm, task, declared = experiment.algorithm, "<solve>", experiment.task.declared
    of_algorithm = _name_of_algorithm(algorithm)
    if declared and described and not is_unnamed(of_algorithm):
        task = _name_in_file(type(declared.settings))
    return Configuration(
        task,
        _plain(declared.settings) if declared else {},
        of_algorithm,
        _plain(algorithm),
        experiment.options,
        declared.data if declared else "",
        precision=jax.numpy.zeros(()).dtype.name,
    )


def _plain(settings: Any) -> dict[str, Any]:
    return {name: getattr(value, "tolist", lambda value=value: value)() for name, value in dataclasses.asdict(settings).items()}


def _name_of_algorithm(algorithm: Algorithm) -> str:
    cls = type(algorithm)
    if not is_ours(cls):
        return _name_in_file(cls)
    for name, entry in ALGORITHMS.bundled.items():
        if entry.load() is cls and all(getattr(algorithm, setting) == value for setting, value in entry.preset.items()):
            return name
    return f"<{cls.__name__}>"


def _name_in_file(cls: type) -> str:
    """The class as a file offers it, or its name in angle brackets if none does."""
    module = sys.modules.get(cls.__module__)
    file = Path(getattr(module, "__file__", None) or "")
    if file.suffix == ".py" and file.is_file() and getattr(module, cls.__name__, None) is cls:
        return f"{file.resolve()}:{cls.__name__}"
    return f"<{cls.__name__}>"
