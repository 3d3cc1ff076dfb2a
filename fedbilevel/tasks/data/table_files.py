"""Tables as people have them: CSV and Parquet files, or dictionaries of columns, read cell by cell.

A CSV file is in UTF-8, with commas, decimal points and a header. A cell that cannot be used is refused with its file, line and
column. In a column of numbers an empty cell and the words in `MISSING` are missing values; in one of categories, whose cells
are taken as text, only an empty cell is.
"""

from __future__ import annotations

import csv
import decimal
import math
import numbers
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedbilevel.errors import InputError, in_one_line, require
from fedbilevel.settings import nearest
from fedbilevel.user_files import require_file

MISSING = ("", "na", "n/a", "nan", "null", "none")  # in any case
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII)
LARGEST = 1e30  # whose squares can be added up, and which float32 holds
SUFFIXES = (".csv", ".parquet")
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}

Source = str | Path | Mapping[str, Any]


class Opened(NamedTuple):
    """A table whose cells have not been read yet."""

    name: str
    header: Sequence[str]
    rows: Iterator[tuple[int, Sequence[Any]]]  # the number of its line or row, and its cells
    lines: bool  # whether these are the lines of a text file, of which the header is the first
    files: Sequence[str] = ()  # of each row, where a row is a file

    def place(self, number: int) -> str:
        """Where a line or row is, for errors."""
        if self.files:
            return f"{self.name}/{self.row(number)}"
        return f"{self.name}:{number}" if self.lines else f"{self.name}, row {number}"

    def row(self, number: int) -> str:
        """What tells a line or row from the others."""
        return self.files[number - 1] if self.files else str(number)

    @property
    def top(self) -> str:
        """Where the header is, for errors."""
        return self.place(1) if self.lines else self.name


class Table(NamedTuple):
    """The columns of a table that are used."""

    numbers: Mapping[str, np.ndarray]  # float64; NaN where missing
    categories: Mapping[str, Sequence[str]]  # "" where missing
    places: Callable[[int], str]  # where row k is, for errors
    name: str
    size: int
    rows: Sequence[str]  # what tells each row from the others: its line, its number or its file


def opened(source: Source, called: str = "the table") -> Opened:
    """A file by its ending, or a dictionary of columns, for which errors use the name given."""
    if isinstance(source, Mapping):
        return _columns(source, called)
    require(isinstance(source, str | Path), called, "a path, or a dictionary of columns", source)
    path = Path(source)
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path} must be a table whose name ends in {' or '.join(SUFFIXES)}: save it as one")
    try:
        require_file(path)
        return _csv(path) if path.suffix.lower() == ".csv" else _parquet(path)
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({in_one_line(error)})") from None


def read_table(table: Opened, number_columns: Sequence[str], category_columns: Sequence[str], full: Collection[str]) -> Table:
    """These columns of a table; those in `full` may not have missing values."""
    header = Counter(name for name in table.header if name)
    for name, times in header.items():
        if times > 1:
            raise InputError(f"{table.top}: the header has {times} columns {name!r}: give each a name of its own")
    for name in (*number_columns, *category_columns):
        if name not in header:
            raise InputError(f"{table.top}: there is no column {name!r}{nearest(name, header)}")
    kinds = [(name, _number) for name in number_columns] + [(name, _category) for name in category_columns]
    found: dict[str, Any] = {name: array("d") if kind is _number else [] for name, kind in kinds}
    wanted = [(name, table.header.index(name), kind, found[name].append) for name, kind in kinds]
    lines = array("q")
    for line, cells in table.rows:
        if len(cells) != len(table.header):
            raise InputError(f"{table.place(line)}: {len(cells)} cells, but the header has {len(table.header)} columns")
        for name, position, kind, append in wanted:
            try:
                value = kind(cells[position])
            except ValueError as error:
                raise InputError(f"{table.place(line)}: column {name!r}: {error}") from None
            if name in full and (value == "" or value != value):
                raise InputError(f"{table.place(line)}: column {name!r} has no value: fill it in, or leave the row out")
            append(value)
        lines.append(line)
    if not lines:
        raise InputError(f"{table.name} has a header but no rows: give a table with rows, or leave it out")
    as_arrays = {name: np.frombuffer(found[name], float) for name in number_columns}
    texts = {name: found[name] for name in category_columns}
    return Table(as_arrays, texts, lambda k: table.place(lines[k]), table.name, len(lines), [table.row(k) for k in lines])


def is_number(cell: Any) -> bool:
    """Whether a cell can stand in a column of numbers."""
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def kind_of_cell(cell: Any) -> Literal["missing", "number", "word"]:
    """What somebody meant by a cell, be it a number that cannot be used, such as one with a decimal comma."""
    if cell is None or cell != cell:
        return "missing"
    text = str(cell).strip().lower()
    if text in MISSING:
        return "missing"
    return "number" if not isinstance(cell, str) or _is_number(text.replace(",", ".", 1)) else "word"


def _is_number(text: str) -> bool:
    return bool(NUMBER.fullmatch(text)) or text.lstrip("+-") in ("inf", "infinity")


def _number(cell: Any) -> float:
    """The number in a cell, NaN if it is missing; `ValueError` says what is wrong."""
    if isinstance(cell, str):
        text = cell.strip().lower()
        if text in MISSING:
            return math.nan
        if not _is_number(text):
            comma = _is_number(text.replace(",", ".", 1))
            hint = "write decimals with a point" if comma else "correct it, or list the column among the categories"
            raise ValueError(f"{_quoted(cell)} is not a number: {hint}")
        value = float(text)
    elif cell is None:
        return math.nan
    elif isinstance(cell, numbers.Real | decimal.Decimal | np.bool_):
        value = float(cell)
    else:
        raise ValueError(f"{_quoted(cell)} is not a number")
    if abs(value) > LARGEST:
        raise ValueError(f"{_quoted(cell)} is not a number between -{LARGEST:g} and {LARGEST:g}: correct it or leave it empty")
    return value


def _category(cell: Any) -> str:
    """The category in a cell as text, "" if it is missing; `ValueError` says what is wrong."""
    if cell is None:
        return ""
    if isinstance(cell, float | np.floating):  # as tables with missing values hold whole numbers
        return "" if math.isnan(cell) else str(int(cell)) if cell.is_integer() else repr(float(cell))
    if not isinstance(cell, str | bool | int | np.integer | np.bool_):
        raise ValueError(f"{_quoted(cell)} is not a category: give text or whole numbers")
    return str(cell).strip()


def _quoted(cell: Any) -> str:
    return repr(in_one_line(cell, 40))


def _columns(given: Mapping[str, Any], called: str) -> Opened:
    columns = {str(name): list(column) for name, column in given.items()}
    if len({len(column) for column in columns.values()}) > 1:
        sizes = ", ".join(f"{name!r} {len(column)}" for name, column in columns.items())
        raise InputError(f"{called}: its columns must have equally many rows; given: {in_one_line(sizes)}")
    return Opened(called, list(columns), enumerate(zip(*columns.values(), strict=True), 1), lines=False)


def _csv(path: Path) -> Opened:
    rows = _csv_rows(path)
    _, header = next(rows, (1, ()))
    if not header:
        raise InputError(f"{path} is empty: give a table with a header and rows")
    for separator, name in OTHER_SEPARATORS.items():
        if len(header) == 1 and separator in header[0]:
            raise InputError(f"{path}:1: the columns are separated by {name}: save it with commas, and with decimal points")
    return Opened(str(path), [name.strip() for name in header], rows, lines=True)


def _csv_rows(path: Path) -> Iterator[tuple[int, Sequence[str]]]:
    with path.open("rb") as file:
        reader = csv.reader(_lines(path, file), strict=True)
        try:
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except csv.Error as error:
            raise InputError(f"{path}:{max(reader.line_num, 1)}: it is not a CSV file ({in_one_line(error)})") from None


def _lines(path: Path, file: Any) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise InputError(f"{path}:{number}: it is not text in UTF-8: save it as CSV in UTF-8")
        yield text


def _parquet(path: Path) -> Opened:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(f"{path} needs pyarrow, which is not installed: pip install 'fedbilevel[parquet]'") from None
    try:
        file = ParquetFile(path)
        header = list(file.schema_arrow.names)
    except (ArrowException, ValueError) as error:
        raise InputError(f"{path} is not a Parquet file ({in_one_line(error)})") from None

    def rows() -> Iterator[tuple[int, Sequence[Any]]]:
        number = 0
        try:
            for batch in file.iter_batches():
                columns = [column.to_pylist() for column in batch.columns]
                for cells in zip(*columns, strict=True):
                    number += 1
                    yield number, cells
        except (ArrowException, ValueError, OSError) as error:
            raise InputError(f"{path}, after row {number}: it is damaged ({in_one_line(error)})") from None

    return Opened(str(path), header, rows(), lines=False)
