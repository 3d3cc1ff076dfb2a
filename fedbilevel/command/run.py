"""The commands `fedbilevel run`, `demo` and `resume`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedbilevel.aggregations import AGGREGATIONS
from fedbilevel.algorithms import ALGORITHMS, DEFAULTS
from fedbilevel.command.options import (
    Aggregate,
    AggregateSettings,
    Arrivals,
    Attackers,
    ByChance,
    ChunkSize,
    ClientsPerRound,
    Data,
    Delta,
    Dropout,
    Epsilon,
    Every,
    Force,
    KeepBest,
    Knobs,
    Look,
    LossBound,
    Out,
    PrivacySettings,
    Products,
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
    number,
    option,
    privacy,
    say,
    say_note,
    whole,
)
from fedbilevel.command.sweep import continue_sweep
from fedbilevel.command.tune import continue_tuning
from fedbilevel.errors import Diverged, InputError
from fedbilevel.own_code import label
from fedbilevel.registry import chosen, find
from fedbilevel.report.styles import SCREEN, Style, find_style
from fedbilevel.settings import settings as settings_of
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.data.datasets import data_folder
from fedbilevel.user_files import naming

if TYPE_CHECKING:
    from fedbilevel.runs.configuration import Configuration
    from fedbilevel.runs.experiment import Snapshot
    from fedbilevel.runs.folder import RunFolder
    from fedbilevel.runs.stopping import StopRequest
    from fedbilevel.tasks.client_data import ClientData

LONGEST_ROUND = 24 * 3600  # seconds


def run(
    task: TaskName,
    algorithms: Annotated[
        list[str] | None,
        typer.Argument(
            help="Algorithms to run and compare: names, or your own FILE.py or FILE.py:NAME. "
            "Unless given, the variant of fedpace for the task, which needs no tuning.",
            autocompletion=completing(ALGORITHMS),
            metavar="[ALGORITHM]...",
        ),
    ] = None,
    rounds: Rounds = None,
    steps: Steps = None,
    clients_per_round: ClientsPerRound = None,
    bernoulli: ByChance = None,
    dropout: Dropout = None,
    weights: Weights = None,
    seed: Annotated[int, option(whole, "Random seed.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Hyperparameter NAME=VALUE, or ALGORITHM.NAME=VALUE for one of several.")
    ] = None,
    knob: Knobs = None,
    settings: SettingsFile = None,
    every: Every = 10,
    chunk_size: ChunkSize = None,
    products: Products = "default",
    loss_bound: LossBound = 1e6,
    aggregate: Aggregate = "mean",
    set_aggregate: AggregateSettings = None,
    attack: Attackers = "",
    epsilon: Epsilon = None,
    delta: Delta = None,
    set_privacy: PrivacySettings = None,
    arrivals: Arrivals = "",
    keep_best: KeepBest = None,
    data: Data = "",
    federation: Annotated[
        Path | None, typer.Option(help="Folder of a federation whose sites act as the clients.", metavar="DIR")
    ] = None,
    round_timeout: Annotated[
        float, option(number, "Seconds after which a federation continues without a site that has not answered.")
    ] = 300.0,
    style: Look = "screen",
    out: Out = None,
    force: Force = False,
) -> None:
    """Run algorithms on a task, each with the same budget, and compare them."""
    from fedbilevel.engines.arrivals import located
    from fedbilevel.runs.best_round import keeps_best
    from fedbilevel.runs.configuration import Configuration
    from fedbilevel.runs.options import RunOptions

    look = find_style(style)
    task, algorithms = chosen(TASKS, task), [chosen(ALGORITHMS, name) for name in algorithms or ()]
    options = RunOptions(
        **budget(rounds, steps),
        clients_per_round=clients_per_round,
        bernoulli=bernoulli,
        dropout=dropout,
        weights=weights,
        seed=seed,
        every=every,
        chunk_size=chunk_size,
        products=products,
        loss_bound=loss_bound,
        aggregate=aggregation(aggregate, set_aggregate),
        attack=attack,
        privacy=privacy(epsilon, delta, set_privacy),
        arrivals=located(arrivals),
        keep_best=bool(keep_best),
    )
    file = Settings.read(settings, task)
    knobs: dict[str, Any] = {**file.knobs, **assignments("--knob", knob)}
    place: dict[str, Any] = {"data": data_folder(data)}
    elsewhere = None
    if federation is not None:
        _require_bundled(options.rule())
        elsewhere, knobs = with_sites(federation, round_timeout, task, knobs, place["data"])
        place |= {"federation": str(federation.resolve()), "round_timeout": round_timeout}
    if not algorithms:
        built = Configuration.resolve(task, knobs, DEFAULTS["global"], {}, options, **place).built_task(elsewhere)
        algorithms = [built.default_algorithm]
        if keep_best is None and federation is None:
            judged = find(TASKS, "task", task).load()
            options = replace(options, keep_best=keeps_best(built, judged, options.aggregation(), bool(options.privacy)))
            if options.keep_best:
                say_note("x has many entries for f's rows: one row in five is held out to choose the round (--no-keep-best)")
    hyperparameters = {name: {**file.of(name), **given} for name, given in by_algorithm(algorithms, set_).items()}
    resolved = [Configuration.resolve(task, knobs, name, values, options, **place) for name, values in hyperparameters.items()]
    file.say_if_unused(settings, algorithms)
    start(resolved, out or new_folder(task), force, look, elsewhere)


def demo(out: Out = None, force: Force = False) -> None:
    """Clean noisy labels across ten clients with FedBiOAcc, and compare it with FedAvg on the same data."""
    console.print(
        "Ten clients hold handwritten digits. 40 % of their training labels were replaced by random ones, and each client's "
        "few clean samples are of one class only. With FedBiOAcc they learn together which samples to trust; "
        "FedAvg trusts them all.\n"
    )
    from fedbilevel.runs.configuration import Configuration
    from fedbilevel.runs.options import RunOptions

    options = RunOptions(rounds=1000, every=20)
    resolved = [Configuration.resolve("data-cleaning", {}, name, {}, options) for name in ("fedbioacc", "fedavg")]
    start(resolved, out or new_folder("demo"), force)


def resume(
    directory: Annotated[Path, typer.Argument(help="A run, a folder of runs, a sweep, or a tuning.")],
    style: Look = "screen",
    changed_code: Annotated[
        bool, typer.Option("--changed-code", help="Continue although your own file with the task or algorithm has changed.")
    ] = False,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Execute the file of a run that somebody else began, or that began elsewhere.")
    ] = False,
) -> None:
    """Continue runs, a sweep or a tuning that were stopped or killed."""
    look = find_style(style)
    said = {"changed": changed_code, "trusted": trust_code}
    if (directory / "sweep.json").exists():
        return continue_sweep(directory, look, said)
    if any(directory.glob("tuning.json")) or any(directory.glob("*/tuning.json")):
        return continue_tuning(directory, look, said)
    from fedbilevel.runs.folder import RunFolder
    from fedbilevel.runs.versions import changes_since, note_on_changes

    RunFolder.complete(directory)
    folders = RunFolder.find(directory)
    for folder in folders:
        if folder.result is None or any(said.values()):
            with naming(folder.path):
                folder.confirm_code(**said)
        if folder.result is None and (folder.path / "checkpoint").exists():
            say_note(note_on_changes(folder.path, changes_since(folder.versions, *folder.configuration.packages())))
    _execute(directory, folders, look)


def start(
    configurations: list[Configuration], out: Path, force: bool, style: Style = SCREEN, elsewhere: ClientData | None = None
) -> None:
    """Write the configurations of all runs, so that an interruption at any point can be resumed; then run them."""
    from fedbilevel.runs.files import require_place
    from fedbilevel.runs.folder import RunFolder

    require_place(out, "*/tuning.json")  # which `resume` would continue instead
    experiments = [configuration.experiment(elsewhere) for configuration in configurations]
    if not configurations[0].federation:
        experiments[0].require_finite_start()  # all are on one task
    folders = RunFolder.create({out / label(c.algorithm): c for c in configurations}, force)
    _execute(out, folders, style)


def _require_bundled(rule: str) -> None:
    if rule not in AGGREGATIONS.bundled:
        raise InputError(f"a federation runs only fedbilevel's own aggregations, and {label(rule)} is not one of them")


def with_sites(
    folder: Path, round_timeout: float, task: str, knobs: dict[str, Any], data: str
) -> tuple[ClientData, dict[str, Any]]:
    """The data and the knobs of a run on a federation, with a client for each site."""
    from fedbilevel.federation.nvflare_support import require_flare
    from fedbilevel.federation.provision import Federation
    from fedbilevel.tasks.client_data import ClientData

    require_flare()
    if not 0 < round_timeout <= LONGEST_ROUND:
        raise InputError(f"--round-timeout must be above 0 and at most {LONGEST_ROUND} seconds, a day; given: {round_timeout}")
    sites, known = Federation.read(folder).sites, settings_of(find(TASKS, "task", task).load())
    if "clients" in known and str(knobs.setdefault("clients", len(sites))) != str(len(sites)):
        raise InputError(
            f"the federation has {len(sites)} sites, but {label(task)} was given clients={knobs['clients']}: leave it out"
        )
    return ClientData(data, ((),) * len(sites)), knobs


def _executed(folder: RunFolder, stop: StopRequest, observe: Callable[[Snapshot], None]) -> None:
    """Run it here, or on its federation."""
    where = folder.configuration.federation
    if not where:
        folder.execute(stop, observe)
        return
    from fedbilevel.federation.provision import Federation
    from fedbilevel.federation.supervise import Supervisor

    Supervisor(Federation.read(Path(where)), say).run(folder, stop, observe)


def _execute(directory: Path, folders: list[RunFolder], style: Style = SCREEN) -> None:
    from fedbilevel.runs import progress
    from fedbilevel.runs.stopping import Interrupted, resume_command, stop_request

    diverged, configurations = [], [folder.configuration for folder in folders]  # all must be readable before any is run
    try:
        with stop_request() as stop:
            for folder, configuration in zip(folders, configurations, strict=True):
                ended = folder.result
                if ended is not None and ended["status"] == "diverged":
                    diverged.append(ended.get("reason", f"{folder.path} diverged"))
                try:
                    with progress.shown(console, configuration, folder.headline) as observe:
                        _executed(folder, stop, observe)
                except Diverged as error:
                    diverged.append(str(error))
                stop.check()
    except Interrupted as interrupted:
        fail(f"stopped; continue with: {resume_command(directory)}", 128 + interrupted.signum)
    except OSError as error:
        _fail_resumably(directory, error)
    try:
        _conclude(directory, folders, style)
    except OSError as error:
        _fail_resumably(directory, error)
    if diverged:
        raise Diverged("\n".join(diverged))


def _fail_resumably(directory: Path, error: OSError) -> NoReturn:
    from fedbilevel.runs.stopping import resume_command

    problem = f"{error.filename or directory}: {error.strerror or error}"
    fail(f"{problem}; fix that, then continue with: {resume_command(directory)}", 1)


def _conclude(directory: Path, folders: list[RunFolder], style: Style) -> None:
    """Draw and print what runs that have ended have come to."""
    from fedbilevel.report.cleaned import written_lists
    from fedbilevel.report.curve_picture import draw
    from fedbilevel.report.curves import curves as read
    from fedbilevel.report.table import table

    ends = {folder.path.name: ended for folder in folders if (ended := folder.result)}
    curves = read([folder for folder in folders if folder.rows()])
    if curves:
        pictures = draw(curves, directory / "curves.png", style)
        console.print()
        console.print(table(curves))
        for caveat in dict.fromkeys(c for ended in ends.values() for c in ended.get("caveats", [])):
            say(f"note: {caveat}")
        for name, ended in ends.items():
            for line in ended.get("warnings", []):
                say(f"warning: {name}: {line}")
        say(f"\nruns: {directory}\ncurves: {', '.join(map(str, pictures))}")
    if lists := [line for folder in folders for line in written_lists(folder)]:
        say("\n" + "\n".join(lists))
