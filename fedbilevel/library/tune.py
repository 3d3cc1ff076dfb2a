"""The command `tune` as a call: successive halving over boxes of hyperparameters."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.errors import FolderTaken, InputError, require, warn
from fedbilevel.library.interruptible import continue_with, interruptible
from fedbilevel.library.parts import Part, algorithm_part, given_knobs, known, task_part
from fedbilevel.library.paths import path_of
from fedbilevel.library.tune_result import TuneResult, concluded
from fedbilevel.own_code import label
from fedbilevel.registry import for_each
from fedbilevel.runs.files import require_place
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.progress import moving
from fedbilevel.runs.stopping import StopRequest
from fedbilevel.runs.tuning.folder import BEST, TuningFolder
from fedbilevel.runs.tuning.tuning import Tuning
from fedbilevel.runs.workers import Workers, require_workers, workers
from fedbilevel.tasks.base import Task
from fedbilevel.user_files import naming


def tune(
    task: str | type | Task,
    algorithms: str | Algorithm | Sequence[str | Algorithm],
    *,
    boxes: Mapping[str, Sequence[float]] | None = None,
    rounds: int = 1000,
    candidates: int = 64,
    rungs: int = 3,
    keep: int = 4,
    passes: int = 2,
    seconds: float | None = None,
    seeds: int = 3,
    by: str = "",
    clients_per_round: int | None = None,
    bernoulli: float | None = None,
    dropout: float | None = None,
    weights: str | None = None,
    every: int | None = None,
    loss_bound: float = 1e6,
    knobs: Mapping[str, Any] | None = None,
    data: str | Path = "",
    processes: int = 1,
    ray: str = "",
    out: str | Path | None = None,
) -> TuneResult:
    """Find good hyperparameters of algorithms by successive halving, each with the same budget.

    All candidates of a rung run together as one program. The best one in `keep` go on from where they are to `keep` times the
    rounds, up to `rounds` on the last rung, where each runs with several seeds. Further passes search around the best, and
    beyond the boxes if it is near their ends.

    Args:
        task: a name as in the command (one of the package's, or `FILE.py`), a function or class declared by `@fedbilevel.task`,
            or a `Task`.
        algorithms: one or several, each a name in `fedbilevel.ALGORITHMS` or an instance, whose values are then the centers of
            the boxes.
        boxes: for hyperparameters, the lowest and the highest value to search, as in `{"gamma_x": (1e-3, 1)}`, or in
            `{"simfbo.gamma_x": (1e-3, 1)}` for one of several algorithms. Unless given, steps are searched over four powers of
            ten around the values that they have without tuning; `fedbilevel show` says which fields are tuned.
        rounds: how many rounds the runs on the last rung have.
        candidates: how many begin a pass.
        rungs, keep: how often candidates are thinned out, and to one in how many.
        passes: how many passes there are.
        seconds: a budget in seconds of computing, without compiling, instead of a number of passes.
        seeds: how many runs each candidate on the last rung has.
        by: the metric to rank by. Unless given, it is the task's own on validation rows, one in five of each client's upper
            rows, which are then held out of the losses; or the upper loss, where a task has no rows to hold out.
        clients_per_round, bernoulli, dropout, weights, loss_bound: as in `sweep`.
        every: rounds between two rows of a run's numbers; there is always one at the end of a rung.
        knobs: knobs of the task, where it is a name or a declaration; a `Task` has its own.
        data: the folder of its data, likewise.
        processes: how many processes on this machine share the work.
        ray: the address of a Ray cluster that shares the work, such as "auto".
        out: a folder for the tuning, with a table, pictures and the best settings. Ctrl-C leaves what is done, and `resume`,
            or the same call again, makes the rest.

    Raises:
        InputError: something given cannot be used.
    """
    alone = isinstance(algorithms, str | Algorithm)
    require(alone or isinstance(algorithms, Iterable), "algorithms", "a name, an algorithm, or a list of these", algorithms)
    several: list[str | Algorithm] = [algorithms] if isinstance(algorithms, str | Algorithm) else list(algorithms)
    require(bool(several), "algorithms", "at least one algorithm", algorithms)
    require(isinstance(by, str), "by", "the name of a metric", by)
    require_workers(processes, ray)
    recorded = None if out is None else path_of("out", out)
    require(isinstance(boxes, Mapping | None), "boxes", "a dictionary of pairs (low, high) by name", boxes)
    of_task, parts = task_part(task, given_knobs(knobs), data), [algorithm_part(one) for one in several]
    options = RunOptions(
        rounds=rounds,
        clients_per_round=clients_per_round,
        bernoulli=bernoulli,
        dropout=dropout,
        weights=weights,
        every=(rounds or 1) if every is None else every,
        loss_bound=loss_bound,
    )
    budget: dict[str, Any] = dict(candidates=candidates, rungs=rungs, keep=keep, passes=passes, seconds=seconds, seeds=seeds)
    with contextlib.ExitStack() as kept:
        kept.enter_context(known([(of_task, "task"), *((part, "algorithm") for part in parts)]))
        unnamed = any(part.unnamed for part in (of_task, *parts))
        if unnamed and (processes != 1 or ray):
            raise InputError("no file describes what this runs, so other processes cannot run it: declare it in a file")
        given = for_each(ALGORITHMS, [part.name for part in parts], boxes or {}, "boxes")
        wanted, _ = prepared(of_task, {part.name: part.settings for part in parts}, given, options, by=by, **budget)
        if recorded is None:
            place, then = Path(kept.enter_context(tempfile.TemporaryDirectory())), "give out=FOLDER to keep what is done"
        else:
            place, then = recorded, f"what is done is in {out}" if unnamed else continue_with(recorded)
        if unnamed and TuningFolder.find(place):
            raise InputError(f"{out} holds a tuning, and no file describes what this one runs: choose another folder")
        return _stoppable(place, create(place, wanted), then, processes, ray)


def prepared(
    task: Part,
    algorithms: Mapping[str, Mapping[str, Any]],
    boxes: Mapping[str, Mapping[str, Sequence[Any]]],
    options: RunOptions,
    *,
    fixed: Mapping[str, Mapping[str, Any]] | None = None,
    **how: Any,
) -> tuple[list[Tuning], str]:
    """The tunings of algorithms, given with their hyperparameters, of which some are fixed; and what ranks candidates."""
    tunings, why = list[Tuning](), ""
    for name, values in algorithms.items():
        held = (fixed or {}).get(name, {})
        tuning, ranking = Tuning.prepared(
            task.name, task.settings, name, {**values, **held}, boxes[name], options, fixed=held, data=task.data, **how
        )
        tunings.append(tuning)
        why = ranking.why
    return tunings, why


def create(place: Path, tunings: Sequence[Tuning], force: bool = False) -> list[TuningFolder]:
    """A folder for each tuning, named after its algorithm, beside those of other algorithms on the same problem."""
    require_place(place, "config.json", "*/config.json", "sweep.json", TuningFolder.FILE)
    paths = [place / label(tuning.algorithm) for tuning in tunings]
    for folder in TuningFolder.find(place):
        if folder.path not in paths and folder.described.problem() != tunings[0].problem():
            raise FolderTaken(f"{folder.path} holds a tuning of another task or other knobs: choose another folder")
    folders = [TuningFolder.create(path, tuning, force) for path, tuning in zip(paths, tunings, strict=True)]
    (place / BEST).unlink(missing_ok=True)
    return folders


def continued(place: Path, said: Mapping[str, bool]) -> TuneResult:
    """Run what is missing in tunings, given what the user says about their code."""
    folders = TuningFolder.find(place)
    for folder in folders:
        with naming(folder.path):
            folder.confirm_code(**said)
        if note := folder.note_on_versions():
            warn(note)
    return _stoppable(place, folders, continue_with(place))


def execute(folders: Sequence[TuningFolder], workers: Workers, console: Console, stop: StopRequest) -> None:
    """Run what is missing in tunings, with their progress shown. Raises `Interrupted`."""
    for folder in folders:
        with moving(console, label(folder.described.algorithm), "round") as show:

            def observe(done: int, of: int, word: str, show: Callable[[int, int, str], None] = show) -> None:
                show(done, of, word)
                stop.check()

            folder.execute(workers, observe)


def _stoppable(place: Path, folders: Sequence[TuningFolder], then: str, processes: int = 1, ray: str = "") -> TuneResult:
    with interruptible(then) as (console, stop), workers(processes, ray) as spread:
        execute(folders, spread, console, stop)
    return concluded(place, folders)
