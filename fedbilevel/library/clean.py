"""Which rows of several clients' tables have labels that look wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.client_lists import one_per_client
from fedbilevel.library.solve import solve
from fedbilevel.tasks.base import suited_to
from fedbilevel.tasks.data.columns import Columns
from fedbilevel.tasks.data.table_files import Source
from fedbilevel.tasks.data.tables import tables, text_columns
from fedbilevel.tasks.label_errors import LabelErrors, judged


def clean(
    sources: Iterable[Source],
    *,
    label: str = "label",
    checked: str = "checked",
    features: Sequence[str] = (),
    categories: Sequence[str] | None = None,
    rounds: int = 200,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Learn how far to trust each row of the clients' tables, from a few rows that were checked, as `fedbilevel clean` does.

    Args:
        sources: for each client a CSV or Parquet file, a folder of images, or a dictionary of columns.
        label, checked: the column of the label, and that which says of each row whether it was checked: yes or no.
        features: the columns to predict the label from; all others unless given.
        categories: which of them hold categories; those with a cell that is not a number unless given.
        rounds: communication rounds.
        seed: random seed.

    Returns:
        For each client a dictionary of columns with an entry for each row that was not checked: `row`, which tells it from the
        others, `label`, `suggested` label, `trust`, which is the probability of its label, and whether it is `suspected`.

    Raises:
        InputError: a table cannot be used.
    """
    given, settings = one_per_client("sources", sources), LabelErrors()
    named = None if isinstance(features, Sequence) and not features else features
    roles = Columns(label, named, {label: ()}, split=checked)
    words = text_columns(given, roles) if categories is None else Columns(label, named, categories).declared
    read = tables(given, dataclasses.replace(roles, categories={**dict.fromkeys(words, ()), label: ()}))
    built = settings.build(read)
    task = dataclasses.replace(built, population=built.population.weighted("rows"))
    suited = suited_to(settings.suited, "label-errors", task.default_algorithm).values
    algorithm = ALGORITHMS[task.default_algorithm].configure(task.default_algorithm, suited)
    solution = solve(task, algorithm=algorithm, rounds=rounds, seed=seed, every=rounds)
    classes = np.asarray(read.preprocessing.classes)
    found = []
    for m, (rows, names) in enumerate(zip(read.lower, read.names, strict=True)):
        own = {**rows, "place": np.arange(len(names))}
        verdict = judged(solution.x[m], solution.y, own)
        columns = {"label": classes[rows["label"]], "suggested": classes[np.asarray(verdict.suggested)]}
        numbers = {"trust": np.asarray(verdict.trust), "suspected": np.asarray(verdict.suspected)}
        found.append({"row": list(names), **columns, **numbers})
    return found
