"""Tables of several sites as the clients' rows of a task, preprocessed alike from sums over the sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel.core.client_lists import one_per_client
from fedbilevel.core.devices import require_memory
from fedbilevel.errors import InputError, require
from fedbilevel.tasks.data.columns import Columns
from fedbilevel.tasks.data.datasets import existing_folder
from fedbilevel.tasks.data.image_tables import holds_images, opened_images
from fedbilevel.tasks.data.preprocessing import Preprocessing, fitted
from fedbilevel.tasks.data.table_files import SUFFIXES, Opened, Source, kind_of_cell, opened, read_table
from fedbilevel.tasks.data.table_sums import Deviations, Names, SiteTable, Totals

Rows = Mapping[str, np.ndarray]


class Tables(NamedTuple):
    """The rows of tables, ready for `Task.of` and `solve`.

    A client's rows are a dictionary with "features", "label" and, where there is a column for it, "weight"; those of `lower`,
    which train, also have "place", the row's own place among the training rows of all clients. There are always all clients: in
    place of rows that are elsewhere, at the sites of a federation, stand as many whose numbers mean nothing.
    """

    lower: Sequence[Rows]
    upper: Sequence[Rows]
    preprocessing: Preprocessing
    names: Sequence[Sequence[str]] = ()  # of each client's training rows, as far as these are here

    @classmethod
    def of(cls, preprocessing: Preprocessing, here: Mapping[int, SiteTable]) -> Tables:
        """The rows of the sites whose tables are here, by number."""
        rows = sum(preprocessing.training) + sum(preprocessing.validating)
        needed = rows * sum(column.nbytes for column in preprocessing.filler(1).values())
        require_memory(f"the sites' {rows:,} rows", needed, "leave out the largest")
        parts = [
            _parts(here[m], preprocessing) if m in here else [preprocessing.filler(n) for n in sizes]
            for m, sizes in enumerate(zip(preprocessing.training, preprocessing.validating, strict=True))
        ]
        ends = np.cumsum([0, *preprocessing.training])
        lower = [{**rows, "place": np.arange(*of, dtype=np.int32)} for (rows, _), of in zip(parts, pairwise(ends), strict=True)]
        names = [here[m].training_rows if m in here else () for m in range(len(parts))]
        return cls(lower, [rows for _, rows in parts], preprocessing, names)

    @property
    def sizes(self) -> Sequence[int]:
        """The number of training rows of each client."""
        return self.preprocessing.training

    @property
    def places(self) -> int:
        """The number of training rows of all clients together."""
        return sum(self.sizes)

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.preprocessing.names)


class Here:
    """Tables of all sites in this process, which answer as they would across a network."""

    def __init__(self, sites: Sequence[SiteTable]):
        self.size, self._sites = len(sites), sites

    def union(self, question: Names) -> list[list[str]]:
        """For each column the categories of all sites."""
        return united([site.answer(question) for site in self._sites])

    def total(self, question: Totals | Deviations) -> np.ndarray:
        """The sum of all sites' answers."""
        return np.sum([site.answer(question) for site in self._sites], 0)


def united(answers: Iterable[Sequence[Sequence[str]]]) -> list[list[str]]:
    """For each column the categories in any of the answers, in order."""
    return [sorted(set().union(*column)) for column in zip(*answers, strict=True)]


def tables(sources: Iterable[Source], columns: Columns) -> Tables:
    """Read the table of each client and preprocess all of them alike, from sums over the clients.

    Args:
        sources: for each client a CSV or Parquet file, or a dictionary of columns.
        columns: what the columns are.

    Warns about features that are the same everywhere.

    Raises:
        InputError: a table cannot be used; the line names the file, the line and the column.
    """
    require(isinstance(columns, Columns), "columns", "Columns(label=..., ...)", columns)
    opened_tables = [opened_source(source, f"table {m}") for m, source in enumerate(one_per_client("tables", sources))]
    named = columns.named(opened_tables[0])
    sites = [site_table(table, named, m) for m, table in enumerate(opened_tables)]
    for table in opened_tables if columns.features is None else ():
        named.require_same(table, opened_tables[0].name)
    return Tables.of(fitted(named, Here(sites)), dict(enumerate(sites)))


def tables_in(folder: str | Path, columns: Columns) -> Tables:
    """The tables of a folder, in the order of their names, one for each client."""
    return tables(sources_in(folder), columns)


def sources_in(folder: str | Path) -> list[Path]:
    """The tables of a folder, or its folders of images, in the order of their names, one for each client."""
    place = existing_folder(folder)
    files = sorted(file for file in place.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files and holds_images(place):
        raise InputError(f"{place} holds the images of one client: give the folder that has such a folder for each client")
    files = files or sorted(inside for inside in place.iterdir() if holds_images(inside))
    if not files:
        kinds = f"a {' or '.join(SUFFIXES)} file, or a folder of images,"
        raise InputError(f"{place} holds no tables: give a folder with {kinds} for each client")
    return files


def text_columns(sources: Iterable[Source], columns: Columns) -> list[str]:
    """The features in which more cells of all tables are words than numbers: a few words among numbers are mistakes."""
    words: Counter[str] = Counter()  # less numbers
    for m, source in enumerate(sources):
        table = opened_source(source, f"table {m}")
        if table.files:
            return []
        columns = columns.named(table)  # by the first
        places = [(table.header.index(name), name) for name in columns.features or () if name in table.header]
        for _, cells in table.rows:
            for k, name in places:
                if k < len(cells):
                    words[name] += {"word": 1, "number": -1}.get(kind_of_cell(cells[k]), 0)
    return [name for name in columns.features or () if words[name] > 0]


def opened_source(source: Source, called: str = "the table") -> Opened:
    """A table by its file, a folder of images, or a dictionary of columns, for which errors use the name given."""
    if isinstance(source, str | Path) and Path(source).is_dir() and Path(source).suffix not in SUFFIXES:
        return opened_images(Path(source))
    return opened(source, called)


def site_table(table: Opened, columns: Columns, site: int) -> SiteTable:
    """The columns of a site's table, ready to answer questions."""
    split = [columns.split] if columns.split else []
    read = read_table(table, columns.numbers, [*columns.texts, *split], columns.full)
    if columns.weight and (low := np.flatnonzero(read.numbers[columns.weight] < 0)).size:
        raise InputError(f"{read.places(int(low[0]))}: column {columns.weight!r}: a weight must not be below 0")
    return SiteTable(read, columns, site)


def _parts(site: SiteTable, preprocessing: Preprocessing) -> list[Rows]:
    """A site's rows that train, and those that validate."""
    rows = preprocessing.labelled(site.table)
    return [{name: of[part] for name, of in rows.items()} for part in (site.trains, ~site.trains)]
