"""The commands `fedbilevel data ...`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedbilevel.command.options import (
    Data,
    Knobs,
    TaskName,
    assignments,
    console,
    option,
    picture_path,
    say,
    target,
)
from fedbilevel.errors import InputError
from fedbilevel.own_code import label
from fedbilevel.registry import chosen, find
from fedbilevel.tasks.data.datasets import data_folder

if TYPE_CHECKING:
    from fedbilevel.tasks.data.fetch import File

app = typer.Typer(no_args_is_help=True, help="Get data sets, and see who holds what.")

LINES = 4  # plain lines for a file


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The data set; 'fedbilevel list' names them.")],
    to: Annotated[Path | None, option(target, "Folder of data sets to write to; your cache folder unless given.")] = None,
) -> None:
    """Download a data set from its public mirrors, and check it."""
    from fedbilevel.tasks.data.datasets import cache_folder
    from fedbilevel.tasks.data.fetch import fetch

    with _shown() as progress:
        downloaded = fetch(name, to, progress)
    done = "fetched and checked" if downloaded else "already there, and intact"
    say(f"{name}: {done}: {(to or cache_folder()) / name}")


@app.command()
def show(
    task: TaskName,
    knob: Knobs = None,
    data: Data = "",
    out: Annotated[Path | None, typer.Option(help="The picture to write; TASK-holdings.png unless given.")] = None,
) -> None:
    """Draw which client holds how many samples of which class."""
    from fedbilevel.report import holdings_picture
    from fedbilevel.tasks import TASKS

    task = chosen(TASKS, task)
    name = label(task)
    path = picture_path(out or Path(f"{name}-holdings.png"))
    held = find(TASKS, "task", task).configure(name, assignments("--knob", knob)).build(data_folder(data)).holdings
    if held is None:
        raise InputError(f"{name} has no classes to draw: its clients hold numbers that the task generates")
    holdings_picture.holdings(held, f"who holds what: {name}", path)
    for purpose, counts in held.counts.items():
        sizes, kinds = (_range(each) for each in (counts.sum(1), (counts > 0).sum(1)))
        units = held.unit if kinds == "1" else {"class": "classes"}.get(held.unit, f"{held.unit}s")
        say(f"{purpose}: {len(counts)} clients with {sizes} samples of {kinds} {units}")
    say(f"picture: {path}")


def _range(numbers: Any) -> str:
    low, high = numbers.min(), numbers.max()
    return f"{low}" if low == high else f"{low} to {high}"


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[File, int], None]]:
    """During the block, the function it yields shows how far a download is: bars on a terminal, lines elsewhere."""
    if console.is_terminal:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        tasks: dict[str, TaskID] = {}

        def advance(file: File, done: int) -> None:
            if file.name not in tasks:
                tasks[file.name] = bar.add_task(file.name, total=file.size)
            bar.update(tasks[file.name], completed=done)

        with bar:
            yield advance
        return

    shown: dict[str, int] = {}

    def line(file: File, done: int) -> None:
        reached = done * LINES // file.size
        if reached != shown.get(file.name):
            shown[file.name] = reached
            say(f"{file.name}: {done / 1e6:.1f} of {file.size / 1e6:.1f} MB")

    yield line
