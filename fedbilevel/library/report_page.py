"""The report page as a call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedbilevel.errors import InputError
from fedbilevel.library.paths import path_of
from fedbilevel.report.page import page
from fedbilevel.report.page_data import contents
from fedbilevel.runs.files import write_atomically
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.tuning.folder import TuningFolder


def write_report(*folders: str | Path, out: str | Path = "report.html") -> Path:
    """Write one HTML file with the numbers, curves, data and settings of runs, sweeps and tunings; no network needed.

    Args:
        folders: runs, folders of runs, sweeps, or tunings.
        out: the page to write; returned as a path.

    Raises:
        InputError: a folder holds nothing to show, or the page's name does not end in .html.
    """
    target = path_of("out", out)
    if not folders:
        raise InputError("there is nothing to report on: give at least one folder")
    if target.suffix != ".html":
        raise InputError(f"the page's name must end in .html; given: {out}")
    write_atomically(target, page(contents(*found([path_of("folders", folder) for folder in folders]))).encode())
    return target


def found(directories: Sequence[Path]) -> tuple[list[RunFolder], list[SweepFolder], list[TuningFolder]]:
    """The runs, the sweeps and the tunings in these folders; `InputError` if one holds none of them."""
    swept = [directory for directory in directories if (directory / "sweep.json").is_file()]
    tuned = {directory: folders for directory in directories if (folders := TuningFolder.find(directory))}
    rest = [directory for directory in directories if directory not in swept and directory not in tuned]
    runs = [folder for directory in rest for folder in RunFolder.find(directory)]
    return runs, [SweepFolder(directory) for directory in swept], [folder for of in tuned.values() for folder in of]
