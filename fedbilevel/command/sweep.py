"""The command `fedbilevel sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.command.options import (
    Aggregate,
    AggregateSettings,
    Attackers,
    ByChance,
    ClientsPerRound,
    Data,
    Delta,
    Dropout,
    Epsilon,
    Every,
    Force,
    Knobs,
    Look,
    LossBound,
    Out,
    PrivacySettings,
    RankBy,
    Rounds,
    Settings,
    SettingsFile,
    Steps,
    TaskName,
    Weights,
    aggregation,
    assignments,
    budget,
    by_algorithm,
    completing,
    console,
    fail,
    new_folder,
    option,
    privacy,
    say,
    say_note,
    say_table,
    whole,
)
from fedbilevel.errors import InputError
from fedbilevel.report.styles import Style, find_style
from fedbilevel.tasks.data.datasets import data_folder
from fedbilevel.user_files import naming

if TYPE_CHECKING:
    from fedbilevel.runs.sweeps.folder import SweepFolder


def sweep(
    task: TaskName,
    algorithm: Annotated[
        str,
        typer.Argument(
            help="The algorithm to tune: a name, or your own FILE.py or FILE.py:NAME.", autocompletion=completing(ALGORITHMS)
        ),
    ],
    grid: Annotated[
        list[str],
        typer.Option(
            "--grid",
            help="Hyperparameter, or knob of the task, and its values, NAME=V1,V2,...; may be repeated. "
            "NAME1+NAME2=... sets both.",
        ),
    ],
    seeds: Annotated[int, option(whole, "Runs of every cell, each with its own seed.")] = 3,
    by: RankBy = "",
    rounds: Rounds = None,
    steps: Steps = None,
    clients_per_round: ClientsPerRound = None,
    bernoulli: ByChance = None,
    dropout: Dropout = None,
    weights: Weights = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Hyperparameter of all cells, NAME=VALUE.")] = None,
    knob: Knobs = None,
    settings: SettingsFile = None,
    every: Every = 100,
    loss_bound: LossBound = 1e6,
    aggregate: Aggregate = "mean",
    set_aggregate: AggregateSettings = None,
    attack: Attackers = "",
    epsilon: Epsilon = None,
    delta: Delta = None,
    set_privacy: PrivacySettings = None,
    data: Data = "",
    style: Look = "screen",
    out: Out = None,
    force: Force = False,
) -> None:
    """Run a grid of hyperparameters with several seeds each, and find the best; small runs share one program."""
    look = find_style(style)
    from fedbilevel.registry import chosen
    from fedbilevel.runs.options import RunOptions
    from fedbilevel.runs.sweeps.folder import SweepFolder
    from fedbilevel.runs.sweeps.sweep import Sweep, untied
    from fedbilevel.tasks import TASKS

    task, algorithm = chosen(TASKS, task), chosen(ALGORITHMS, algorithm)
    options = RunOptions(
        **budget(rounds, steps),
        clients_per_round=clients_per_round,
        bernoulli=bernoulli,
        dropout=dropout,
        weights=weights,
        every=every,
        loss_bound=loss_bound,
        aggregate=aggregation(aggregate, set_aggregate),
        attack=attack,
        privacy=privacy(epsilon, delta, set_privacy),
    )
    file, given = Settings.read(settings, task), by_algorithm([algorithm], set_)[algorithm]
    cells = {name: values.split(",") for name, values in assignments("--grid", grid).items()}
    for name in untied(cells):
        if name in given:
            raise InputError(f"{name} is in --grid and in --set: leave one out")
    described = Sweep(
        task,
        {**file.knobs, **assignments("--knob", knob)},
        algorithm,
        {**file.of(algorithm), **given},
        cells,
        seeds,
        options,
        data_folder(data),
    )
    described, how = described.judged(by)
    folder = SweepFolder.create(out or new_folder("sweep", task, algorithm), described, force, how.metric)
    file.say_if_unused(settings, [algorithm])
    say_note(how.why)
    _execute(folder, look)


def continue_sweep(directory: Path, style: Style, said: Mapping[str, bool]) -> None:
    """Run what is missing in a sweep, given what the user says about its code."""
    from fedbilevel.runs.sweeps.folder import SweepFolder

    folder = SweepFolder(directory)
    with naming(directory):
        folder.confirm_code(**said)
    _execute(folder, style)


def _execute(folder: SweepFolder, style: Style) -> None:
    from fedbilevel.library.sweep import execute
    from fedbilevel.library.sweep_result import best_cells, concluded, pictures
    from fedbilevel.report.command_line import best_command
    from fedbilevel.runs.stopping import Interrupted, resume_command, stop_request

    say_note(folder.note_on_versions())
    try:
        with stop_request() as stop:
            execute(folder, console, stop)
    except Interrupted as interrupted:
        fail(f"stopped; continue with: {resume_command(folder.path)}", 128 + interrupted.signum)
    result = concluded(folder, style)
    lines = best_cells(result)
    console.print()
    say_table(lines)
    if len(lines) - 1 < len(result.cells):
        console.print(f"... and {len(result.cells) - len(lines) + 1} more in cells.csv")
    say(f"\nsweep: {folder.path}\npictures: {', '.join(map(str, pictures(folder.path)))}")
    if (folder.path / "best.toml").exists():
        swept = result.swept
        say(f"best: {best_command(swept, [swept.algorithm], folder.path / 'best.toml')}")
