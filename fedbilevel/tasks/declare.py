"""How a task is declared: a function or a class, whose typed arguments or fields are its knobs.

Either becomes a frozen dataclass with checked settings and `build`, as the package's own tasks are. docs/new-task.md has one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, dataclass_transform, overload

from fedbilevel.core.problem import LOSSES
from fedbilevel.errors import InputError, in_words, require, users_code
from fedbilevel.own_code import is_ours, offered
from fedbilevel.settings import check_all, plain, settings
from fedbilevel.tasks.base import Better, Declared, Suited, Task
from fedbilevel.tasks.client_data import ClientData
from fedbilevel.tasks.data.columns import Columns
from fedbilevel.tasks.data.tables import Tables

Class = TypeVar("Class", bound=type)
DATA = "data"  # the one argument that is not a knob: the folder of data sets, or the clients' data


@overload
@dataclass_transform(frozen_default=True)
def task(given: Class, /) -> Class: ...
@overload
def task(given: Callable[..., Task], /) -> Any: ...
@overload
def task(
    *,
    headline: str = ...,
    better: Better | None = ...,
    suited: Mapping[str, Mapping[str, Any]] | None = ...,
    columns: Columns | None = ...,
) -> Callable[[Any], Any]: ...


def task(
    given: Any = None,
    /,
    *,
    headline: str = "",
    better: Better | None = None,
    suited: Mapping[str, Mapping[str, Any]] | None = None,
    columns: Columns | None = None,
) -> Any:
    """Declare a function that returns a `Task`, or a class whose method `build` does, as a task for the command.

    The knobs are the arguments of the function or the fields of the class. Each has a type (a number, a Boolean, a string or
    a `Literal`) and a default, either plain or made by `real`, `count`, `choice`, `flag` or `text` with bounds and a meaning.
    An argument called `data` is not a knob, but the folder given by `--data`; with the type `ClientData`, which also serves a
    federation, it reads each client's file, and with `columns` it is the clients' `Tables`.

    Args:
        headline: the metric to compare methods by; the upper loss unless given.
        better: for metrics, whether "higher" or "lower" values are better; lower unless given.
        suited: hyperparameters that suit the task, by name of the algorithm.
        columns: what the columns are, for a task on tables, of which each client has one.

    Raises:
        InputError: something in the declaration cannot be used.
    """
    if given is None:
        return functools.partial(_declared, headline=headline, better=better, suited=suited, columns=columns)
    return _declared(given)


def _declared(
    given: Any,
    headline: str = "",
    better: Better | None = None,
    suited: Mapping[str, Mapping[str, Any]] | None = None,
    columns: Columns | None = None,
) -> Any:
    require(isinstance(given, type) or inspect.isfunction(given), "@task", "on a function or a class", given)
    takes_data = isinstance(given, type) or DATA in inspect.signature(given).parameters
    require(columns is None or takes_data, "a task on tables", f"a function with an argument {DATA!r}", given)
    cls: Any = given if isinstance(given, type) else _class_of(given)
    name = cls.__name__
    builds = callable(getattr(cls, "build", None))
    require(builds, name, "a class with a method build(self, data) that returns a Task", cls)
    tables = isinstance(suited, Mapping | None) and all(isinstance(values, Mapping) for values in (suited or {}).values())
    require(tables, f"{name}: suited", "a dictionary of hyperparameters by algorithm", suited)
    by_name = {name: {of: Suited(values, "its author") for of, values in suited.items()}} if suited else {}
    said: dict[str, Any] = {"headline": headline, "better": better, "suited": by_name, "columns": columns}
    for trait, unless_given in (("headline", LOSSES[0]), ("better", {}), ("suited", {}), ("columns", None)):
        setattr(cls, trait, said[trait] or getattr(cls, trait, unless_given))
    require(isinstance(cls.headline, str), f"{name}: headline", "the name of a metric", cls.headline)
    fits = isinstance(cls.better, Mapping) and set(cls.better.values()) <= {"higher", "lower"}
    require(fits, f"{name}: better", 'a dictionary of "higher" or "lower" by metric', cls.better)
    require(isinstance(cls.columns, Columns | property | None), f"{name}: columns", "Columns(label=..., ...)", cls.columns)
    further = vars(cls).get("__post_init__", lambda self: None)

    def __post_init__(self: Any) -> None:
        check_all(self)
        further(self)

    cls.__post_init__ = __post_init__
    for knob, annotation in inspect.get_annotations(cls).items():
        if "ClassVar" not in str(annotation):
            setattr(cls, knob, _knob(cls, knob, vars(cls).get(knob, inspect.Parameter.empty)))
    dataclasses.dataclass(frozen=True)(cls)
    for field in dataclasses.fields(cls):
        wanted = "a setting, such as real(0.1, ...)"
        require("setting" in field.metadata, f"{name}: {field.name}", wanted, field.default)
    if "build" in vars(cls) and not is_ours(cls):
        cls.build = _guarded(cls.build)
    return offered(cls, "task")


def _knob(owner: Any, name: str, default: Any) -> dataclasses.Field:
    """The field of a knob: its default if that is a field, otherwise one with the type that its owner declares."""
    if isinstance(default, dataclasses.Field):
        return default
    try:
        kinds = typing.get_type_hints(owner)
    except Exception as error:
        raise InputError(f"{owner.__name__}: its types cannot be read: {in_words(error)}") from error
    return plain(owner.__name__, name, kinds, default)


def _class_of(function: Callable[..., Task]) -> type:
    """A class whose fields are the function's arguments, and whose `build` calls it."""
    name = function.__name__
    arguments = inspect.signature(function).parameters
    body: dict[str, Any] = {"__doc__": function.__doc__, "__module__": function.__module__ or "", "__annotations__": {}}
    for argument, parameter in arguments.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(f"{name}: {parameter} must be a knob of its own, with a type and a default")
        if argument in ("build", "headline", "better", "suited", "columns"):
            raise InputError(f"{name}: {argument} cannot be the name of a knob: choose another")
        if argument != DATA:
            body[argument] = _knob(function, argument, parameter.default)
            body["__annotations__"][argument] = Any

    def build(self: Any, data: str | ClientData | Tables = "") -> Task:
        """The task with these knobs; `data` is its data, or the folder of it."""
        values = {knob: getattr(self, knob) for knob in settings(type(self))}
        if DATA in arguments and (data or arguments[DATA].default is inspect.Parameter.empty):
            values[DATA] = data
        return function(**values)

    build.__wrapped__ = function  # type: ignore[attr-defined]
    return types.new_class(name, exec_body=lambda namespace: namespace.update(body, build=build))


def _guarded(build: Callable[..., Task]) -> Callable[..., Task]:
    """The same function, whose errors become one line that names the line of the user's code."""
    function = inspect.unwrap(build)
    argument = inspect.signature(function).parameters.get(DATA)
    default = argument.default if argument else None
    by_client = isinstance(default, ClientData) or (argument is not None and ClientData.__name__ in str(argument.annotation))

    @functools.wraps(build)
    def guarded(self: Any, data: str | ClientData | Tables = "") -> Task:
        source = (
            ClientData() if isinstance(data, Tables) else ClientData(str(data)) if not isinstance(data, ClientData) else data
        )
        source = dataclasses.replace(source, found=[])
        if by_client and isinstance(default, ClientData) and not source.folder:
            source = dataclasses.replace(source, folder=default.folder)
        given: Any = source if by_client else source.folder
        if self.columns is not None:
            given = data if isinstance(data, Tables) else source.tables(self.columns)
        with users_code(function.__code__.co_filename):
            built = build(self, given)
        name = type(self).__name__
        require(isinstance(built, Task), f"what {name} returns", "a Task, such as Task.of returns", built)
        folder = source.folder or (default if isinstance(default, str) else "")
        in_full = os.path.abspath(folder) if folder else ""  # so that a run finds it again from another folder
        found_again = None if isinstance(data, Tables) else in_full
        built = dataclasses.replace(built, declared=Declared(self, found_again, tuple(source.found)))
        if isinstance(given, Tables) and built.preprocessing is None:
            built = dataclasses.replace(built, preprocessing=given.preprocessing)
        names = built.metric_names()
        require(self.headline in names, f"{name}: headline", f"one of its metrics {', '.join(names)}", self.headline)
        return built

    return guarded
