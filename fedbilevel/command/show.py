"""The commands `fedbilevel list` and `fedbilevel show`."""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedbilevel.aggregations import AGGREGATIONS
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.command.explain import Explained, explained
from fedbilevel.command.options import Json, completing, console, say, say_json, warn
from fedbilevel.errors import InputError
from fedbilevel.own_code import allow, is_ours, is_reference, label
from fedbilevel.registry import Entry, find
from fedbilevel.settings import nearest
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.data.datasets import SETS

if TYPE_CHECKING:
    from fedbilevel.tasks.base import Suited

TABLES = {"algorithms": ALGORITHMS, "tasks": TASKS, "aggregations": AGGREGATIONS}


def list_(json: Json = False) -> None:
    """List the algorithms, the tasks, the aggregations and the data sets, one on each line."""
    for table in TABLES.values():
        for line in table.refused.values():
            warn(line)
    if json:
        return say_json(_everything())
    for title, table in TABLES.items():
        console.print(title, style="bold")
        for name, entry in table.items():
            say(f"  {name:26} {entry.summary:56} {entry.paper}")
    console.print("data sets", style="bold")
    for name, source in SETS.items():
        say(f"  {name:26} {source.summary:56} {source.get or 'bundled'}")


def show(
    name: Annotated[
        str,
        typer.Argument(
            help="An algorithm, a task or an aggregation: a name, or your own FILE.py or FILE.py:NAME.",
            autocompletion=completing(*TABLES.values()),
        ),
    ],
    json: Json = False,
) -> None:
    """Explain an algorithm, a task or an aggregation: what it does, its settings, their defaults and where they come from."""
    entry, kind = _found(name)
    name, cls = label(name), entry.load()
    rows = explained(name, entry)
    algorithm = entry.configure(name, {}) if kind == "algorithm" else None
    reported = algorithm.diagnostics() if algorithm else {}
    suited = _suited(name) if algorithm else {}
    if json:
        described = {"name": name, "kind": kind, "explanation": _explanation(cls)}
        settings = [row._asdict() for row in rows]
        found = {task: {"values": dict(its.values), "source": its.source} for task, its in suited.items()}
        return say_json(
            {
                **described,
                "settings": settings,
                "run_options": dict(entry.run),
                "reports": reported,
                "suited": found,
                **({name: getattr(algorithm, name) for name in ("single_answers", "late_answers")} if algorithm else {}),
            }
        )
    say(_explanation(cls))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in Explained._fields:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
    columns = entry.configure(name, {}).columns if kind == "task" else None
    if columns is not None:
        say(f"\na table for each client, by --data: {columns}")
    if algorithm and algorithm.single_answers:
        say("\nneeds single answers: its server sees what each client sends, so a site can refuse it (refuse = ['gather'])")
    if algorithm and not algorithm.late_answers:
        say("\nneeds the answers of an exchange together: it cannot be run with --aggregate buffered")
    for run_option, value in entry.run.items():
        say(f"\nunless given: --{run_option.replace('_', '-')} {value}")
    for number, meaning in reported.items():
        say(f"\nreports {number}: {meaning}")
    for task, its in suited.items():
        say(f"\non {task} ({its.source}): {', '.join(f'{k} = {v}' for k, v in its.values.items())}")


def _everything() -> dict[str, Any]:
    """What `list` lists, for other programs."""
    tables = {
        title: [
            {"name": n, "summary": e.summary, "paper": e.paper, "package": e.package or "fedbilevel"} for n, e in table.items()
        ]
        for title, table in TABLES.items()
    }
    data_sets = [{"name": name, "summary": its.summary, "get": its.get or None} for name, its in SETS.items()]
    return {**tables, "data_sets": data_sets}


def _suited(algorithm: str) -> dict[str, Suited]:
    """By task, the hyperparameters that suit it."""
    of_tasks = {task: entry.load().suited.get(task, {}).get(algorithm) for task, entry in TASKS.bundled.items()}
    return {task: suited for task, suited in of_tasks.items() if suited}


def _found(name: str) -> tuple[Entry, str]:
    """The entry of that name, and what it is."""
    tables = TABLES.values()
    if not is_reference(name):
        for table in tables:
            if name in table:
                return table[name], table.kind
        raise InputError(f"there is no algorithm or task {name!r}{nearest(name, [n for table in tables for n in table])}")
    allow(name)
    for table in (ALGORITHMS, AGGREGATIONS):
        with contextlib.suppress(InputError):
            return find(table, table.kind, name), table.kind
    return find(TASKS, "task", name), "task"


def _explanation(cls: type) -> str:
    """The docstring of the module for a class of the package, and of the class itself for a user's."""
    module = sys.modules[cls.__module__].__doc__ or ""
    return module if is_ours(cls) else f"{inspect.getdoc(cls) or module}\n"
