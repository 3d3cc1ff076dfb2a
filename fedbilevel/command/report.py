"""The commands `fedbilevel report` and `fedbilevel watch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedbilevel.errors import InputError

if TYPE_CHECKING:
    from fedbilevel.runs.folder import RunFolder
    from fedbilevel.runs.sweeps.sweep import SweepFolder

Directories = Annotated[list[Path], typer.Argument(help="Runs, folders of runs, or sweeps.", metavar="DIR...")]
Open = Annotated[bool, typer.Option("--open", help="Show the page in your browser.")]


def report(
    directories: Directories,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    open_: Open = False,
) -> None:
    """Write one HTML file with the runs' numbers, curves, data and settings; it needs no network."""
    if out.suffix != ".html":
        raise InputError(f"the page's name must end in .html; given: {out}")
    from fedbilevel.report.page import page
    from fedbilevel.report.page_data import contents
    from fedbilevel.runs.files import write_atomically

    write_atomically(out, page(contents(*_found(directories))).encode())
    Console(highlight=False, markup=False).print(f"page: {out}", soft_wrap=True)
    if open_:
        typer.launch(out.resolve().as_uri())


def watch(
    directory: Annotated[Path, typer.Argument(help="A run, a folder of runs, or a sweep.", metavar="DIR")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; a free one unless given.", min=0, max=65535)] = 0,
    open_: Open = False,
) -> None:
    """Serve the page of runs that are going on, to this machine alone; it updates itself. Ctrl-C ends it."""
    from fedbilevel.report.page_data import contents
    from fedbilevel.report.watch import PageServer

    _found([directory])
    with PageServer(lambda: contents(*_found([directory])), port) as server:
        Console(highlight=False, markup=False).print(f"page: {server.url} (Ctrl-C ends it)", soft_wrap=True)
        if open_:
            typer.launch(server.url)
        server.serve_forever()


def _found(directories: Sequence[Path]) -> tuple[list[RunFolder], list[SweepFolder]]:
    from fedbilevel.runs.folder import RunFolder
    from fedbilevel.runs.sweeps.sweep import SweepFolder

    swept = [directory for directory in directories if (directory / "sweep.json").is_file()]
    runs = [folder for directory in directories if directory not in swept for folder in RunFolder.find(directory)]
    return runs, [SweepFolder(directory) for directory in swept]
