"""What a site says about its table so that all sites' preprocessing can be fitted: three answers, and no row.

    Names        the categories in the columns for which none are declared
    Totals       rows; for each column of numbers how many are there and their sum; how often each category occurs
    Deviations   for each column of numbers the sum of v - c and of (v - c)², where c is the mean over all sites

The last two answers are vectors of which only the sum over the sites is used. Deviations are taken from the mean, so that no
digits are lost in columns such as timestamps. They say no more than the sum of squares does: a server that sends another c
can compute what it would have got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.errors import InputError, in_one_line
from fedbilevel.tasks.data.columns import LONGEST_CATEGORY, MOST_CATEGORIES, Columns
from fedbilevel.tasks.data.table_files import Table


class Names(NamedTuple):
    """Asks for the categories in the columns for which none are declared, in the order of `Columns.texts`."""


class Totals(NamedTuple):
    """Asks for counts and sums, given every column's categories and the number of sites; see `Sums` for the order."""

    categories: dict[str, list[str]]
    sites: int


class Deviations(NamedTuple):
    """Asks for sums of deviations, and then of their squares, from these means of `Columns.numbers`."""

    means: np.ndarray


QUESTIONS: dict[str, type] = {question.__name__: question for question in (Names, Totals, Deviations)}


class Sums(NamedTuple):
    """The parts of the answer to `Totals`, which is one vector."""

    rows: np.ndarray  # by site: its number of rows, and 0 at the others' places
    training: np.ndarray  # likewise
    present: np.ndarray  # by column of numbers
    sums: np.ndarray  # by column of numbers
    counts: np.ndarray  # by category, one column after another

    @classmethod
    def split(cls, vector: np.ndarray, columns: Columns, question: Totals) -> Sums:
        """The parts of the vector."""
        k = len(columns.numbers)
        return cls(*np.split(vector, np.cumsum([question.sites, question.sites, k, k])))


def length(columns: Columns, question: Totals | Deviations) -> int:
    """How many numbers an answer has."""
    if isinstance(question, Deviations):
        return 2 * len(columns.numbers)
    return 2 * (question.sites + len(columns.numbers)) + sum(map(len, question.categories.values()))


class SiteTable:
    """A site's table, the columns that its task declares, and the site's number."""

    def __init__(self, table: Table, columns: Columns, site: int):
        self.table, self.columns = table, columns
        self.trains = columns.trains(table, site)
        self._site = site

    @property
    def fewest(self) -> int:
        """How many rows train or validate, whichever are fewer."""
        return int(min(self.trains.sum(), (~self.trains).sum()))

    @property
    def training_rows(self) -> list[str]:
        """What tells each of the rows that train from the others."""
        return [self.table.rows[int(k)] for k in np.flatnonzero(self.trains)]

    def answer(self, question: Any) -> Any:
        """The answer to one of the three questions; `InputError` if it is another, or the table has no answer."""
        match question:
            case Names():
                return [self._names(name) for name in self.columns.texts if not self.columns.declared[name]]
            case Totals(categories=dict(categories), sites=int(sites)) if 0 <= self._site < sites:
                return self._totals(categories, sites)
            case Deviations(means=np.ndarray() as means) if _fits(means, len(self.columns.numbers)):
                return self._deviations(means)
            case _:
                raise InputError("this is no question about a table: refused")

    def _names(self, column: str) -> list[str]:
        names = sorted({*self.table.categories[column]} - {""})
        require_categories(f"{self.table.name}: column {column!r}", names)
        return names

    def _totals(self, categories: Mapping[str, Sequence[str]], sites: int) -> np.ndarray:
        declared = [
            list(categories[name]) == list(of) for name, of in self.columns.declared.items() if of and name in categories
        ]
        if list(categories) != self.columns.texts or not all(declared):
            raise InputError("the question about a table is for other columns or categories: refused")
        own = np.arange(sites) == self._site
        numbers = [self.table.numbers[name] for name in self.columns.numbers]
        counts: list[float] = []
        for name, known in categories.items():
            there = Counter(index_of(self.table, name, known)[0])
            counts += [there[k] for k in range(len(known))]
        present, sums = [np.sum(~np.isnan(v)) for v in numbers], [np.nansum(v) for v in numbers]
        return np.concatenate([own * self.table.size, own * self.trains.sum(), present, sums, counts], dtype=float)

    def _deviations(self, means: np.ndarray) -> np.ndarray:
        off = [self.table.numbers[name] - mean for name, mean in zip(self.columns.numbers, means, strict=True)]
        return np.array([np.nansum(d) for d in off] + [np.nansum(d**2) for d in off], float)


def index_of(table: Table, column: str, known: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The position of each row's category among the known ones, and whether it is there at all; where not, -1."""
    places = {name: k for k, name in enumerate(known)} | {"": -1}
    for k, name in enumerate(table.categories[column]):
        if name not in places:
            said = f"{table.places(k)}: column {column!r}: {in_one_line(name, 40)!r} is not one of its categories"
            raise InputError(f"{said}: correct it, or declare it as one")
    found = np.array([places[name] for name in table.categories[column]], np.int32)
    return found, found >= 0


def _fits(means: np.ndarray, size: int) -> bool:
    return means.shape == (size,) and means.dtype == np.float64 and bool(np.isfinite(means).all())


def require_categories(what: str, names: Sequence[str]) -> None:
    """Raise `InputError` if there are more or longer categories than a column may have."""
    if max(map(len, names), default=0) > LONGEST_CATEGORY:
        raise InputError(
            f"{what} has a category of more than {LONGEST_CATEGORY} characters: shorten it, or leave the column out"
        )
    if len(names) > MOST_CATEGORIES:
        raise InputError(
            f"{what} has {len(names)} categories, more than the {MOST_CATEGORIES} that are allowed: merge some, or leave it out"
        )
