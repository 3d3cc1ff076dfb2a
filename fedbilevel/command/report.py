"""The commands `fedbilevel report`, `watch` and `compare`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.command.options import Json, Look, console, picture_path, say, say_json, when_a_pipe_closes
from fedbilevel.errors import InputError
from fedbilevel.report.styles import find_style

if TYPE_CHECKING:
    from fedbilevel.report.curves import Curve
    from fedbilevel.runs.folder import RunFolder

Directories = Annotated[list[Path], typer.Argument(help="Runs, folders of runs, sweeps, or tunings.", metavar="DIR...")]
Open = Annotated[bool, typer.Option("--open", help="Show the page in your browser.")]


def report(
    directories: Directories,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    open_: Open = False,
    latex: Annotated[
        Path | None, typer.Option(help="Write a LaTeX table and figures into this folder instead.", metavar="FOLDER")
    ] = None,
) -> None:
    """Write one HTML file with the runs' numbers, curves, data and settings; it needs no network."""
    if latex is not None:
        from fedbilevel.report.latex import write_latex

        return say(f"for LaTeX: {', '.join(map(str, write_latex(_comparable(directories)[1], latex)))}")
    from fedbilevel.library.report_page import write_report

    write_report(*directories, out=out)
    say(f"page: {out}")
    if open_:
        typer.launch(out.resolve().as_uri())


def watch(
    directory: Annotated[Path, typer.Argument(help="A run, a folder of runs, a sweep, or a tuning.", metavar="DIR")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; a free one unless given.", min=0, max=65535)] = 0,
    open_: Open = False,
) -> None:
    """Serve a page of runs in progress, to this machine only; it updates itself. Ctrl-C ends it."""
    from fedbilevel.library.report_page import found
    from fedbilevel.report.page_data import contents
    from fedbilevel.report.watch import BackgroundLook, PageServer

    when_a_pipe_closes(signal.SIG_IGN)  # closing the page must not end the server
    found([directory])
    look = BackgroundLook()
    with PageServer(lambda: contents(*found([directory]), look), port) as server:
        say(f"page: {server.url} (Ctrl-C ends it)")
        if open_:
            typer.launch(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    sys.stdout.flush()
    os._exit(0)  # a look inside a run may be under way in compiled code, from which the interpreter's own end would abort


def compare(
    directories: Annotated[list[Path], typer.Argument(help="Runs, or folders of runs.", metavar="DIR...")],
    out: Annotated[Path, typer.Option(help="The picture to write; PNG and SVG are always written.")] = Path("comparison.png"),
    style: Look = "screen",
    json: Json = False,
) -> None:
    """Show runs side by side, as a table and a picture."""
    picture_path(out)
    look = find_style(style)
    from fedbilevel.report.curve_picture import draw
    from fedbilevel.report.table import table

    folders, curves = _comparable(directories)
    written = draw(curves, out, look)
    if json:
        runs = [{"folder": str(folder.path), **_plain(curve)} for folder, curve in zip(folders, curves, strict=True)]
        return say_json({"runs": runs, "pictures": list(map(str, written))})
    console.print(table(curves))
    say(f"pictures: {', '.join(map(str, written))}")


def _comparable(directories: list[Path]) -> tuple[list[RunFolder], list[Curve]]:
    """The runs in the directories, and their curves; `InputError` if their main metrics differ."""
    from fedbilevel.report.curves import curves as read
    from fedbilevel.runs.folder import RunFolder

    folders = [folder for directory in directories for folder in RunFolder.find(directory)]
    curves = read(folders)
    headlines = sorted({curve.headline for curve in curves})
    if len(headlines) > 1:
        raise InputError(f"the runs' main metrics are {' and '.join(headlines)}: compare runs of one kind of task")
    return folders, curves


def _plain(curve: Curve) -> dict[str, Any]:
    last = curve.rows[-1]
    traffic = {f"megabytes_{direction}": curve.megabytes(last, direction) for direction in ("up", "down")}
    best = {} if curve.best_round is None else {"best": curve.end}
    return {"label": curve.label, "status": curve.status, "headline": curve.headline, "last": last, **best, **traffic}
