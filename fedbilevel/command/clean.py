"""The command `fedbilevel clean`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.command.options import Every, Force, Out, Rounds, new_folder, option, say_note, whole
from fedbilevel.command.run import start, with_sites
from fedbilevel.errors import InputError

if TYPE_CHECKING:
    from fedbilevel.tasks.data.columns import Columns

TASK, ALGORITHM = "label-errors", "fedpace-own"


def clean(
    folder: Annotated[
        Path | None,
        typer.Argument(help="A folder with a CSV file, or a folder of images, for each site; none with --federation."),
    ] = None,
    label: Annotated[str, typer.Option(help="The column with the label.")] = "label",
    checked: Annotated[str, typer.Option(help="The column that says which rows were checked: yes or no.")] = "checked",
    features: Annotated[
        str, typer.Option(help="The columns to predict the label from, with commas between; all others unless given.")
    ] = "",
    categories: Annotated[
        str,
        typer.Option(
            help="Which of them hold categories; those with more words than numbers unless given, if the tables are here."
        ),
    ] = "",
    rounds: Rounds = 200,
    seed: Annotated[int, option(whole, "Random seed.")] = 0,
    every: Every = 20,
    federation: Annotated[
        Path | None, typer.Option(help="Folder of a federation, whose sites have the tables.", metavar="DIR")
    ] = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Find rows whose labels look wrong, across sites that keep their rows to themselves, from a few rows that were checked."""
    from fedbilevel.runs.configuration import Configuration
    from fedbilevel.runs.options import RunOptions
    from fedbilevel.tasks.data.datasets import data_folder
    from fedbilevel.tasks.data.tables import sources_in
    from fedbilevel.tasks.label_errors import LabelErrors

    if folder is not None and federation is not None:
        raise InputError("give either a folder with tables or --federation, not both: a federation's sites have the tables")
    if folder is None and federation is None:
        raise InputError("give a folder with the sites' tables, or --federation with the folder of a federation")
    options = RunOptions(rounds=rounds, seed=seed, every=every, weights="rows")
    knobs: dict[str, Any] = {"label": label, "checked": checked, "features": features, "categories": categories}
    place: dict[str, Any] = {}
    elsewhere = None
    if federation is not None:
        elsewhere, knobs = with_sites(federation, 300.0, TASK, knobs, "")
        place = {"federation": str(federation.resolve())}
    else:
        place = {"data": data_folder(str(folder))}
        if not categories:
            knobs["categories"] = _words(sources_in(place["data"]), LabelErrors(**knobs).columns)
    configuration = Configuration.resolve(TASK, knobs, ALGORITHM, {}, options, **place)
    start([configuration], out or new_folder("clean"), force, elsewhere=elsewhere)


def _words(sources: list[Path], columns: Columns) -> str:
    """The columns of categories, with commas between, which a note names."""
    from fedbilevel.tasks.data.tables import text_columns

    names = text_columns(sources, columns)
    for name in names:
        if "," in name:
            raise InputError(f"the column {name!r} of categories has a comma in its name: rename it")
    say_note(f"taken as categories: {', '.join(names)}" if names else "")
    return ",".join(names)
