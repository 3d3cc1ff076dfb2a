"""The commands `fedbilevel list` and `fedbilevel show`."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated

import typer
from rich.table import Table

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.command.explain import Explained, explained
from fedbilevel.command.options import console, say, warn
from fedbilevel.errors import InputError
from fedbilevel.own_code import allow, is_ours, is_reference, label
from fedbilevel.registry import Entry, find
from fedbilevel.settings import nearest
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.data.datasets import SETS


def list_() -> None:
    """List the algorithms, the tasks and the data sets, one on each line."""
    for title, table in (("algorithms", ALGORITHMS), ("tasks", TASKS)):
        console.print(title, style="bold")
        for name, entry in table.items():
            say(f"  {name:26} {entry.summary:56} {entry.paper}")
        for line in table.refused.values():
            warn(line)
    console.print("data sets", style="bold")
    for name, source in SETS.items():
        say(f"  {name:26} {source.summary:56} {source.get or 'bundled'}")


def show(
    name: Annotated[str, typer.Argument(help="An algorithm or a task: a name, or your own FILE.py or FILE.py:NAME.")],
) -> None:
    """Explain an algorithm or a task: what it does, its settings, their defaults and where they come from."""
    entry, is_algorithm = _found(name)
    name, cls = label(name), entry.load()
    say(_explanation(cls))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in Explained._fields:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in explained(name, entry):
        table.add_row(*row)
    console.print(table)
    for run_option, value in entry.run.items():
        say(f"\nunless given: --{run_option.replace('_', '-')} {value}")
    if is_algorithm:
        reported = entry.configure(name, {}).diagnostics()
        for number, meaning in reported.items():
            say(f"\nreports {number}: {meaning}")
    for task, other in TASKS.bundled.items() if is_algorithm else ():
        suited = other.load().suited.get(task, {}).get(name)
        if suited:
            values = ", ".join(f"{k} = {v}" for k, v in suited.values.items())
            say(f"\non {task} ({suited.source}): {values}")


def _found(name: str) -> tuple[Entry, bool]:
    """The entry of that name, and whether it is an algorithm."""
    if not is_reference(name):
        for table in (ALGORITHMS, TASKS):
            if name in table:
                return table[name], table is ALGORITHMS
        raise InputError(f"there is no algorithm or task {name!r}{nearest(name, [*ALGORITHMS, *TASKS])}")
    allow(name)
    try:
        return find(ALGORITHMS, "algorithm", name), True
    except InputError:
        return find(TASKS, "task", name), False


def _explanation(cls: type) -> str:
    """The docstring of the module for a class of the package, and of the class itself for a user's."""
    module = sys.modules[cls.__module__].__doc__ or ""
    return module if is_ours(cls) else f"{inspect.getdoc(cls) or module}\n"
