"""The questions about tables and their answers over a transport: what a server may ask of a site's table, and what it gets.

Sites' answers are checked, since a site may send anything, and so are the questions. What is wrong in a table is for its site
alone: a line that quotes a cell stays in the site's log.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedbilevel.core.population import MOST_ROWS
from fedbilevel.engines import wire
from fedbilevel.engines.exchange import Transport
from fedbilevel.engines.failure import Kind
from fedbilevel.errors import InputError, Withheld
from fedbilevel.tasks.data.columns import Columns
from fedbilevel.tasks.data.table_sums import QUESTIONS, Deviations, Names, SiteTable, Sums, Totals, length, require_categories
from fedbilevel.tasks.data.tables import united


def answered(site: SiteTable, sites: int, data: bytes) -> bytes:
    """A site's answer to a question in a run of so many; `InputError`, which says nothing about the table, if there is none."""
    question = wire.decode(data, QUESTIONS)
    if isinstance(question, Totals) and question.sites != sites:
        raise InputError(f"the question about a table is not for the {sites} sites of its run: refused")
    try:
        return wire.encode(site.answer(question))
    except InputError as error:
        raise Withheld("this site cannot answer about its table; its log says why", error) from None


class RemoteTables:
    """The tables of all sites behind a transport, as `fitted` asks them: each must answer, or there is no fit."""

    def __init__(self, transport: Transport, columns: Columns, size: int):
        self._transport, self._columns, self.size = transport, columns, size

    def union(self, question: Names) -> list[list[str]]:
        """For each column the categories of all sites."""
        columns = [name for name in self._columns.texts if not self._columns.declared[name]]
        answers = self._ask(question)
        for m, answer in enumerate(answers):
            texts = isinstance(answer, list) and all(isinstance(of, list) and all(map(_is_name, of)) for of in answer)
            if not texts or len(answer) != len(columns):
                raise InputError(f"client {m} answers with something that is not the categories of its table: leave it out")
            for name, of in zip(columns, answer, strict=True):
                require_categories(f"client {m}: column {name!r}", of)
        return united(answers)

    def total(self, question: Totals | Deviations) -> np.ndarray:
        """The sum of all sites' answers."""
        answers, shape = self._ask(question), (length(self._columns, question),)
        for m, answer in enumerate(answers):
            if not (isinstance(answer, np.ndarray) and answer.shape == shape and answer.dtype == np.float64):
                raise InputError(f"client {m} answers with something that is not the sums of its table: leave it out")
            if not np.isfinite(answer).all():
                raise InputError(f"client {m} answers with sums that are not finite: leave it out")
            if isinstance(question, Totals) and not _are_counts(Sums.split(answer, self._columns, question), m):
                raise InputError(f"client {m} answers with numbers of rows that no table has: leave it out")
        return np.sum(answers, 0)

    def _ask(self, question: Names | Totals | Deviations) -> list[Any]:
        request = wire.encode(question)
        replies, failures = self._transport.ask({m: request for m in range(self.size)})
        for failure in failures.values():
            kind = InputError if failure.kind is Kind.REFUSED else RuntimeError
            raise kind(f"the run cannot begin before all sites have answered about their tables; {failure}")
        return [wire.decode(replies[m]) for m in range(self.size)]


def _are_counts(sums: Sums, m: int) -> bool:
    """Whether these can be the counts of client m's table, of which some rows train and others validate."""
    rows, training = sums.rows[m], sums.training[m]
    whole = np.concatenate([sums.rows, sums.training, sums.present, sums.counts])
    others = [*np.delete(sums.rows, m), *np.delete(sums.training, m)]
    within = 1 <= training < rows <= MOST_ROWS and not any(others)
    return bool(within and (whole == np.floor(whole)).all() and (whole >= 0).all() and (whole <= rows).all())


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()
