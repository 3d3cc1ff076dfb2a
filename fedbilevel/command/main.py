"""The command. Heavy imports wait until a command needs them, so that `--help` and `list` answer at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.exceptions import TyperException

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.command import compilation, data
from fedbilevel.command import report as report_commands
from fedbilevel.command.explain import Explained, explained
from fedbilevel.command.federation import app as federation_app
from fedbilevel.command.options import (
    ByChance,
    ChunkSize,
    ClientsPerRound,
    Data,
    Dropout,
    Every,
    Force,
    Knobs,
    Look,
    LossBound,
    Out,
    Products,
    Rounds,
    Settings,
    SettingsFile,
    Steps,
    TaskName,
    assignments,
    budget,
    by_algorithm,
    data_folder,
    fail,
    new_folder,
    number,
    option,
    picture_path,
    whole,
)
from fedbilevel.command.reproduce import reproduce
from fedbilevel.command.sweep import go_on, sweep
from fedbilevel.errors import Diverged, InputError
from fedbilevel.registry import Entry, find
from fedbilevel.report.styles import SCREEN, Style, find_style
from fedbilevel.settings import nearest
from fedbilevel.settings import settings as settings_of
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.data.datasets import SETS

if TYPE_CHECKING:
    from fedbilevel.runs.experiment import Snapshot
    from fedbilevel.runs.folder import RunFolder
    from fedbilevel.runs.stopping import StopRequest

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(data.app, name="data")
app.add_typer(federation_app, name="federation")
app.command()(sweep)
app.command()(reproduce)
app.command("report")(report_commands.report)
app.command("watch")(report_commands.watch)
console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)

LONGEST_ROUND = 24 * 3600  # seconds
DEMO = {"rounds": 1000, "every": 20}


@app.command()
def run(
    task: TaskName,
    algorithms: Annotated[list[str], typer.Argument(help="One or more algorithms to run and compare.", metavar="ALGORITHM...")],
    rounds: Rounds = None,
    steps: Steps = None,
    clients_per_round: ClientsPerRound = None,
    bernoulli: ByChance = None,
    dropout: Dropout = None,
    seed: Annotated[int, option(whole, "Of all randomness of the run.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Hyperparameter NAME=VALUE, or ALGORITHM.NAME=VALUE for one of several.")
    ] = None,
    knob: Knobs = None,
    settings: SettingsFile = None,
    every: Every = 10,
    chunk_size: ChunkSize = None,
    products: Products = "default",
    loss_bound: LossBound = 1e6,
    data: Data = "",
    federation: Annotated[
        Path | None, typer.Option(help="Folder of a federation whose sites are to be the clients.", metavar="DIR")
    ] = None,
    round_timeout: Annotated[
        float, option(number, "Seconds after which a federation goes on without a site that has not answered.")
    ] = 300.0,
    style: Look = "screen",
    out: Out = None,
    force: Force = False,
) -> None:
    """Run algorithms on a task, with the same budget each, and compare them."""
    look = find_style(style)
    find(TASKS, "task", task)
    for name in algorithms:
        find(ALGORITHMS, "algorithm", name)
    if len(set(algorithms)) < len(algorithms):
        raise InputError(f"an algorithm is named twice in {' '.join(algorithms)}: name each once")
    rest: dict[str, Any] = dict(
        budget(rounds, steps),
        clients_per_round=clients_per_round,
        bernoulli=bernoulli,
        dropout=dropout,
        seed=seed,
        every=every,
        chunk_size=chunk_size,
        products=products,
        loss_bound=loss_bound,
        data=data_folder(data),
    )
    file = Settings(settings)
    chosen = {name: {**file.hyperparameters(name), **given} for name, given in by_algorithm(algorithms, set_).items()}
    knobs = {**file.knobs(task), **assignments(knob)}
    if federation is not None:
        knobs = _on_federation(federation, round_timeout, task, knobs, rest)
    _start(task, knobs, chosen, rest, out or new_folder(task), force, look)


@app.command()
def demo(out: Out = None, force: Force = False) -> None:
    """Clean noisy labels across ten clients with FedBiOAcc, and FedAvg on the same data beside it."""
    console.print(
        "Ten clients hold handwritten digits. 40 % of their training labels were replaced by random ones, and each client's "
        "few clean samples are of one class only. With FedBiOAcc they learn together which samples to trust; "
        "FedAvg trusts them all.\n"
    )
    _start("data-cleaning", {}, {"fedbioacc": {}, "fedavg": {}}, DEMO, out or new_folder("demo"), force)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="A run, a folder of runs, or a sweep.")], style: Look = "screen"
) -> None:
    """Go on with runs, or with a sweep, that were stopped or killed."""
    look = find_style(style)
    if (directory / "sweep.json").exists():
        return go_on(directory, look)
    from fedbilevel.runs.folder import RunFolder

    _execute(directory, RunFolder.find(directory), look)


@app.command()
def compare(
    directories: Annotated[list[Path], typer.Argument(help="Runs, or folders of runs.", metavar="DIR...")],
    out: Annotated[Path, typer.Option(help="The picture to write; PNG and SVG in any case.")] = Path("comparison.png"),
    style: Look = "screen",
) -> None:
    """Show runs side by side, as a table and a picture."""
    picture_path(out)
    look = find_style(style)
    from fedbilevel.report.curve_picture import draw
    from fedbilevel.report.curves import curves as read
    from fedbilevel.report.table import table
    from fedbilevel.runs.folder import RunFolder

    curves = read([folder for directory in directories for folder in RunFolder.find(directory)])
    headlines = sorted({curve.headline for curve in curves})
    if len(headlines) > 1:
        raise InputError(f"the runs are judged by {' and '.join(headlines)}: compare runs of one kind of task")
    written = draw(curves, out, look)
    console.print(table(curves))
    console.print(f"pictures: {', '.join(map(str, written))}", soft_wrap=True)


@app.command("list")
def list_() -> None:
    """Name the algorithms, the tasks and the data sets, a line each."""
    for title, table in (("algorithms", ALGORITHMS), ("tasks", TASKS)):
        console.print(title, style="bold")
        for name, entry in table.items():
            console.print(f"  {name:26} {entry.summary:56} {entry.paper}", soft_wrap=True)
    console.print("data sets", style="bold")
    for name, source in SETS.items():
        console.print(f"  {name:26} {source.summary:56} {source.get or 'bundled'}", soft_wrap=True)


@app.command()
def show(name: Annotated[str, typer.Argument(help="An algorithm or a task.")]) -> None:
    """Explain an algorithm or a task: what it does, its settings, their defaults and where they come from."""
    known: dict[str, Entry] = {**ALGORITHMS, **TASKS}
    if name not in known:
        raise InputError(f"there is no algorithm or task {name!r}{nearest(name, known)}")
    cls = known[name].load()
    console.print(sys.modules[cls.__module__].__doc__, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in Explained._fields:
        table.add_column(column.replace("_", " "), overflow="fold")
    entry = known[name]
    for row in explained(name, entry):
        table.add_row(*row)
    console.print(table)
    for run_option, value in entry.run.items():
        console.print(f"\nunless given: --{run_option.replace('_', '-')} {value}", soft_wrap=True)
    for task, other in TASKS.items() if name in ALGORITHMS else ():
        suited = other.load().suited.get(task, {}).get(name)
        if suited:
            values = ", ".join(f"{k} = {v}" for k, v in suited.values.items())
            console.print(f"\non {task} ({suited.source}): {values}", soft_wrap=True)


def main() -> None:
    """Run the command; what a user can mend comes as one line, with exit code 2."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    compilation.set_up()
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        app(standalone_mode=False)
    except InputError as error:
        fail(str(error), 2)
    except TyperException as error:
        fail(error.format_message(), 2)
    except Diverged as error:
        fail(str(error), 1)
    except OSError as error:
        fail(f"{error.filename or 'the file system'}: {error.strerror or error}", 1)
    except (KeyboardInterrupt, typer.Abort):
        fail("stopped", 130)


def _start(
    task: str,
    knobs: dict[str, Any],
    algorithms: dict[str, dict[str, Any]],
    rest: dict[str, Any],
    out: Path,
    force: bool,
    style: Style = SCREEN,
) -> None:
    """Write the configurations of all runs, so that an interruption at any point can be resumed; then run them."""
    from fedbilevel.runs.configuration import Configuration
    from fedbilevel.runs.folder import RunFolder

    configurations = [Configuration.resolve(task, knobs, name, values, **rest) for name, values in algorithms.items()]
    for configuration in configurations:
        configuration.experiment()
    _execute(out, RunFolder.create({out / c.algorithm: c for c in configurations}, force), style)


def _on_federation(
    folder: Path, round_timeout: float, task: str, knobs: dict[str, str], rest: dict[str, Any]
) -> dict[str, str]:
    """The knobs, with a client for each site; the rest of the configuration names the federation."""
    from fedbilevel.federation.nvflare_support import require_flare
    from fedbilevel.federation.provision import Federation

    require_flare()
    if not 0 < round_timeout <= LONGEST_ROUND:
        raise InputError(f"--round-timeout must be above 0 and at most {LONGEST_ROUND} seconds, a day; given: {round_timeout}")
    if rest["chunk_size"] is not None:
        raise InputError("--chunk-size is for simulated clients: leave it out with --federation")
    if rest["products"] != "default":
        raise InputError("--products is for simulated clients: leave it out with --federation")
    sites = Federation.read(folder).sites
    rest |= {"federation": str(folder.resolve()), "round_timeout": round_timeout}
    if "clients" in settings_of(TASKS[task].load()) and knobs.setdefault("clients", str(len(sites))) != str(len(sites)):
        raise InputError(
            f"the federation has {len(sites)} sites, and {task} was given clients={knobs['clients']}: leave it out"
        )
    return knobs


def _executed(folder: RunFolder, stop: StopRequest, observe: Callable[[Snapshot], None]) -> None:
    """Run it here, or on the federation that it is for."""
    where = folder.configuration.federation
    if not where:
        folder.execute(stop, observe)
        return
    from fedbilevel.federation.provision import Federation
    from fedbilevel.federation.supervise import Supervisor

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    Supervisor(Federation.read(Path(where)), say).run(folder, stop, observe)


def _execute(directory: Path, folders: list[RunFolder], style: Style = SCREEN) -> None:
    from fedbilevel.command import progress
    from fedbilevel.report.curve_picture import draw
    from fedbilevel.report.curves import curves as read
    from fedbilevel.report.table import table
    from fedbilevel.runs.stopping import Interrupted, stop_request

    diverged = []
    try:
        with stop_request() as stop:
            for folder in folders:
                configuration, ended = folder.configuration, folder.result
                if ended is not None and ended["status"] == "diverged":
                    diverged.append(str(ended["reason"]))
                headline = find(TASKS, "task", configuration.task).load().headline
                try:
                    with progress.shown(console, configuration, headline) as observe:
                        _executed(folder, stop, observe)
                except Diverged as error:
                    diverged.append(str(error))
                stop.check()
    except Interrupted as interrupted:
        fail(f"stopped; go on with: fedbilevel resume {directory}", 128 + interrupted.signum)
    except OSError as error:
        problem = f"{error.filename or directory}: {error.strerror or error}"
        fail(f"{problem}; mend that, then go on with: fedbilevel resume {directory}", 1)
    curves = read([folder for folder in folders if folder.rows()])
    if curves:
        pictures = draw(curves, directory / "curves.png", style)
        console.print()
        console.print(table(curves))
        for caveat in dict.fromkeys(c for folder in folders for c in (folder.result or {}).get("caveats", [])):
            console.print(f"note: {caveat}", soft_wrap=True)
        console.print(f"\nruns: {directory}\ncurves: {', '.join(map(str, pictures))}", soft_wrap=True)
    if diverged:
        raise Diverged("\n".join(diverged))
