"""The task and the algorithms of a sweep or a tuning, given as names or as values of a Python program."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.base import Algorithm, require_algorithm
from fedbilevel.errors import InputError, require
from fedbilevel.library.names import name_of, plain
from fedbilevel.own_code import adopted, is_unnamed, offers
from fedbilevel.registry import Registry, chosen
from fedbilevel.settings import unwrapped
from fedbilevel.tasks import TASKS, declare
from fedbilevel.tasks.base import Task
from fedbilevel.tasks.data.datasets import data_folder


def given_knobs(knobs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Knobs of a task by name; `InputError` if they are given in another way."""
    require(isinstance(knobs, Mapping | None), "knobs", "a dictionary of values by name", knobs)
    return dict(knobs or {})


class Part(NamedTuple):
    """The task or an algorithm: its name, its settings other than those that are tried, and its class if it is the user's."""

    name: str
    settings: dict[str, Any]
    own: type | None = None
    data: str = ""

    @property
    def unnamed(self) -> bool:
        """Whether no file describes it."""
        return is_unnamed(self.name)


def algorithm_part(algorithm: str | Algorithm, tried: Collection[str] = ()) -> Part:
    """The algorithm, with the settings of an instance that are not among those that are tried."""
    if isinstance(algorithm, str):
        return Part(chosen(ALGORITHMS, algorithm), {})
    return _part(ALGORITHMS, require_algorithm(algorithm), tried)


def task_part(task: str | type | Task, knobs: dict[str, Any], data: str | Path, tried: Collection[str] = ()) -> Part:
    """The task, with those of its knobs that are not among the tried ones."""
    if isinstance(task, Task):
        for what, given in (("knobs", knobs), ("data", data)):
            if given:
                raise InputError(f"a Task has its own {what}: leave it out")
        if task.declared is not None and task.declared.data is not None:
            return _part(TASKS, task.declared.settings, tried)._replace(data=task.declared.data)
        return _part(TASKS, _declaration(task), tried)
    where, knobs = data_folder(str(data)), {name: unwrapped(value) for name, value in knobs.items()}
    if isinstance(task, str):
        return Part(chosen(TASKS, task), knobs, None, where)
    require(offers(task, "task"), "task", "a name, a Task, or what @fedbilevel.task declares", task)
    return _part(TASKS, task(), tried)._replace(settings=knobs, data=where)


def _part(table: Registry, settings: Any, tried: Collection[str]) -> Part:
    name = name_of(table, settings)
    fixed = {n: value for n, value in plain(settings).items() if n not in tried}
    return Part(name, fixed, None if name in table.bundled else type(settings))


def _declaration(task: Task) -> Any:
    """A declaration without knobs for a task that is already built."""

    def solve() -> Task:
        return task

    of = task.declared.settings if task.declared else None
    said = {"headline": of.headline, "better": of.better} if of else {}
    return declare.task(**said)(solve)()


@contextlib.contextmanager
def known(parts: Iterable[tuple[Part, str]]) -> Iterator[None]:
    """During the block, find the user's own tasks and algorithms, given with their kind, under their names."""
    with contextlib.ExitStack() as kept:
        for part, kind in parts:
            if part.own is not None:
                kept.enter_context(adopted(part.own, kind))
        yield
