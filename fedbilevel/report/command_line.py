"""The commands that repeat runs and sweeps, found from what their folders describe."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import InputError
from fedbilevel.own_code import is_unnamed, label
from fedbilevel.registry import find
from fedbilevel.runs.configuration import ROUND_TIMEOUT, Configuration
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps.sweep import Sweep
from fedbilevel.runs.tuning.tuning import Tuning
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.base import suited_to


def run_commands(configurations: Sequence[Configuration]) -> list[str]:
    """The commands that repeat these runs; runs that differ only in their algorithm share one.

    Runs of what was made in Python, or of code that may not be executed here, have none.
    """
    together: list[list[Configuration]] = []
    for one in configurations:
        places = [c for c in together if _beside(c[0]) == _beside(one) and one.algorithm not in [o.algorithm for o in c]]
        if places:
            places[0].append(one)
        else:
            together.append([one])
    return [command for command in map(_run, together) if command]


def sweep_command(sweep: Sweep, metric: str) -> str:
    """The command that repeats a sweep and ranks it so; empty if there is none, as for one with other seeds than the first."""
    if is_unnamed(sweep.task) or is_unnamed(sweep.algorithm) or sweep.first_seed:
        return ""
    try:
        usual = {**_usual(sweep.task), "every": None}  # the command `sweep` has another default
    except InputError:
        return ""
    grid = {name: ",".join(_text(value) for value in values) for name, values in sweep.grid.items()}
    return shlex.join(
        [
            *("fedbilevel", "sweep", sweep.task, sweep.algorithm),
            *_repeated("--grid", grid),
            *("--seeds", str(sweep.seeds), "--by", metric),
            *_options(sweep.options, usual, ("seed", "chunk_size", "products", "validation")),
            *_repeated("--knob", sweep.knobs),
            *_repeated("--set", sweep.hyperparameters),
            *(("--data", sweep.data) if sweep.data else ()),
        ]
    )


def best_command(searched: Sweep | Tuning, algorithms: Sequence[str], settings: Path) -> str:
    """The command that runs algorithms with settings that a search has found, under the same conditions but for its length."""
    chosen = ("rounds", "steps", "every", "seed", "validation")
    words = [
        *("fedbilevel", "run", searched.task, *algorithms, "--settings", str(settings)),
        *_options(searched.options, _usual(searched.task), chosen),
        *(("--data", searched.data) if searched.data else ()),
    ]
    return shlex.join(words)


def _beside(configuration: Configuration) -> str:
    """A run's description but for its algorithm."""
    return json.dumps({**configuration.plain(), "algorithm": "", "hyperparameters": {}}, sort_keys=True)


def _run(runs: Sequence[Configuration]) -> str:
    first = runs[0]
    if is_unnamed(first.task) or any(is_unnamed(one.algorithm) for one in runs):
        return ""
    try:
        task = find(TASKS, "task", first.task)
        knobs = _changed(first.knobs, dataclasses.asdict(task.configure(label(first.task), {})))
        hyperparameters: dict[str, Any] = {}
        for one in runs:
            owner = f"{label(one.algorithm)}." if len(runs) > 1 else ""
            hyperparameters |= {owner + name: value for name, value in _set(one).items()}
        usual = _usual(first.task)
    except InputError:
        return ""
    words = [
        *("fedbilevel", "run", first.task, *(one.algorithm for one in runs)),
        *_options(first.options, usual),
        *_repeated("--knob", knobs),
        *_repeated("--set", hyperparameters),
        *(("--data", first.data) if first.data else ()),
        *(("--federation", first.federation) if first.federation else ()),
        *(("--round-timeout", str(first.round_timeout)) if first.round_timeout != ROUND_TIMEOUT else ()),
    ]
    return ("JAX_ENABLE_X64=1 " if first.precision == "float64" else "") + shlex.join(words)


def _set(one: Configuration) -> dict[str, Any]:
    """The hyperparameters that differ from those that the task suggests for the algorithm."""
    suited = suited_to(one.task_class().suited, label(one.task), label(one.algorithm))
    usual = find(ALGORITHMS, "algorithm", one.algorithm).configure(label(one.algorithm), suited.values)
    return _changed(one.hyperparameters, dataclasses.asdict(usual))


def _usual(task: str) -> dict[str, Any]:
    """The options of a run of this task for which nothing but its length is given."""
    options = RunOptions(rounds=1).otherwise(find(TASKS, "task", task).run)
    return {**dataclasses.asdict(options), "rounds": None}


def _options(options: RunOptions, usual: Mapping[str, Any], without: Sequence[str] = ("validation",)) -> list[str]:
    changed = {n: v for n, v in _changed(vars(options), usual).items() if n not in (*without, "privacy")}
    words = list[str]()
    for name, value in changed.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [_text(value)])]
    private = options.row_privacy()
    return [*words, *_repeated("--set-privacy", private.values() if private else {})]


def _changed(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != usual.get(name)}


def _repeated(option: str, values: Mapping[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in (option, f"{name}={_text(value)}")]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
