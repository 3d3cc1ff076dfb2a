"""Where a task finds its clients' rows: all in one folder, or on a federation each at its own site.

A task always has all its clients. In a simulation all rows are there. At a site only its own are, and at the server none: in
place of the others stand as many rows of the same form, whose numbers mean nothing. So lists, lengths and places in x are
the same everywhere, and a task is written once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedbilevel.core.client_lists import converted
from fedbilevel.core.devices import require_memory
from fedbilevel.errors import InputError, require
from fedbilevel.tasks.data.columns import Columns
from fedbilevel.tasks.data.preprocessing import Preprocessing
from fedbilevel.tasks.data.tables import Tables, tables_in

if TYPE_CHECKING:
    from fedbilevel.tasks.base import Task

ASSUMED = 100  # rows of a site that has not said how many it has
RowCounts = tuple[tuple[int, ...], ...]  # for each site how many rows each call of `each` has found; () if it has not said


@dataclasses.dataclass(frozen=True)
class ClientData:
    """The data of a task's clients, as far as they are here: what a task's argument `data` is if it has this type."""

    folder: str = ""
    sites: RowCounts | None = None  # of a federation; None: all clients are simulated
    here: int | None = None  # the site whose rows are here; None: the server, which has none
    fit: str = ""  # of a federation's tables: their `Preprocessing`, as text
    filler: int = 0  # what stands for rows that are elsewhere
    found: list[int] = dataclasses.field(default_factory=list, compare=False)  # rows that are here, by call of `each`

    def each(self, pattern: str, read: Callable[[Path], ArrayLike], row: ArrayLike) -> list[np.ndarray]:
        """For every client the rows that `read` returns for its file; files are in the order of their names.

        Args:
            pattern: which files of the folder are clients, such as "*.csv"; at a site exactly one must match.
            read: from a file to an array with a row per sample.
            row: any one row, which shows the form of all: its shape and type. Rows of other types are converted where that
                loses nothing but digits of floats.

        Raises:
            InputError: there is no such file, or its rows have another form.
        """
        form = np.asarray(row)
        require(isinstance(pattern, str) and callable(read), "each", "given a pattern, a function and a row", (pattern, read))
        if self.sites is None:
            files = self._files(pattern)
            self.found.append(0)
            return [_rows(file, read, form) for file in files]
        own = None
        if self.here is not None:
            files = self._files(pattern)
            if len(files) > 1:
                raise InputError(f"{self.folder} has {len(files)} files {pattern}, and a site is one client: leave one there")
            own = _rows(files[0], read, form)
        call, assumed = len(self.found), ASSUMED if own is None else len(own)
        self.found.append(0 if own is None else len(own))
        lengths = [said[call] if call < len(said) else assumed for said in self.sites]
        require_memory(f"{pattern}: the sites' {sum(lengths):,} rows", sum(lengths) * form.nbytes, "leave out the largest")
        filled = [np.full((n, *form.shape), self.filler, form.dtype) for n in lengths]
        return filled if own is None else [own if m == self.here else rows for m, rows in enumerate(filled)]

    def tables(self, columns: Columns) -> Tables:
        """The clients' tables, as far as they are here: all those of the folder, or, at the server of a federation, none."""
        if self.sites is not None:
            if columns.features is None:
                raise InputError("name the features in Columns(...): on a federation there is no table here to see them in")
            assumed = Preprocessing.assumed(columns, [ASSUMED] * len(self.sites))
            return Tables.of(Preprocessing.decoded(self.fit.encode()) if self.fit else assumed, {})
        if not self.folder:
            raise InputError("a task on tables needs them: give the folder with one for each client with --data")
        return tables_in(self.folder, columns)

    def _files(self, pattern: str) -> list[Path]:
        files = sorted(Path(self.folder).glob(pattern))
        if not files:
            raise InputError(f"there is no file {pattern} in the folder {self.folder or '.'}: name the folder of the data")
        return files


def built(settings: Any, data: ClientData) -> Task:
    """The task of a federation; `InputError` if its start or the rows that are here depend on rows that are elsewhere."""
    first, second = (settings.build(dataclasses.replace(data, filler=filler)) for filler in (0, 1))
    pairs = [("x0", first.x, second.x), ("y0", first.y, second.y)]
    if data.here is not None and data.here < first.population.size:
        pairs += [("rows", *(_own_rows(task, data.here) for task in (first, second)))]
    for what, one, other in pairs:
        if not _equal(one, other):
            raise InputError(
                f"{type(settings).__name__}: {what} must not depend on the rows of other clients, which are at their sites: "
                "compute it from one client's rows alone, or make it a knob"
            )
    return dataclasses.replace(first, known_means=True)  # to be checked where the rows are


def _own_rows(task: Task, m: int) -> Any:
    own = task.population.only(m)
    return own.upper.rows, own.lower.rows, None if own.test is None else own.test.rows


def _equal(one: Any, other: Any) -> bool:
    import jax

    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in leaves)


def _rows(file: Path, read: Callable[[Path], ArrayLike], form: np.ndarray) -> np.ndarray:
    rows = np.asarray(read(file))
    if rows.ndim == 0 or rows.shape[1:] != form.shape:
        raise InputError(f"{file} has rows of shape {list(rows.shape[1:])}, and the task's have {list(form.shape)}")
    return converted(str(file), rows, form.dtype)
