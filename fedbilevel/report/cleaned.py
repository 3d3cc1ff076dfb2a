"""What a run that cleans labels leaves behind: a list of suspected rows and a page for each site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedbilevel.report.suspects import LIST, PAGE, SiteRows
from fedbilevel.runs.folder import RunFolder
from fedbilevel.tasks.data.tables import opened_source, site_table, sources_in
from fedbilevel.tasks.label_errors import Model, judged

TASK = "label-errors"


def written_lists(run: RunFolder) -> list[str]:
    """Say where the sites' lists are, if labels were cleaned to the end. Those of a simulation are written beside the run."""
    ended = run.result
    if run.configuration.task != TASK or ended is None or ended["status"] != "finished":
        return []
    return _where_they_are(run) if run.configuration.federation else _written(run)


def site_names(sources: Sequence[Path]) -> list[str]:
    """What the sites are called: as their folders, or as their files, without suffixes unless two would be called the same."""
    names = [source.name if source.is_dir() else source.stem for source in sources]
    return names if len(set(names)) == len(names) else [source.name for source in sources]


def _written(run: RunFolder) -> list[str]:
    task, x = run.configuration.built_task(), run.x()
    y, fit = Model(**run.point()["y"]), task.preprocessing
    assert fit is not None and x is not None
    run.confirm_tables(fit)
    said = []
    sources = sources_in(run.configuration.data)
    for m, (source, site) in enumerate(zip(sources, site_names(sources), strict=True)):
        rows, folder = task.population.only(m).lower.rows, run.path.parent / "sites" / site
        listed = SiteRows.of(site, site_table(opened_source(source), fit.columns, m), source, rows["label"], fit.classes)
        suspects = listed.write(folder, judged(x[m], y, rows))
        said.append(
            f"{site}: {suspects} of {len(rows['label'])} unchecked rows are suspected: {folder / LIST}, {folder / PAGE}"
        )
    return said


def _where_they_are(run: RunFolder) -> list[str]:
    """What the server knows: totals, and where each site finds its own list."""
    fit, last = run.preprocessing(), run.rows()[-1]
    rows = sum(fit.training) if fit else 0
    return [
        f"about {round(last['suspected'] * rows)} of {rows} unchecked rows of all sites are suspected",
        f"each site finds its own list and page in its kit, in the folder clean/{run.identity}",
    ]
