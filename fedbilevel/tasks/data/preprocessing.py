"""Preprocessing that is fitted to the tables of all sites from sums alone, and equals that of all rows in one table.

    numbers      missing values become the mean; then (v - mean) / deviation over all rows; a constant column becomes 0
    categories   missing values become the most frequent category (of several the first in order); then one-hot

as scikit-learn's SimpleImputer, StandardScaler and OneHotEncoder do, on the training and validation rows of all sites.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from fedbilevel.errors import InputError, warn
from fedbilevel.tasks.data.columns import Columns
from fedbilevel.tasks.data.table_files import Source, Table, opened, read_table
from fedbilevel.tasks.data.table_sums import Deviations, Names, Sums, Totals, index_of, require_categories
from fedbilevel.user_files import decoded, naming, read_bytes

EVERYWHERE = "in every row of every site"


class Sites(Protocol):
    """The tables of all sites, wherever they are."""

    size: int

    def union(self, question: Names) -> list[list[str]]:
        """For each column the categories of all sites."""

    def total(self, question: Totals | Deviations) -> np.ndarray:
        """The sum of all sites' answers."""


@dataclass(frozen=True)
class Preprocessing:
    """What turns the columns of a table into features and labels, the same at every site."""

    columns: Columns
    means: Sequence[float]  # of `columns.numbers`
    deviations: Sequence[float]  # 1 for a constant column
    categories: Mapping[str, Sequence[str]]  # of `columns.texts`
    most_frequent: Mapping[str, str]
    training: Sequence[int]  # rows of each site that train
    validating: Sequence[int]  # and that validate

    @classmethod
    def assumed(cls, columns: Columns, sizes: Sequence[int]) -> Preprocessing:
        """One in place of that of sites which have said nothing yet, each with as many rows as assumed."""
        numbers = len(columns.numbers)
        categories = {name: columns.declared[name] or ["unknown"] for name in columns.texts}
        frequent = {name: of[0] for name, of in categories.items()}
        return cls(columns, [0.0] * numbers, [1.0] * numbers, categories, frequent, sizes, sizes)

    @property
    def names(self) -> list[str]:
        """What the features are called, one after another."""
        of = {name: [f"{name}={value}" for value in values] for name, values in self.categories.items()}
        return [feature for name in self.columns.features or () for feature in of.get(name, [name])]

    @property
    def classes(self) -> Sequence[str]:
        """The classes of the label, in the order of their numbers; empty if it is a number itself."""
        return self.categories.get(self.columns.label, [])

    def apply(self, table: Source) -> np.ndarray:
        """The features of new rows, of which the label need not be known: a file, or a dictionary of columns.

        Raises:
            InputError: a column is missing, or a cell cannot be used, such as a category that no site had.
        """
        columns = self.columns
        return self.features(read_table(opened(table), columns.number_features, columns.category_features, ()))

    def features(self, table: Table) -> np.ndarray:
        """The features of a table's rows."""
        scaled = {name: (mean, of) for name, mean, of in zip(self.columns.numbers, self.means, self.deviations, strict=True)}
        parts = []
        for name in self.columns.features or ():
            if name in scaled:
                mean, deviation = scaled[name]
                parts.append(np.nan_to_num((table.numbers[name] - mean) / deviation)[:, None])
            else:
                known = self.categories[name]
                found, there = index_of(table, name, known)
                found[~there] = known.index(self.most_frequent[name])
                parts.append(np.eye(len(known))[found])
        return np.concatenate(parts, 1).astype(_float())

    def labelled(self, table: Table) -> dict[str, np.ndarray]:
        """The rows of a table with features, label and, where there is a column for it, weight, which is 1 on average."""
        columns = self.columns
        if columns.label in columns.declared:
            label, _ = index_of(table, columns.label, self.classes)
        else:
            label = table.numbers[columns.label].astype(_float())
        rows = {"features": self.features(table), "label": label}
        if columns.weight:
            rows["weight"] = (table.numbers[columns.weight] / self.means[-1]).astype(_float())
        return rows

    def filler(self, rows: int) -> dict[str, np.ndarray]:
        """As many rows like those of `labelled`, whose numbers mean nothing."""
        label = np.int32 if self.classes else _float()
        filled = {"features": np.zeros((rows, len(self.names)), _float()), "label": np.zeros(rows, label)}
        return filled | ({"weight": np.ones(rows, _float())} if self.columns.weight else {})

    def encoded(self) -> bytes:
        """It as JSON."""
        return (json.dumps(asdict(self), indent=2) + "\n").encode()

    @classmethod
    def decoded(cls, data: bytes) -> Preprocessing:
        """What `encoded` returned; `InputError` if it is something else."""
        read = decoded(data, cls)
        sizes = {len(read.columns.numbers), len(read.means), len(read.deviations)}
        known = all(read.most_frequent.get(name) in of for name, of in read.categories.items())
        sites = len(read.training) == len(read.validating) and min((*read.training, *read.validating), default=0) > 0
        usable = np.isfinite([*read.means, *read.deviations]).all() and min(read.deviations, default=1) > 0
        known = known and list(read.categories) == read.columns.texts and read.columns.features is not None
        declared = all(not of or list(read.categories.get(name, ())) == list(of) for name, of in read.columns.declared.items())
        if len(sizes) > 1 or not (known and sites and usable and declared):
            raise InputError("its parts do not fit together: restore it")
        for name, of in read.categories.items():
            require_categories(f"column {name!r}", of)
        return read

    @classmethod
    def load(cls, path: str | Path) -> Preprocessing:
        """The preprocessing in a file; `InputError` if it is another file or damaged."""
        content = read_bytes(Path(path))
        with naming(path):
            return cls.decoded(content)


def fitted(columns: Columns, sites: Sites) -> Preprocessing:
    """The preprocessing of all sites' rows, from their sums."""
    categories = _categories(columns, sites)
    asked = Totals(categories, sites.size)
    sums = Sums.split(sites.total(asked), columns, asked)
    rows = sums.rows.sum()
    for name, present in zip(columns.numbers, sums.present, strict=True):
        if not present:
            raise InputError(f"column {name!r} is missing {EVERYWHERE}: leave it out")
    rough = sums.sums / sums.present
    first, second = np.split(sites.total(Deviations(rough)), 2)
    means = rough + first / sums.present
    variances = np.maximum(second - first**2 / sums.present, 0) / rows
    constant = np.sqrt(variances) <= np.finfo(float).eps * np.abs(means)  # rounding leaves far less than that
    ends = np.cumsum([0, *map(len, categories.values())])
    by_column = {name: sums.counts[a:b] for name, a, b in zip(categories, ends[:-1], ends[1:], strict=True)}
    _check(columns, dict(zip(columns.numbers, zip(means, constant, strict=True), strict=True)), by_column)
    return Preprocessing(
        columns,
        means.tolist(),
        np.where(constant, 1.0, np.sqrt(variances)).tolist(),
        categories,
        {name: of[int(np.argmax(by_column[name]))] for name, of in categories.items()},
        sums.training.astype(int).tolist(),
        (sums.rows - sums.training).astype(int).tolist(),
    )


def _categories(columns: Columns, sites: Sites) -> dict[str, list[str]]:
    unknown = [name for name in columns.texts if not columns.declared[name]]
    found = dict(zip(unknown, sites.union(Names()), strict=True)) if unknown else {}
    for name, of in found.items():
        if not of:
            raise InputError(f"column {name!r} is missing {EVERYWHERE}: leave it out")
        require_categories(f"column {name!r} of all sites together", of)
    return {name: found.get(name) or list(columns.declared[name]) for name in columns.texts}


def _check(columns: Columns, numbers: Mapping[str, tuple[float, bool]], counts: Mapping[str, np.ndarray]) -> None:
    """Raise `InputError` for a label or weights that cannot be used, and warn about features that say nothing."""
    for name in columns.features or ():
        if numbers[name][1] if name in numbers else np.count_nonzero(counts[name]) < 2:
            warn(f"column {name!r} has the same value {EVERYWHERE}, and says nothing: leave it out")
    label = columns.label
    if numbers[label][1] if label in numbers else np.count_nonzero(counts[label]) < 2:
        raise InputError(f"the label {label!r} is the same {EVERYWHERE}, so there is nothing to learn: check the column")
    if columns.weight and not numbers[columns.weight][0] > 0:
        raise InputError(f"the weights in column {columns.weight!r} must be above 0 on average: check the column")


def _float() -> Any:
    return jax.dtypes.canonicalize_dtype(float)
