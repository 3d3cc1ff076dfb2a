"""The commands `fedbilevel list` and `fedbilevel show`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.table import Table

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.command.explain import Explained, explained
from fedbilevel.command.options import console, say
from fedbilevel.errors import InputError
from fedbilevel.registry import Entry
from fedbilevel.settings import nearest
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.data.datasets import SETS


def list_() -> None:
    """List the algorithms, the tasks and the data sets, one on each line."""
    for title, table in (("algorithms", ALGORITHMS), ("tasks", TASKS)):
        console.print(title, style="bold")
        for name, entry in table.items():
            say(f"  {name:26} {entry.summary:56} {entry.paper}")
    console.print("data sets", style="bold")
    for name, source in SETS.items():
        say(f"  {name:26} {source.summary:56} {source.get or 'bundled'}")


def show(name: Annotated[str, typer.Argument(help="An algorithm or a task.")]) -> None:
    """Explain an algorithm or a task: what it does, its settings, their defaults and where they come from."""
    known: dict[str, Entry] = {**ALGORITHMS, **TASKS}
    if name not in known:
        raise InputError(f"there is no algorithm or task {name!r}{nearest(name, known)}")
    cls = known[name].load()
    say(sys.modules[cls.__module__].__doc__ or "")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in Explained._fields:
        table.add_column(column.replace("_", " "), overflow="fold")
    entry = known[name]
    for row in explained(name, entry):
        table.add_row(*row)
    console.print(table)
    for run_option, value in entry.run.items():
        say(f"\nunless given: --{run_option.replace('_', '-')} {value}")
    if name in ALGORITHMS:
        reported = entry.configure(name, {}).diagnostics()
        for number, meaning in reported.items():
            say(f"\nreports {number}: {meaning}")
    for task, other in TASKS.items() if name in ALGORITHMS else ():
        suited = other.load().suited.get(task, {}).get(name)
        if suited:
            values = ", ".join(f"{k} = {v}" for k, v in suited.values.items())
            say(f"\non {task} ({suited.source}): {values}")
