"""Tables in Markdown: one for a reproduction, and `RESULTS.md` for all whose numbers are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.errors import InputError
from fedbilevel.report import league_page, markdown
from fedbilevel.report.reproduction_text import brief, heading, printed, shown, written
from fedbilevel.runs.reproductions.league import standings
from fedbilevel.runs.reproductions.paper_order import Pair, doubts
from fedbilevel.runs.reproductions.plan import (
    Column,
    Method,
    Panel,
    Reproduction,
    fixed,
    names,
    paper_of,
    read,
)
from fedbilevel.runs.reproductions.results import Results, as_the_paper_counts, from_csv
from fedbilevel.runs.reproductions.study import Study
from fedbilevel.runs.reproductions.table_numbers import Budget, columns, number, spent
from fedbilevel.runs.reproductions.tuned import Choice, Tuned, tuned_file
from fedbilevel.runs.sweeps.sweep import untied

INTRODUCTION = """\
# The papers' tables and figures, reproduced

Written by `fedbilevel reproduce NAME --publish`; all of our numbers come from the files in `results/`. Means and standard
deviations are over the seeds of a run; the data split and the initial model are the same for all.

Hyperparameters are chosen for every line of a plan on its own and with the same budget, by a search that ranks candidates by
validation rows: one in five of each client's own upper rows, which the losses of the search do not see. Three seeds choose,
and five others are reported. Lines with *the paper's values* are not tuned. Where boxes are narrower than those of `fedbilevel
tune`, they were placed after a first look. A chosen value with a * is at an end of all that was searched.

*Equal megabytes* and *equal derivatives* are the metric once every method of the panel has sent as much, or computed as many
minibatch gradients and second-order products, as the one that needs least; a dash means that a method had diverged, or had
no metrics by then. Rounds are round trips; where a paper counts otherwise, its count has a column of its own, and the paper's
order is looked for there too. A method is *behind* another if fewer of its runs got that far, or their mean is worse, however
slightly. Costs are means over the runs that did not diverge, if any.

Numbers *of the older tuning* are to be replaced, by the command that stands there. Their values were chosen over a grid with
the same number of cells for each method, by the reported metric and on the same split, as in the papers, with one or three
seeds that are not among those reported: treat differences within one deviation as noise. There a * is for a grid's edge, and
the result with the paper's values is that of their cell of the grid: see `*.tuned.toml`.
"""


def table(plan: Reproduction, results: Results) -> str:
    """Our numbers beside the paper's, and their costs."""
    has_paper = bool(plan.published)
    heads = ["", "method"]
    for column in columns(plan):
        heads += [f"paper, {heading(plan, column)}", f"ours, {heading(plan, column)}"] if has_paper else [heading(plan, column)]
    if plan.communications is not None:
        heads.append(f"after {plan.communications} communications by the paper's count")
    heads += ["equal megabytes", "equal derivatives", "MB", "gradients", "second-order products"]
    return markdown.table(heads, (line for panel in plan.panels for line in _lines(plan, panel, results)))


def _lines(plan: Reproduction, panel: Panel, results: Results) -> Iterator[list[str]]:
    methods, recounted = plan.methods_of(panel), as_the_paper_counts(plan, results)
    budget = Budget.common([results[panel.name, m] for m in methods])
    for k, method in enumerate(methods):
        runs, cells = results[panel.name, method], [panel.name if k == 0 else "", method]
        for c, column in enumerate(columns(plan)):
            if plan.published:
                theirs = plan.published.get(panel.name, {}).get(method)
                cells.append("" if theirs is None else printed(column, theirs[c]))
            cells.append(written(plan, column, number(runs, column)))
        if plan.communications is not None:
            at = Column(at=plan.communications)
            cells.append(written(plan, at, number(recounted[panel.name, method], at)))
        cells += [brief(plan, reached) for reached in budget.numbers(runs)]
        yield [*cells, *(f"{value:,.0f}" for value in spent(runs))]


def entries(plan: Reproduction, panel: Panel, method: str, results: Results) -> list[str]:
    """A line's numbers, the paper's in brackets."""
    theirs = plan.published.get(panel.name, {}).get(method)
    ours = [written(plan, column, number(results[panel.name, method], column)) for column in columns(plan)]
    if theirs is None:
        return ours
    return [f"{a} [{printed(c, b)}]" for a, b, c in zip(ours, theirs, columns(plan), strict=True)]


def comparison(plan: Reproduction, results: Results) -> str:
    """Whether our order of methods is the paper's, panel by panel."""
    lines = []
    if plan.says:
        lines.append(f"The paper: {plan.says}")
    for panel in plan.panels:
        if panel.name in plan.published or plan.claims(panel):
            lines.append(f"- {panel.name}: {_verdicts(plan, panel, results)}.")
    if plan.why:
        lines.append(f"\n{plan.why.strip()}")
    return "\n".join(lines) + "\n"


def _verdicts(plan: Reproduction, panel: Panel, results: Results) -> str:
    """The verdict by round trips, after one by the paper's count where that differs."""
    by_trips = _verdict(plan, panel, results)
    if plan.communications is None:
        return by_trips
    by_paper = _verdict(plan, panel, as_the_paper_counts(plan, results), plan.communications)
    return f"by the paper's count {by_paper}. By round trips {by_trips}"


def _verdict(plan: Reproduction, panel: Panel, results: Results, at: int | None = None) -> str:
    def where(pair: Pair) -> str:
        return f" ({heading(plan, pair.by)})" if panel.name in plan.published else ""

    wrong, hollow = doubts(plan, panel, results, at)
    phrases = [f"{pair.behind} is not behind {pair.ahead}{where(pair)}" for pair in wrong]
    verdict = f"not the paper's order: {'; '.join(phrases)}" if wrong else "the paper's order"
    only = [f"{pair.behind} is behind {pair.ahead} only because of its diverged runs{where(pair)}" for pair in hollow]
    return "; ".join([verdict, *only])


def choices(plan: Reproduction, folder: Path) -> str:
    """The values that were chosen, beside the paper's."""
    file = tuned_file(plan.name, folder)
    tuned = Tuned.read(file).chosen
    if not tuned:
        return f"Values: those chosen for {plan.tuned_by}.\n" if plan.tuned_by else ""
    others = [f"{p.name} has those of {p.tuned_as}" for p in plan.panels if p.tuned_as]
    lines_of = {(p.name, m.name): (p, m) for p, m in (plan.searched_lines() if plan.searched else plan.tuned_lines())}
    if plan.searched:
        return _searched(plan, tuned, lines_of)
    heads = ["", "method", "grid", "chosen", "not tuned", "the paper's", "with the paper's", "cells that diverged"]
    lines = []
    for entry in tuned:
        name = entry["panel"], entry["method"]
        if name not in lines_of:
            raise InputError(f"{file}: the plan does not tune {', '.join(name)}: choose anew with --tune")
        panel, method = lines_of[name]
        grid = plan.tuning(panel, method).grid
        given = entry.get("with_paper_values", "")
        lines.append(
            [
                entry["panel"],
                method.name,
                "; ".join(f"{_names(k)} {', '.join(map(_text, vs))}" for k, vs in grid.items()),
                _values(entry["values"], grid),
                _values({k: v for k, v in fixed(panel, method).items() if k not in untied(entry["values"])}),
                _values(paper_of(panel, method)),
                given if isinstance(given, str) else shown(plan, given),
                f"{entry['diverged']} of {entry['cells']}",
            ]
        )
    return markdown.table(heads, lines) + (f"\n{'; '.join(others)}.\n" if others else "")


def _searched(plan: Reproduction, tuned: Sequence[Choice], lines_of: Mapping[tuple[str, str], tuple[Panel, Method]]) -> str:
    """The values that a search has chosen."""
    heads = ["", "method", "first searched in", "chosen", "not tuned", "candidates that diverged"]
    lines = []
    for entry in tuned:
        panel, method = lines_of[entry["panel"], entry["method"]]
        edges = entry.get("edges", ())
        lines.append(
            [
                panel.name,
                method.name,
                "; ".join(f"{_names(k)} {low:.3g} to {high:.3g}" for k, (low, high) in entry.get("boxes", {}).items()),
                ", ".join(f"{_names(k)} {_text(v)}{'*' if k in edges else ''}" for k, v in entry["values"].items()),
                _values({k: v for k, v in fixed(panel, method).items() if k not in untied(entry["values"])}),
                f"{entry['diverged']} of {entry['cells']}",
            ]
        )
    return markdown.table(heads, lines)


def _values(values: Mapping[str, Any], grid: Mapping[str, Sequence[Any]] | None = None) -> str:
    def edge(name: str, value: Any) -> str:
        return "*" if grid and name in grid and value in (min(grid[name]), max(grid[name])) else ""

    return ", ".join(f"{_names(k)} {_text(v)}{edge(k, v)}" for k, v in values.items())


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _names(tied: str) -> str:
    return " = ".join(tied.split("+"))


def section(plan: Reproduction, results: Results, folder: Path) -> str:
    """A reproduction's part of RESULTS.md."""
    return "\n".join(
        [
            f"## {plan.name}: {plan.title}\n",
            f"{plan.paper}; {plan.seeds} seeds, {plan.rounds} rounds. {plan.setting.strip()}\n",
            *([_to_be_tuned(plan)] if plan.search and not plan.searched else []),
            table(plan, results),
            comparison(plan, results),
            *(_league(plan, results) if plan.ranked else []),
            f"![{plan.title}](results/{plan.name}.png)\n",
            f"<details><summary>Hyperparameters</summary>\n\n{choices(plan, folder)}\n</details>\n",
        ]
    )


def _league(plan: Reproduction, results: Results) -> list[str]:
    return [league_page.text(plan, standings(plan, results)), f"![Critical differences](results/{plan.name}-ranks.png)\n"]


def _to_be_tuned(plan: Reproduction) -> str:
    """The note on numbers whose values a grid has chosen, where the plan now has a search."""
    assert plan.search is not None
    return (
        "**Of the older tuning**: values chosen over a grid by the reported metric. "
        f"`fedbilevel reproduce {plan.name} --tune --publish` replaces them: every line tuned on its own by validation rows, "
        f"{plan.search.passes} x {plan.search.candidates} candidates and {plan.search.seeds} seeds in the choice, "
        f"{plan.search.reported} in the report, and the paper's own values as lines.\n"
    )


def results_page(folder: Path) -> str:
    """RESULTS.md, from the stored numbers."""
    return "\n".join([INTRODUCTION, *(_stored(read(name, folder), folder) for name in names(folder))])


def _stored(plan: Reproduction, folder: Path) -> str:
    described, numbers = (folder / "results" / f"{plan.name}{suffix}" for suffix in (".json", ".csv"))
    if not numbers.exists():
        return f"## {plan.name}: {plan.title}\n\n{plan.paper}. Not run at full size yet.\n"
    if not described.exists() or not Study(plan, folder, plans=folder).made(described):
        return f"## {plan.name}: {plan.title}\n\n{plan.paper}. Its plan has changed since it was run: publish it again.\n"
    results = from_csv(numbers)
    for panel, method in plan.lines():
        if (panel.name, method.name) not in results:
            raise InputError(f"{numbers} has no runs of {panel.name}, {method.name}: publish it again")
    return section(plan, results, folder)
