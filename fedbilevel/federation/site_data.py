"""A site's own data, as its `site.toml` describes it: none of it is sent, and a run of another task is refused."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.federation.site_policy import SitePolicy
from fedbilevel.registry import find
from fedbilevel.settings import configure, nearest
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.base import Task
from fedbilevel.user_files import Scalar, read_arrays, read_toml

LOADERS = ("share", "files", "function")


@dataclass(frozen=True)
class SiteData:
    """What a site says about its data."""

    file: Path
    task: str
    loader: str
    client: int = 0  # share: which of the simulated clients it is
    path: str = ""  # files: the .npz, relative to the configuration
    function: str = ""  # function: module:name
    data: str = ""  # folder of data sets that are not bundled
    knobs: Mapping[str, Scalar] = field(default_factory=dict)  # settings of the task that the site insists on
    policy: SitePolicy = field(default_factory=SitePolicy)

    def __post_init__(self) -> None:
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
        for name, value in self.knobs.items():
            if name not in knobs:
                raise InputError(f"this site insists on a knob {name!r} that {task} does not have{nearest(name, knobs)}")
            if value != knobs[name]:
                raise InputError(f"this site insists on {name} = {value}, but the run has {name} = {knobs[name]}: refused")

    def load(self, knobs: Mapping[str, Any]) -> tuple[Task, Population]:
        """The task, and this site's own rows for it as a population of one."""
        task = configure(find(TASKS.bundled, "task", self.task).load(), self.task, knobs).build(self.data)
        if self.loader == "share":
            if not 0 <= self.client < task.population.size:
                raise InputError(f"{self.file}: client must be from 0 to {task.population.size - 1}; given: {self.client}")
            return task, task.population.only(self.client)
        upper, lower = self._files(task) if self.loader == "files" else self._called()
        like = task.population
        for what, rows, wanted in (("upper", upper, like.upper.rows), ("lower", lower, like.lower.rows)):
            _check_alike(self.file, what, rows, wanted)
        return task, Population.build(like.problem, [upper], [lower], batch_size=like.batch_size)

    def _files(self, task: Task) -> tuple[Tree, Tree]:
        file = self.file.parent / self.path
        if not self.path or not file.is_file():
            raise InputError(f"{self.file}: path must name an .npz file; given: {self.path!r}")
        arrays, parts = read_arrays(file), []
        for what, shards in (("upper", task.population.upper), ("lower", task.population.lower)):
            paths, structure = jax.tree_util.tree_flatten_with_path(shards.rows)
            names = [
                "_".join([what, *(str(getattr(key, "name", getattr(key, "key", key))) for key in path)]) for path, _ in paths
            ]
            for name in names:
                if name not in arrays:
                    raise InputError(f"{file} has no array {name!r}: {self.task} needs {', '.join(names)}")
            parts.append(jax.tree.unflatten(structure, [arrays[name] for name in names]))
        return parts[0], parts[1]

    def _called(self) -> tuple[Tree, Tree]:
        """What the site's own function returns. Only the site can name it: no message can."""
        module, colon, name = self.function.partition(":")
        if not (module and colon and name):
            raise InputError(f"{self.file}: function must be of the form module:name; given: {self.function!r}")
        try:
            upper, lower = getattr(importlib.import_module(module), name)()
        except (ImportError, AttributeError) as error:
            raise InputError(f"{self.file}: {self.function} cannot be imported ({error})") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.file}: {self.function} must return (upper rows, lower rows) ({error})") from None
        return upper, lower


def _check_alike(file: Path, what: str, rows: Tree, wanted: Tree) -> None:
    """Raise `InputError` unless rows are built like the task's, with finite numbers and possible labels and places."""
    given: Any = jax.tree.structure(rows)
    if given != jax.tree.structure(wanted):
        raise InputError(f"{file}: the {what} rows must be {jax.tree.structure(wanted)}, not {given}")
    for (path, mine), theirs in zip(jax.tree_util.tree_leaves_with_path(rows), jax.tree.leaves(wanted), strict=True):
        name, mine = what + jax.tree_util.keystr(path), np.asarray(mine)
        if (mine.dtype, mine.shape[1:]) != (theirs.dtype, theirs.shape[1:]):
            raise InputError(
                f"{file}: {name} has rows of {mine.dtype}{list(mine.shape[1:])}, "
                f"but the task's are {theirs.dtype}{list(theirs.shape[1:])}"
            )
        if np.issubdtype(mine.dtype, np.floating) and not np.isfinite(mine).all():
            raise InputError(f"{file}: {name} holds a value that is not finite: fix the data")
        if np.issubdtype(mine.dtype, np.signedinteger) and mine.min(initial=0) < 0:
            raise InputError(f"{file}: {name} must not be below 0; given: {mine.min()}")
        if name.endswith(".place") and mine.max(initial=0) > theirs.max():  # it would pass for the last one
            raise InputError(f"{file}: {name} must be at most {theirs.max()}, the task's last; given: {mine.max()}")
