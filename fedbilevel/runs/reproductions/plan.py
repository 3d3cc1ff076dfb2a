"""The plan of a paper's table or figure: NAME.toml in `reproductions/`, with the hyperparameters chosen for it beside it.

It is written by hand: panels (settings that the paper shows side by side), methods (the lines of a panel), how long they run,
what the paper says, and how each method is tuned: over a grid by the metric, or with `[search]` as `fedbilevel tune` does it,
by validation rows. What was chosen from a grid stays until `--tune` searches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import InputError
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.reproductions.tuned import FOLDER, Tuned, Values, tuned_file
from fedbilevel.runs.sweeps.sweep import Sweep, untied
from fedbilevel.runs.tuning.tuning import Tuning
from fedbilevel.settings import nearest
from fedbilevel.user_files import Scalar, naming, read_toml

FIRST_SEED, TUNING_SEED = 1, 100  # the first seeds for reported runs, and for choosing values over a grid
AFTER_SEARCH = 1000  # the first seed for reported runs of a plan with a search, which takes seeds from 0 on
LOSS_BOUND = 1e9  # beyond any loss that a run recovers from
OWN_OPTIONS = ("rounds", "steps", "seed")  # set by the plan's own fields
SCALES = ("percent", "error", "plain")
Grid = Mapping[str, Sequence[Scalar]]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One of the settings that a paper shows side by side."""

    name: str
    task: str = ""  # the reproduction's own unless given
    knobs: Values = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    hyperparameters: Mapping[str, Values] = field(default_factory=dict)  # by method
    grids: Mapping[str, Grid] = field(default_factory=dict)  # by method, instead of its own
    papers: Mapping[str, Values] = field(default_factory=dict)  # by method, instead of its own `paper`
    claimed: Sequence[Sequence[str]] | None = None  # instead of the reproduction's
    tuned_as: str = ""  # the panel whose chosen values it uses; itself unless given
    quick: Values = field(default_factory=dict)  # the knobs of the reduced size


@dataclass(frozen=True, kw_only=True)
class Method:
    """A line in every panel, or in the named ones."""

    name: str
    algorithm: str
    knobs: Values = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    hyperparameters: Values = field(default_factory=dict)  # those that are not tuned
    paper: Values = field(default_factory=dict)  # the paper's own values of the tuned ones
    grid: Grid = field(default_factory=dict)
    box: Mapping[str, Sequence[float]] = field(default_factory=dict)  # instead of those of its fields, in a search
    searched: bool = True  # false: a search leaves it alone, since it shows values of the paper
    tuned_as: str = ""  # the method whose chosen values it uses; itself unless given
    panels: Sequence[str] = ()
    best_round: bool = False  # whether it shows, at every moment, the round that is best on held-out rows until then
    trips: int = 1  # the round trips that the paper counts as one communication
    quick: Values = field(default_factory=dict)  # its hyperparameters in the reduced size


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of a table: the metric after `at` rounds, or the rounds until it is at least `reach`."""

    at: int | None = None
    reach: float | None = None

    def __post_init__(self) -> None:
        if (self.at is None) == (self.reach is None) or not math.isfinite(self.reach or 0.0):
            raise InputError("give either rounds as `at`, or a finite number as `reach`")


@dataclass(frozen=True, kw_only=True)
class Search:
    """How every line is tuned, and on its own: the budget of `fedbilevel tune`, by validation rows."""

    candidates: int = 64
    rungs: int = 3
    keep: int = 4
    passes: int = 2
    more: int = 2  # passes, at most, while the best value is at an end of what was searched
    seeds: int = 3  # in the choice
    reported: int = 5  # seeds of the reported runs


@dataclass(frozen=True, kw_only=True)
class Quick:
    """The reduced size of a reproduction."""

    task: str
    rounds: int
    knobs: Values = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    panels: Sequence[str] | None = None  # all unless given
    methods: Sequence[str] | None = None  # all unless given


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table or a figure."""

    name: str
    title: str
    paper: str
    task: str
    metric: str
    rounds: int
    every: int
    seeds: int
    tuning_seeds: int = 1
    search: Search | None = None  # instead of grids
    searched: bool = False  # whether values come from the search: as soon as it has been made, or if there are no grids
    first_seed: int = FIRST_SEED
    ranked: bool = False  # whether methods are ranked over the panels, as a league
    panels: Sequence[Panel]
    methods: Sequence[Method]
    scale: str = "percent"  # how the metric is shown: in per cent, as an error in per cent, or as it is
    setting: str = ""  # how we read the paper's description
    knobs: Values = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    columns: Sequence[Column] = ()
    communications: int | None = None  # after how many, by the paper's count, its order is looked for; round trips unless given
    published: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)  # panel -> method -> columns
    claimed: Sequence[Sequence[str]] = ()  # the paper's order, best first; a group is methods that it does not tell apart
    says: str = ""  # the paper's finding in words
    why: str = ""  # the reason, if our finding differs
    tuned_by: str = ""  # the reproduction whose chosen values it uses; itself unless given
    quick: Quick | None = None

    def __post_init__(self) -> None:
        self._check_names()
        for panel, method in self.lines():
            for name in (*self.run, *panel.run, *method.run):
                if name in OWN_OPTIONS:
                    raise InputError(f"run has {name}, which the plan's own fields set: leave it out there")
            self.reported(panel, method, {})
        for panel, method in self.tuned_lines():
            self.tuning(panel, method)
        if self.scale not in SCALES:
            raise InputError(f"scale must be one of {', '.join(SCALES)}; given: {self.scale}")
        grids = [*(m.grid for m in self.methods), *(grid for p in self.panels for grid in p.grids.values())]
        budgets = {math.prod(map(len, grid.values())) for grid in grids if grid}
        if len(budgets) > 1:
            raise InputError(f"the methods' grids have {sorted(budgets)} cells: give each the same number")
        self._check_numbers()
        self._check_communications()
        if self.quick:
            self.small()

    def _check_names(self) -> None:
        panels, methods = [panel.name for panel in self.panels], [method.name for method in self.methods]
        _check_folders("panel", panels)
        _check_folders("method", methods)
        named = [("panel", name, panels) for name in (*self.published, *(p for m in self.methods for p in m.panels))]
        if self.quick:
            named += [("panel", name, panels) for name in self.quick.panels or ()]
            named += [("method", name, methods) for name in self.quick.methods or ()]
        if not self.tuned_by:
            named += [("panel", panel.tuned_as, panels) for panel in self.panels if panel.tuned_as]
            named += [("method", method.tuned_as, methods) for method in self.methods if method.tuned_as]
        for panel in self.panels:
            here = self.methods_of(panel)
            tables = panel.hyperparameters, panel.grids, panel.papers, self.published.get(panel.name, {})
            named += [(f"method in {panel.name}", name, here) for table in tables for name in table]
            named += [("method", name, methods) for group in self.claims(panel) for name in group]
        for kind, name, known in named:
            if name not in known:
                raise InputError(f"there is no {kind} {name!r}{nearest(name, known)}")

    def _check_numbers(self) -> None:
        for column in self.columns:
            if column.at is not None and not 0 <= column.at <= self.rounds:
                raise InputError(f"a column's `at` must be from 0 to the plan's rounds, {self.rounds}; given: {column.at}")
        for panel, method, numbers in ((p, m, n) for p, line in self.published.items() for m, n in line.items()):
            if len(numbers) != len(self.columns) or not all(map(math.isfinite, numbers)):
                raise InputError(
                    f"published: {panel}, {method} must have a finite number for each of the {len(self.columns)} columns; "
                    f"given: {', '.join(map(str, numbers))}"
                )

    def _check_communications(self) -> None:
        most = max(method.trips for method in self.methods)
        if min(method.trips for method in self.methods) < 1:
            raise InputError("a method's trips must be a whole number from 1")
        if (self.communications is None) != (most == 1):
            raise InputError("give both `communications` and the `trips` of methods, or neither")
        if self.communications is not None and not 1 <= self.communications * most <= self.rounds:
            raise InputError(
                f"communications must be from 1 to the plan's rounds over the most trips, {self.rounds // most}; "
                f"given: {self.communications}"
            )

    def claims(self, panel: Panel) -> Sequence[Sequence[str]]:
        """The paper's order of methods in a panel."""
        return self.claimed if panel.claimed is None else panel.claimed

    def lines(self) -> list[tuple[Panel, Method]]:
        """The lines to run, panel by panel."""
        return [(p, m) for p in self.panels for m in self.methods if not m.panels or p.name in m.panels]

    def methods_of(self, panel: Panel) -> list[str]:
        """The names of a panel's lines."""
        return [method.name for p, method in self.lines() if p.name == panel.name]

    def tuned_lines(self) -> list[tuple[Panel, Method]]:
        """The lines to tune."""
        return [(p, m) for p, m in self.lines() if m.grid and not (p.tuned_as or m.tuned_as or self.tuned_by)]

    def searched_lines(self) -> list[tuple[Panel, Method]]:
        """The lines that a search tunes."""
        return [(p, m) for p, m in self.lines() if self.search and m.searched]

    def after_search(self) -> Reproduction:
        """The plan as a search leads to it: every line tuned on its own, and lines with the paper's values."""
        if self.search is None or self.searched:
            return self
        papers = [(p, m) for p, m in self.lines() if paper_of(p, m)]

        def name(method: Method) -> str:
            return f"{method.name}, the paper's values"

        def tuned_alone(panel: Panel) -> Panel:
            here = {
                name(m): {**panel.hyperparameters.get(m.name, {}), **untied(paper_of(p, m))} for p, m in papers if p is panel
            }
            return replace(panel, tuned_as="", grids={}, papers={}, hyperparameters={**panel.hyperparameters, **here})

        def shown(method: Method) -> Method:
            where = [p.name for p, m in papers if m is method]
            return replace(method, name=name(method), grid={}, paper={}, tuned_as="", searched=False, panels=where)

        return replace(
            self,
            searched=True,
            seeds=self.search.reported,
            first_seed=AFTER_SEARCH,
            tuned_by="",
            panels=[tuned_alone(panel) for panel in self.panels],
            methods=[
                *(replace(m, grid={}, tuned_as="") for m in self.methods),
                *(shown(m) for m in self.methods if any(m is other for _, other in papers)),
            ],
        )

    def searching(self, panel: Panel, method: Method, data: str = "") -> Tuning:
        """The search of a line."""
        assert self.search is not None
        budget = {name: number for name, number in asdict(self.search).items() if name != "reported"}
        values = {name: value for name, value in fixed(panel, method).items() if name not in method.box}
        options = replace(self._options(panel, method), every=self.rounds)
        task, knobs = panel.task or self.task, self._knobs(panel, method)
        return Tuning.prepared(
            task, knobs, method.algorithm, values, method.box, options, fixed=values.keys(), data=data, **budget
        )[0]

    def tuning(self, panel: Panel, method: Method, data: str = "") -> Sweep:
        """The grid of a line, with separate seeds."""
        return self._sweep(panel, method, {}, grid_of(panel, method), self.tuning_seeds, TUNING_SEED, data)

    def reported(self, panel: Panel, method: Method, chosen: Mapping[str, Any], data: str = "") -> Sweep:
        """The runs of a line with its chosen values."""
        return self._sweep(panel, method, chosen, {}, self.seeds, self.first_seed, data)

    def _sweep(
        self,
        panel: Panel,
        method: Method,
        chosen: Mapping[str, Any],
        grid: Mapping[str, Sequence[Any]],
        seeds: int,
        first_seed: int,
        data: str,
    ) -> Sweep:
        options, knobs = self._options(panel, method), self._knobs(panel, method)
        values = {**fixed(panel, method), **untied(chosen)}
        return Sweep(panel.task or self.task, knobs, method.algorithm, values, grid, seeds, options, data, first_seed)

    def _options(self, panel: Panel, method: Method) -> RunOptions:
        run = {"every": self.every, "loss_bound": LOSS_BOUND, **self.run, **panel.run, **method.run, "rounds": self.rounds}
        if method.best_round:
            run["validation"] = True
        options = RunOptions.read(owner := f"{panel.name}, {method.name}: run", run)
        with naming(owner):
            options.require_for_several()
        return options

    def _knobs(self, panel: Panel, method: Method) -> Values:
        return {**self.knobs, **panel.knobs, **method.knobs}

    def small(self) -> Reproduction:
        """The reduced size: on bundled data, in about a minute, with values that suit the small task."""
        quick = self.quick
        if not quick:
            raise InputError(f"{self.name} has no reduced size: leave out --quick")
        kept = [p.name for p in self.panels if quick.panels is None or p.name in quick.panels]
        return replace(
            self,
            task=quick.task,
            knobs=quick.knobs,
            run=quick.run,
            rounds=quick.rounds,
            every=max(1, quick.rounds // 10),
            seeds=2,
            panels=[Panel(name=p.name, knobs=p.quick) for p in self.panels if p.name in kept],
            methods=[
                Method(name=m.name, algorithm=m.algorithm, hyperparameters=m.quick, panels=[p for p in m.panels if p in kept])
                for m in self.methods
                if (quick.methods is None or m.name in quick.methods) and (not m.panels or set(m.panels) & set(kept))
            ],
            columns=[Column(at=quick.rounds)] if self.columns else (),
            communications=None,
            published={},
            claimed=(),
            says="",
            why="",
            tuned_by="",
            search=None,
            searched=False,
            first_seed=FIRST_SEED,
            ranked=False,
            quick=None,
        )


def _check_folders(kind: str, names: Sequence[str]) -> None:
    """Raise `InputError` unless every name gets a folder of its own."""
    if not names:
        raise InputError(f"it needs at least one {kind}")
    known: dict[str, str] = {}
    for name in names:
        folder = folder_name(name)
        if not folder.strip("."):
            raise InputError(f"a {kind} cannot be called {name!r}: use letters and digits")
        if folder.lower() in known:
            raise InputError(f"the {kind}s {known[folder.lower()]!r} and {name!r} would be one folder, {folder}: rename one")
        known[folder.lower()] = name


def folder_name(name: str) -> str:
    """The name of the folder of a panel's or a method's runs."""
    return re.sub(r"[^\w.=-]+", "_", name).strip("_")


def grid_of(panel: Panel, method: Method) -> Mapping[str, Sequence[Any]]:
    """The grid that a line is tuned over."""
    return panel.grids.get(method.name, method.grid)


def paper_of(panel: Panel, method: Method) -> Mapping[str, Any]:
    """The paper's own values for a line."""
    return panel.papers.get(method.name, method.paper)


def fixed(panel: Panel, method: Method) -> dict[str, Any]:
    """A line's hyperparameters that are not tuned."""
    return {**method.hyperparameters, **panel.hyperparameters.get(method.name, {})}


def chosen_values(reproduction: Reproduction, panel: Panel, method: Method, folder: Path = FOLDER) -> dict[str, Any]:
    """The tuned values of a line: its own, or those of the line that it refers to."""
    tuned = method.searched if reproduction.searched else method.grid or reproduction.tuned_by
    if not tuned:
        return {}
    name, line = reproduction.tuned_by or reproduction.name, (panel.tuned_as or panel.name, method.tuned_as or method.name)
    file = tuned_file(name, folder)
    values = Tuned.read(file).values(*line)
    if values is None:
        raise InputError(f"{file} has no values for {', '.join(line)}: choose them with 'fedbilevel reproduce {name} --tune'")
    with naming(file):
        ALGORITHMS[method.algorithm].configure(method.algorithm, untied(values))
    return dict(values)


def names(folder: Path = FOLDER) -> list[str]:
    """The names of all plans."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder} of plans: the papers' plans are in the source repository")
    return sorted(p.stem for p in folder.glob("*.toml") if not p.stem.endswith(".tuned"))


def read(name: str, folder: Path = FOLDER) -> Reproduction:
    """The table or figure of that name."""
    known = names(folder)
    if name not in known:
        raise InputError(f"there is no table or figure {name!r}{nearest(name, known)}")
    plan = read_toml(folder / f"{name}.toml", Reproduction, name=name)
    has_grids = plan.tuned_by or any(method.grid for method in plan.methods)
    return plan if has_grids and not Tuned.read(tuned_file(name, folder)).searched else plan.after_search()
