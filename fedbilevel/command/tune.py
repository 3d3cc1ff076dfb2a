"""The command `fedbilevel tune`."""

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
    Force,
    Knobs,
    Look,
    LossBound,
    Out,
    PrivacySettings,
    RankBy,
    Settings,
    SettingsFile,
    TaskName,
    Weights,
    aggregation,
    assignments,
    by_algorithm,
    completing,
    console,
    fail,
    new_folder,
    number,
    option,
    privacy,
    say,
    say_note,
    say_table,
    whole,
)
from fedbilevel.report.styles import Style, find_style
from fedbilevel.tasks.data.datasets import data_folder
from fedbilevel.user_files import naming

if TYPE_CHECKING:
    from fedbilevel.runs.tuning.folder import TuningFolder

SHOWN = 4  # candidates in a table for reading


def tune(
    task: TaskName,
    algorithms: Annotated[
        list[str],
        typer.Argument(
            help="Algorithms to tune, each with the same budget: names, or your own FILE.py or FILE.py:NAME.",
            autocompletion=completing(ALGORITHMS),
            metavar="ALGORITHM...",
        ),
    ],
    box: Annotated[
        list[str] | None,
        typer.Option("--box", help="Range of a hyperparameter, NAME=LOW:HIGH, or ALGORITHM.NAME=LOW:HIGH; may be repeated."),
    ] = None,
    rounds: Annotated[int, option(whole, "Communication rounds of the runs on the last rung.")] = 1000,
    candidates: Annotated[int, option(whole, "Candidates that begin a pass.")] = 64,
    rungs: Annotated[int, option(whole, "How many rungs a pass has.")] = 3,
    keep: Annotated[int, option(whole, "After a rung, the best one in N go on, to N times the rounds.")] = 4,
    passes: Annotated[int, option(whole, "How many passes; each after the first searches around the best so far.")] = 2,
    seconds: Annotated[
        float | None, option(number, "Budget in seconds of computing, without compiling, instead of --passes.")
    ] = None,
    seeds: Annotated[int, option(whole, "Runs of each candidate on the last rung, each with its own seed.")] = 3,
    by: RankBy = "",
    clients_per_round: ClientsPerRound = None,
    bernoulli: ByChance = None,
    dropout: Dropout = None,
    weights: Weights = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Hyperparameter that is not tuned, NAME=VALUE, or ALGORITHM.NAME=VALUE for one of several."),
    ] = None,
    knob: Knobs = None,
    settings: SettingsFile = None,
    every: Annotated[
        int | None, option(whole, "Rounds between two evaluations of the metrics, besides that at the end of a rung.")
    ] = None,
    loss_bound: LossBound = 1e6,
    aggregate: Aggregate = "mean",
    set_aggregate: AggregateSettings = None,
    attack: Attackers = "",
    epsilon: Epsilon = None,
    delta: Delta = None,
    set_privacy: PrivacySettings = None,
    data: Data = "",
    processes: Annotated[int, option(whole, "Processes on this machine that share the work, and its GPUs.")] = 1,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster that shares the work, such as auto.")] = "",
    style: Look = "screen",
    out: Out = None,
    force: Force = False,
) -> None:
    """Find good hyperparameters by successive halving: many candidates for few rounds, and the best for more."""
    look = find_style(style)
    from fedbilevel.library.parts import Part
    from fedbilevel.library.tune import create, prepared
    from fedbilevel.registry import chosen
    from fedbilevel.runs.options import RunOptions
    from fedbilevel.runs.workers import require_workers
    from fedbilevel.tasks import TASKS

    require_workers(processes, ray)
    task, names = chosen(TASKS, task), [chosen(ALGORITHMS, name) for name in algorithms]
    options = RunOptions(
        rounds=rounds,
        clients_per_round=clients_per_round,
        bernoulli=bernoulli,
        dropout=dropout,
        weights=weights,
        every=rounds if every is None else every,
        loss_bound=loss_bound,
        aggregate=aggregation(aggregate, set_aggregate),
        attack=attack,
        privacy=privacy(epsilon, delta, set_privacy),
    )
    file = Settings.read(settings, task)
    part = Part(task, {**file.knobs, **assignments("--knob", knob)}, data=data_folder(data))
    ends = {name: {n: ends.split(":") for n, ends in of.items()} for name, of in by_algorithm(names, box, "--box").items()}
    tunings, why = prepared(
        part,
        {name: file.of(name) for name in names},
        ends,
        options,
        fixed=by_algorithm(names, set_),
        by=by,
        candidates=candidates,
        rungs=rungs,
        keep=keep,
        passes=passes,
        seconds=seconds,
        seeds=seeds,
    )
    place = out or new_folder("tune", task, *names)
    folders = create(place, tunings, force)
    file.say_if_unused(settings, names)
    say_note(why)
    _execute(place, folders, look, processes, ray)


def continue_tuning(directory: Path, style: Style, said: Mapping[str, bool]) -> None:
    """Run what is missing in tunings, given what the user says about their code."""
    from fedbilevel.runs.tuning.folder import TuningFolder

    folders = TuningFolder.find(directory)
    for folder in folders:
        with naming(folder.path):
            folder.confirm_code(**said)
    _execute(directory, folders, style)


def _execute(directory: Path, folders: list[TuningFolder], style: Style, processes: int = 1, ray: str = "") -> None:
    from fedbilevel.library.tune import execute
    from fedbilevel.library.tune_result import concluded, finalists, pictures
    from fedbilevel.report.command_line import best_command
    from fedbilevel.runs.stopping import Interrupted, resume_command, stop_request
    from fedbilevel.runs.tuning.folder import BEST
    from fedbilevel.runs.workers import workers

    for folder in folders:
        say_note(folder.note_on_versions())
    try:
        with stop_request() as stop, workers(processes, ray) as spread:
            execute(folders, spread, console, stop)
    except Interrupted as interrupted:
        fail(f"stopped; continue with: {resume_command(directory)}", 128 + interrupted.signum)
    result = concluded(directory, folders, style)
    for folder, found in zip(folders, result.tuned, strict=True):
        say(f"\n{found.summary()}")
        say_table(finalists(found, SHOWN))
        if edges := found.edges():
            say_note(f"{', '.join(edges)}: the best value is at an end of what was searched: give more --passes, or a --box")
        say(f"tuning: {folder.path}\npictures: {', '.join(map(str, pictures(folder.path)))}")
    if names := [found.tuning.algorithm for found in result.tuned if found.best()]:
        say(f"\nbest: {best_command(folders[0].described, names, directory / BEST)}")
