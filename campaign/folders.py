"""The folder that every case has a copy of: one of every file that a user can touch, runs under way among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from made_files import KNOBS, make

from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.stopping import Interrupted, StopRequest


def made(folder: Path) -> None:
    """Fill the folder."""
    make(folder)
    (folder / "begun").mkdir()
    (folder / "starting.json").rename(folder / "begun/starting.json")
    _stopped_run(folder / "stopped")
    lines = (folder / "sweep/results.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "partial").mkdir()
    (folder / "partial/sweep.json").write_bytes((folder / "sweep/sweep.json").read_bytes())
    (folder / "partial/results.jsonl").write_bytes(lines[0])
    images, labels = np.zeros((40, 32, 32, 3), np.uint8), np.arange(40) % 10
    (folder / "data").mkdir()
    np.savez(
        folder / "data/cifar10-subset.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels
    )


def _stopped_run(path: Path) -> None:
    stop, options = StopRequest(), RunOptions(rounds=40, every=2)
    (run,) = RunFolder.create({path: Configuration.resolve("quadratic", KNOBS, "fedbioacc", {}, options)})

    def observe(moment: object) -> None:
        stop.signum = 15 if getattr(moment, "step", 0) >= 8 else None

    try:
        run.execute(stop, observe)
    except Interrupted:
        return
    raise RuntimeError("the run was to be stopped")
