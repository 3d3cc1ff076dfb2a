"""The command `fedbilevel reproduce`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table

from fedbilevel.command.options import Data, Look, Out, Settings, SettingsFile, console, fail, option, say, say_note, whole
from fedbilevel.errors import InputError
from fedbilevel.tasks.data.datasets import data_folder

if TYPE_CHECKING:
    from fedbilevel.report.styles import Style
    from fedbilevel.runs.reproductions.results import Results
    from fedbilevel.runs.reproductions.study import Study

PUBLISHED_WIDTH = 1600  # pixels: pictures in the repository are for screens, those beside the runs for print


def reproduce(
    name: Annotated[str, typer.Argument(help="The table or figure; --list names all.")] = "",
    list_: Annotated[bool, typer.Option("--list", help="Name the tables and figures.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A reduced size on bundled data, in about a minute.")] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="First choose every method's hyperparameters again, over its grid.")
    ] = False,
    publish: Annotated[
        bool, typer.Option("--publish", help="Put the results beside the plan, and rewrite RESULTS.md.")
    ] = False,
    style: Look = "screen",
    data: Data = "",
    methods: Annotated[
        str, typer.Option(help="Run these alone, NAME,...; the others' numbers are those stored beside the plan.")
    ] = "",
    changed: Annotated[
        bool,
        typer.Option("--changed", help="Run only the lines that the plan has changed since they were stored."),
    ] = False,
    settings: SettingsFile = None,
    plans: Annotated[Path | None, typer.Option(help="Folder of plans of your own; the project's unless given.")] = None,
    processes: Annotated[int, option(whole, "Processes on this machine that share the lines, and its GPUs.")] = 1,
    out: Out = None,
) -> None:
    """Run a paper's table or figure, and put our numbers beside the paper's.

    What is finished is not run again: the same command continues where it stopped.
    """
    from fedbilevel.report.styles import find_style
    from fedbilevel.runs.reproductions.plan import read
    from fedbilevel.runs.reproductions.study import Study
    from fedbilevel.runs.reproductions.tuned import FOLDER

    look = find_style(style)
    folder = plans or FOLDER
    if list_ or not name:
        console.print(_list(folder))
        return
    plan = read(name, folder)
    if quick and (tune or publish):
        raise InputError("--quick is only for a first look: leave out --tune and --publish")
    if (methods or changed) and (quick or tune):
        option = "--methods" if methods else "--changed"
        raise InputError(f"{option} takes the other numbers from those stored beside the plan: leave out --quick and --tune")
    if settings and publish:
        raise InputError("--settings is for trying values out; published results use the tuned ones")
    plan = plan.small() if quick else plan
    path = out or Path("runs") / f"reproduce-{name}{'-quick' if quick else ''}"
    given = Settings.read(settings).hyperparameters
    study = Study(plan, path, data_folder(data), folder, given, [m for m in methods.split(",") if m], changed)
    _execute(study, tune, processes)
    _conclude(study, look, reduced=quick)
    if publish:
        _publish(study, folder)


def _list(folder: Path) -> Table:
    from fedbilevel.runs.reproductions.plan import names, read

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("name", "paper", "what", "runs"):
        table.add_column(head, justify="right" if head == "runs" else "left", overflow="fold")
    for name in names(folder):
        plan = read(name, folder)
        table.add_row(name, plan.paper, plan.title, str(len(plan.lines()) * plan.seeds))
    return table


def _execute(study: Study, tune: bool, processes: int) -> None:
    from fedbilevel.runs.progress import counted
    from fedbilevel.runs.stopping import Interrupted, stop_request
    from fedbilevel.runs.versions import note_on_changes
    from fedbilevel.runs.workers import workers

    plan = study.reproduction
    say_note(note_on_changes(study.path, study.changes()))
    planned = plan.after_search() if tune else plan
    tuned = len(planned.searched_lines() or plan.tuned_lines()) if tune else 0
    total = tuned + len(planned.lines() if tune else study.lines())
    try:
        with stop_request() as stop, workers(processes) as spread, counted(console, plan.name, "line", total) as show:

            def observing(before: int) -> Callable[[int, str], None]:
                def observe(done: int, word: str) -> None:
                    show(before + done, word)
                    stop.check()

                return observe

            if tune:
                study.tune(observing(0), spread)
            study.run(observing(tuned), spread)
    except Interrupted as interrupted:
        fail(f"stopped; the same command continues with what is missing in {study.path}", 128 + interrupted.signum)


def _conclude(study: Study, look: Style, reduced: bool) -> None:
    from fedbilevel.report import panel_picture, reproduction_page
    from fedbilevel.report.reproduction_text import heading
    from fedbilevel.runs.files import write_atomically
    from fedbilevel.runs.reproductions import results
    from fedbilevel.runs.reproductions.table_numbers import columns

    plan, path = study.reproduction, study.path
    found = results.collect(study)
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / "results.csv", results.to_csv(found).encode())
    comparison = reproduction_page.comparison(plan, found)
    write_atomically(path / "results.md", f"{reproduction_page.table(plan, found)}\n{comparison}".encode())
    pictures = [path / "results.png", path / "results.svg"]
    panel_picture.draw(plan, found, pictures, look)
    if plan.ranked:
        pictures += _rank(study, found, look)
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    brackets = " [paper]" if plan.published else ""
    for head in ("", "method", *(heading(plan, column) + brackets for column in columns(plan))):
        table.add_column(head)
    for panel, method in plan.lines():
        shown = reproduction_page.entries(plan, panel, method.name, found)
        table.add_row(panel.name if method.name == plan.methods_of(panel)[0] else "", method.name, *shown)
    console.print(table)
    console.print(Markdown(comparison))
    if reduced:
        console.print("note: this is a reduced size on other data than the paper's: do not compare it with the paper's numbers")
    say(f"\nruns: {path}\ntable: {path / 'results.csv'}, {path / 'results.md'}")
    say(f"pictures: {', '.join(map(str, pictures))}")


def _rank(study: Study, found: Results, look: Style) -> list[Path]:
    """Write the league's table and picture."""
    from fedbilevel.report import difference_picture, league_page
    from fedbilevel.runs.files import write_atomically
    from fedbilevel.runs.reproductions.league import standings

    plan, path = study.reproduction, study.path
    ranked = standings(plan, found)
    write_atomically(path / "ranks.csv", league_page.to_csv(plan, ranked).encode())
    write_atomically(path / "ranks.md", league_page.text(plan, ranked).encode())
    pictures = [path / "ranks.png", path / "ranks.svg"]
    difference_picture.draw(ranked, pictures, look)
    console.print(Markdown(league_page.text(plan, ranked)))
    return pictures


def _publish(study: Study, folder: Path) -> None:
    from PIL import Image

    from fedbilevel.report import reproduction_page
    from fedbilevel.runs.files import write_atomically

    stored, name = folder / "results", study.reproduction.name
    stored.mkdir(exist_ok=True)
    write_atomically(stored / f"{name}.csv", (study.path / "results.csv").read_bytes())
    write_atomically(stored / f"{name}.json", (json.dumps(asdict(study.description()), indent=1) + "\n").encode())
    pictures = {"results.png": f"{name}.png"} | ({"ranks.png": f"{name}-ranks.png"} if study.reproduction.ranked else {})
    for drawn, published in pictures.items():
        with Image.open(study.path / drawn) as picture:
            picture.thumbnail((PUBLISHED_WIDTH, picture.height))
            picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(stored / published, optimize=True)
    write_atomically(folder / "RESULTS.md", reproduction_page.results_page(folder).encode())
    say(f"published: {folder / 'RESULTS.md'}")
