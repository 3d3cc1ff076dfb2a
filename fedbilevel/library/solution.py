"""What `solve` found: printed in a line, shown in a notebook, drawn, saved and read back."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from fedbilevel.core.problem import LOSSES, Tree
from fedbilevel.errors import InputError
from fedbilevel.library.paths import path_of
from fedbilevel.report.history_picture import data_url, figure
from fedbilevel.runs.files import write_atomically
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.stored_trees import encoded, read_trees
from fedbilevel.settings import nearest
from fedbilevel.tasks.data.preprocessing import Preprocessing


class Found(NamedTuple):
    """The parts of a solution."""

    x: Tree
    y: Tree
    history: list[dict[str, float | None]]


class Solution(Found):
    """What `solve` found: x and y as the user's trees (y with a leading axis over clients if
    each has its own), and the metrics along the way, a dictionary for each time they were due.

    Beside these three it has `metrics`, those at x and y; the `preprocessing` of the tables that the rows are from, or None;
    and `best_round`: the round that x and y are of, if the run kept the best; None if they are the last.
    """

    preprocessing: Preprocessing | None
    best_round: int | None

    def __new__(
        cls,
        x: Tree,
        y: Tree,
        history: list[Any],
        preprocessing: Preprocessing | None = None,
        best_round: int | None = None,
    ) -> Self:
        """The parts, which alone are what it unpacks to, the preprocessing, and the round."""
        self = super().__new__(cls, x, y, history)
        self.preprocessing, self.best_round = preprocessing, best_round
        return self

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics at x and y: those of the best round if the run kept it, and else the last; empty without a history."""
        of_best = [row for row in self.history if row["rounds"] == self.best_round]
        return (of_best or self.history or [{}])[-1]

    def __repr__(self) -> str:
        """A line: the sizes of x and y, and the losses there."""
        here = self.metrics
        losses = ", ".join(f"{name} {here[name]:.4g}" for name in LOSSES if here.get(name) is not None)
        best = "" if self.best_round is None else ", the best on held-out rows"
        at = f" after {here['rounds']} rounds{best}: {losses}" if losses else ""
        return f"<Solution: x of {_size(self.x)} numbers, y of {_size(self.y)}{at}>"

    def _repr_html_(self) -> str:
        """The line and the two losses as curves, for a notebook."""
        line = f"<p>{html.escape(repr(self))}</p>"
        return f'{line}<img alt="both losses against rounds" src="{data_url(self.plot())}">' if self.history else line

    def plot(self, *names: str) -> Any:
        """A matplotlib figure of these numbers of the history against rounds; of the two losses unless any are given.

        Raises:
            InputError: the history has no number of such a name.
        """
        known = list(dict.fromkeys(name for row in self.history for name in row))
        for name in names:
            if name not in known:
                raise InputError(f"the history has no number {name!r}{nearest(name, known)}")
        return figure(self.history, names or LOSSES)

    def to_pandas(self) -> Any:
        """The history as a pandas DataFrame with a row for each time metrics were due.

        Raises:
            InputError: pandas is not installed.
        """
        return data_frame(self.history)

    def save(self, path: str | Path) -> None:
        """Write it to an .npz file: x and y as arrays named by their paths in the trees, the history, and any preprocessing.

        Raises:
            InputError: the file's name does not end in .npz.
        """
        file = path_of("path", path)
        if file.suffix != ".npz":
            raise InputError(f"the file's name must end in .npz; given: {path}")
        write_atomically(file, encoded({"x": self.x, "y": self.y}, self.history, self.preprocessing, self.best_round))


def data_frame(rows: list[Any]) -> Any:
    """Dictionaries as the rows of a pandas DataFrame; `InputError` if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise InputError("to_pandas needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(rows)


def load(path: str | Path) -> Solution:
    """What `Solution.save` wrote, or what a run has found so far, given its folder; it executes no code of a run's.

    Arrays come back as NumPy's, in dictionaries, lists and tuples as they were; other nodes, such as modules, come back as
    dictionaries by the names of their fields. y is None where the sites of a federation keep it.

    Raises:
        InputError: there is no such file or run, or it has nothing to load yet.
    """
    place = path_of("path", path)
    if not place.is_dir():
        trees, history, preprocessing, best_round = read_trees(place)
        return Solution(trees.get("x"), trees.get("y"), history, preprocessing, best_round)
    run = only_run(place)
    trees = run.point()
    return Solution(trees.get("x"), trees.get("y"), run.rows(), run.preprocessing(), run.best_round())


def only_run(folder: Path) -> RunFolder:
    """The run in a folder or in its only subfolder with one; `InputError` if there is none, or several."""
    runs = RunFolder.find(folder)
    if len(runs) > 1:
        raise InputError(f"{folder} holds several runs: choose from {', '.join(str(run.path) for run in runs)}")
    return runs[0]


def _size(tree: Tree) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(tree))
