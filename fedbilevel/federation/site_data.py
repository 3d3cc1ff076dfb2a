"""A site's own data, as its `site.toml` describes it: none of it is sent, and a run of another task is refused."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.core.client_lists import converted
from fedbilevel.core.mean_check import check_means
from fedbilevel.core.population import MOST_ROWS, Population
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.federation.pinned_code import TABLES, check_pins, trusted
from fedbilevel.federation.site_policy import SitePolicy
from fedbilevel.own_code import is_ours
from fedbilevel.registry import find
from fedbilevel.settings import configure, nearest
from fedbilevel.tasks.base import Task
from fedbilevel.tasks.client_data import ClientData, built
from fedbilevel.tasks.data.preprocessing import Preprocessing
from fedbilevel.tasks.data.table_sums import SiteTable
from fedbilevel.tasks.data.tables import Tables, opened_source, site_table
from fedbilevel.tasks.label_errors import LabelErrors
from fedbilevel.user_files import Scalar, read_arrays, read_toml

LEVELS = ("upper", "lower", "test")
LOADERS = ("share", "files", "function", "task", "table")


@dataclass(frozen=True)
class SiteData:
    """What a site says about its data."""

    file: Path
    task: str
    loader: str
    client: int = 0  # share: which of the simulated clients it is
    path: str = ""  # files: the .npz, table: the .csv or .parquet, or the folder of images; relative to the configuration
    function: str = ""  # function: module:name
    data: str = ""  # folder of data sets that are not bundled; task: of the site's own file
    knobs: Mapping[str, Scalar] = field(default_factory=dict)  # settings of the task that the site insists on
    trusted: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of own code that it runs, by file or package
    policy: SitePolicy = field(default_factory=SitePolicy)

    def __post_init__(self) -> None:
        check_pins(self.trusted)
        if self.loader not in LOADERS:
            raise InputError(f"loader must be one of {', '.join(LOADERS)}; given: {self.loader}")

    @classmethod
    def read(cls, file: Path) -> SiteData:
        """Read the site's configuration; `InputError` if it cannot be used."""
        return read_toml(file, cls, file=file)

    def agree(self, task: str, knobs: Mapping[str, Any]) -> None:
        """Raise `InputError` unless the site is set up for runs of this task with these knobs."""
        if task != self.task:
            raise InputError(f"this site is set up for the task {self.task}, not for {task}: refused")
        for name, value in {**self._columns(), **self.knobs}.items():
            if name not in knobs:
                raise InputError(f"this site insists on a knob {name!r} that {task} does not have{nearest(name, knobs)}")
            if value != knobs[name]:
                raise InputError(f"this site insists on {name} = {value!r}, but the run has {name} = {knobs[name]!r}: refused")

    def _columns(self) -> dict[str, Scalar]:
        """The columns of its table that the site agrees to unless it names others, if knobs and not pinned code name them."""
        if self.loader != "table" or self.task != "label-errors":
            return {}
        return {name: getattr(LabelErrors, name) for name in LabelErrors.roles}

    def configured(self, kind: str, name: str, code: Mapping[str, str], values: Mapping[str, Any]) -> Any:
        """The task or the algorithm that a run names, with its settings; `InputError` if it is own code without a pin here.

        `code` has the SHA-256 that the run has for it, or nothing for one of the package's own.
        """
        if sha256 := code.get(kind, ""):
            return configure(trusted(self.trusted, self.file.parent, kind, name, sha256), name, values)
        return find(TABLES[kind].bundled, kind, name).configure(name, values)

    def load(
        self, settings: Any, number: int = 0, sites: Sequence[Sequence[int]] = (), fit: str = ""
    ) -> tuple[Task, Population]:
        """The task, and this site's own rows for it as a population of one.

        The site is client `number`, and `sites` has the number of rows that each of the sites has found, as far as it is known.
        """
        task = self._of_table(settings, number, fit) if self.loader == "table" else self._built(settings, number, sites)
        like = task.population
        if self.loader in ("share", "task", "table"):
            client = self.client if self.loader == "share" else number
            if not 0 <= client < like.size:
                raise InputError(f"{self.file}: client must be from 0 to {like.size - 1}; given: {client}")
            own = like.only(client)
            for level in LEVELS:
                rows = getattr(own, level)
                _check_finite(f"{self.file}: {level}", () if rows is None else rows.rows)
        else:
            parts = self._files(task) if self.loader == "files" else self._called()
            forms = (like.upper.rows, like.lower.rows, like.upper.rows)
            upper, lower, *test = rows = [_alike(self.file, *of) for of in zip(LEVELS, parts, forms, strict=False)]
            for of in zip(LEVELS, rows, forms, strict=False) if is_ours(type(settings)) else ():
                _check_places(self.file, *of)
            own = Population.build(like.problem, [upper], [lower], None, like.batch_size, test or None, like.own_x)
        if not is_ours(type(settings)):
            check_means(own, task.x, task.y, pooled=True)
        return task, own

    def table(self, settings: Any, number: int) -> SiteTable:
        """The site's table, of which only the columns that its own task declares are read."""
        columns = settings.columns
        if self.loader != "table" or columns is None or columns.features is None:
            raise InputError(f'{self.file}: {self.task} with loader = "{self.loader}" has no table with named features')
        if not self.path:
            raise InputError(f"{self.file}: path must name a .csv or .parquet file, or a folder of images")
        return site_table(opened_source(self.file.parent / self.path), columns, number)

    def _of_table(self, settings: Any, number: int, fit: str) -> Task:
        """The task on this site's table, preprocessed as all sites' tables together."""
        table, preprocessing = self.table(settings, number), Preprocessing.decoded(fit.encode())
        if preprocessing.columns != settings.columns or not 0 <= number < len(preprocessing.training):
            raise InputError(f"the preprocessing is for other columns or sites than those of {self.task}: refused")
        rows = sum(preprocessing.training) + sum(preprocessing.validating)
        if rows > MOST_ROWS or preprocessing.training[number] != int(table.trains.sum()):
            raise InputError(f"{self.file}: the table has other rows than when the run began, or too many: restore it")
        return settings.build(Tables.of(preprocessing, {number: table}))

    def _built(self, settings: Any, number: int, sites: Sequence[Sequence[int]]) -> Task:
        """The task; own ones may read this site's own file."""
        own = not is_ours(type(settings))
        if self.loader == "task" and not (own and self.data):
            raise InputError(f"{self.file}: loader = task is for own tasks, and data must name the folder of this site's file")
        folder = str(self.file.parent / self.data) if own and self.data else self.data
        if self.loader == "share" or not own:
            return settings.build(folder)
        counts = tuple(map(tuple, sites))
        task = built(settings, ClientData(folder, counts, number if self.loader == "task" else None))
        if task.population.size != len(counts) or task.declared is None or not (self.loader != "task" or task.declared.found):
            raise InputError(
                f"{self.task} does not read its clients' rows through `data: fedbilevel.ClientData`, as on a federation it must"
            )
        if self.loader == "task" and counts[number] not in ((), task.declared.found):
            raise InputError(
                f"this site's file had {counts[number]} rows when the run began, and now has {task.declared.found}"
            )
        return task

    def _files(self, task: Task) -> list[Tree]:
        file = self.file.parent / self.path
        if not self.path or not file.is_file():
            raise InputError(f"{self.file}: path must name an .npz file; given: {self.path!r}")
        arrays, parts = read_arrays(file), []
        like = task.population
        for what, shards in zip(LEVELS, (like.upper, like.lower, like.upper), strict=True):
            paths, structure = jax.tree_util.tree_flatten_with_path(shards.rows)
            names = [
                "_".join([what, *(str(getattr(key, "name", getattr(key, "key", key))) for key in path)]) for path, _ in paths
            ]
            if what == "test" and not any(name in arrays for name in names):
                continue
            for name in names:
                if name not in arrays:
                    raise InputError(f"{file} has no array {name!r}: {self.task} needs {', '.join(names)}")
            parts.append(jax.tree.unflatten(structure, [arrays[name] for name in names]))
        return parts

    def _called(self) -> Sequence[Tree]:
        """What the site's own function returns. Only the site can name it: no message can."""
        module, colon, name = self.function.partition(":")
        if not (module and colon and name):
            raise InputError(f"{self.file}: function must be of the form module:name; given: {self.function!r}")
        try:
            parts = getattr(importlib.import_module(module), name)()
            if not (isinstance(parts, tuple | list) and len(parts) in (2, 3)):
                raise TypeError(f"it returns {type(parts).__name__}")
        except (ImportError, AttributeError) as error:
            raise InputError(f"{self.file}: {self.function} cannot be imported ({error})") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.file}: {self.function} must return (upper rows, lower rows) ({error})") from None
        return parts


def _alike(file: Path, what: str, rows: Tree, wanted: Tree) -> Tree:
    """The rows in the types of the task's; `InputError` unless they are built alike and hold finite numbers."""
    given: Any = jax.tree.structure(rows)
    if given != jax.tree.structure(wanted):
        raise InputError(f"{file}: the {what} rows must be {jax.tree.structure(wanted)}, not {given}")
    made = []
    for (path, mine), theirs in zip(jax.tree_util.tree_leaves_with_path(rows), jax.tree.leaves(wanted), strict=True):
        name, mine = what + jax.tree_util.keystr(path), np.asarray(mine)
        if mine.ndim == 0 or mine.shape[1:] != theirs.shape[1:]:
            raise InputError(
                f"{file}: {name} has rows of {mine.dtype}{list(mine.shape[1:])}, "
                f"but the task's are {theirs.dtype}{list(theirs.shape[1:])}"
            )
        made.append(converted(f"{file}: {name}", mine, theirs.dtype))
    _check_finite(f"{file}: {what}", alike := jax.tree.unflatten(given, made))
    return alike


def _check_finite(what: str, rows: Tree) -> None:
    """Raise `InputError` if a number of some rows is not finite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        if np.issubdtype(leaf.dtype, np.floating) and not np.isfinite(leaf).all():
            raise InputError(f"{what}{jax.tree_util.keystr(path)} holds a value that is not finite: fix the data")


def _check_places(file: Path, what: str, rows: Tree, wanted: Tree) -> None:
    """Raise `InputError` if whole numbers cannot be labels and places of one of the package's own tasks."""
    for (path, mine), theirs in zip(jax.tree_util.tree_leaves_with_path(rows), jax.tree.leaves(wanted), strict=True):
        name = what + jax.tree_util.keystr(path)
        if np.issubdtype(mine.dtype, np.signedinteger) and mine.min(initial=0) < 0:
            raise InputError(f"{file}: {name} must not be below 0; given: {mine.min()}")
        if name.endswith(".place") and mine.max(initial=0) > theirs.max():  # it would pass for the last one
            raise InputError(f"{file}: {name} must be at most {theirs.max()}, the task's last; given: {mine.max()}")
