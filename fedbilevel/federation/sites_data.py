"""What the sites of a run have said about their data, and what follows: which metrics the run has, and who weighs what."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbilevel.core.population import Population
from fedbilevel.core.privacy import LOWER, UPPER
from fedbilevel.errors import InputError
from fedbilevel.federation.begin_message import Holdings
from fedbilevel.runs.files import write_atomically
from fedbilevel.runs.spending import RowSpending
from fedbilevel.tasks.base import Task
from fedbilevel.tasks.client_data import RowCounts
from fedbilevel.user_files import read_json


class SitesData:
    """What each site said when it first began the run, kept in a file for later jobs; the weights of a run do not change."""

    def __init__(self, file: Path, sites: Sequence[str]):
        self._file, self._sites, self._known = file, sites, dict[str, Holdings]()
        with contextlib.suppress(InputError):
            self._known = read_json(file, dict[str, Holdings])

    def add(self, said: Mapping[int, Holdings]) -> None:
        """Add what sites say now, by number; once a site's data was its own, it never counts as simulated."""
        for m, now in said.items():
            first = self._known.get(self._sites[m], now)
            self._known[self._sites[m]] = dataclasses.replace(first, simulated=first.simulated and now.simulated)
        content = {site: dataclasses.asdict(holdings) for site, holdings in self._known.items()}
        write_atomically(self._file, json.dumps(content).encode())

    @property
    def unknown(self) -> list[int]:
        """The numbers of the sites that have said nothing yet."""
        return [m for m, site in enumerate(self._sites) if site not in self._known]

    @property
    def found(self) -> RowCounts:
        """How many rows each site has found, as `ClientData` takes it."""
        return tuple(() if said is None else tuple(said.found) for said in self._each)

    @property
    def test_rows(self) -> list[int]:
        """How many rows each site holds out."""
        return [0 if said is None else said.test for said in self._each]

    @property
    def _each(self) -> list[Holdings | None]:
        return [self._known.get(site) for site in self._sites]

    @property
    def simulated(self) -> bool:
        """Whether all sites have said that their data is simulated."""
        return all(said is not None and said.simulated for said in self._each)

    def by_rows(self, population: Population) -> Population:
        """The population with weights in proportion to the sites' rows, once all of them are known."""
        rows = [said.rows for said in self._each if said is not None]
        return population.weighted("rows", rows) if len(rows) == len(self._sites) else population

    def costing(self, spending: RowSpending) -> RowSpending:
        """What a run costs these sites in privacy, once their rows are known."""
        said = [one for one in self._each if one is not None]
        rows = {UPPER: min(one.upper for one in said), LOWER: min(one.lower for one in said)}
        return dataclasses.replace(spending, rows=rows)

    def measurable(self, task: Task) -> Task:
        """The task with metrics of the run's own data alone; its notes say which are left out, and which rows others are of.

        What the server has belongs to the run only if all data is simulated. Otherwise its test data and its truths are not the
        run's, and rows that the sites hold out, if there are any, take their place.
        """
        if self.simulated:
            return task
        names = task.population.problem.test_names if sum(self.test_rows) else ()
        lost = [name for name in task.server_metric_names() if name not in names]
        notes = list(task.notes)
        if names:
            notes.append(f"From rows that the sites hold out, {sum(self.test_rows)} in all: {', '.join(names)}.")
        if lost:
            notes.append(f"Left out, since the server would compute them from data that is not the sites': {', '.join(lost)}.")
        return dataclasses.replace(task, metrics=lambda x, y: {}, notes=tuple(notes))

    def line(self, weights: Sequence[float]) -> str:
        """Who has how many rows, and weighs what."""
        said = zip(self._sites, self._each, weights, strict=True)
        parts = [f"{site} {'?' if has is None else has.rows} (weight {weight:.3g})" for site, has, weight in said]
        unequal = len(set(weights)) == 1 and len({has.rows for has in self._known.values()}) > 1
        return f"rows of the sites: {', '.join(parts)}{'; --weights rows lets each row count the same' if unequal else ''}"
