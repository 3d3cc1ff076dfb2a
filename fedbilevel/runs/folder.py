"""The run folder: a run's configuration, its metrics as they come, and checkpoints that survive a kill.

config.json       the resolved configuration, and the versions it ran with
metrics.jsonl     one line of numbers for each time metrics were due
checkpoint        the newest state; replaced atomically
x.npy             the x in it, for whoever looks at the run
result.json       how the run ended: finished, or diverged and why
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.core.traffic import Totals
from fedbilevel.errors import Diverged, InputError
from fedbilevel.runs.checkpoint import Checkpoint
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import Experiment, Snapshot
from fedbilevel.runs.files import locked, write_atomically
from fedbilevel.runs.stopping import StopRequest
from fedbilevel.runs.versions import versions_here

CHECKPOINT_SECONDS = 10.0
FILES = ("config.json", "metrics.jsonl", "checkpoint", "x.npy", "result.json", "job.json", "sites.json", "stop")


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, runs: Mapping[Path, Configuration], force: bool = False) -> list[RunFolder]:
        """New runs, all or none; a folder that holds one is refused unless `force`, which removes that run's files."""
        for path in runs:
            if any(part.exists() and not part.is_dir() for part in (path, *path.parents)):
                raise InputError(f"{path} cannot be a folder, since a part of it is a file: choose another --out")
            if (path / "config.json").exists() and not force:
                raise InputError(f"{path} already holds a run: resume it, choose another --out, or replace it with --force")
            for by in ("", "config.json"):  # a run's own process, and a command that follows one elsewhere
                if (path / by).exists():
                    with locked(path, by):
                        pass
        itemsize = jax.numpy.zeros(()).dtype.itemsize
        for path, configuration in runs.items():
            for name in FILES:
                (path / name).unlink(missing_ok=True)
            path.mkdir(parents=True, exist_ok=True)
            content = {
                "configuration": configuration.plain(),
                "versions": versions_here(),
                "bytes_per_float": itemsize,
                "identity": secrets.token_hex(8),
            }
            write_atomically(path / "config.json", (json.dumps(content, indent=2) + "\n").encode())
        return [cls(path) for path in runs]

    @classmethod
    def find(cls, path: Path) -> list[RunFolder]:
        """The run in a folder, or the runs in its subfolders; `InputError` if there is none."""
        if (path / "config.json").is_file():
            return [cls(path)]
        below = sorted(p.parent for p in path.glob("*/config.json"))
        if not below:
            raise InputError(f"{path} holds no run: give a folder that 'fedbilevel run' wrote")
        return [cls(p) for p in below]

    @property
    def configuration(self) -> Configuration:
        """As it was resolved when the run began."""
        try:
            return Configuration.read(self._read("config.json")["configuration"])
        except (KeyError, TypeError, InputError) as error:
            raise InputError(f"{self.path / 'config.json'} is not the configuration of a run ({error})") from None

    @property
    def bytes_per_float(self) -> int:
        """Of the numbers that the run sends."""
        return self._read("config.json").get("bytes_per_float", 4)

    @property
    def versions(self) -> dict[str, str]:
        """Of what the run began with."""
        return self._read("config.json").get("versions", {})

    @property
    def identity(self) -> str:
        """What tells this run from all others, also from one with the same configuration."""
        return str(self._read("config.json").get("identity", ""))

    def holds(self, identity: str) -> bool:
        """Whether the folder still holds the run of this identity."""
        with contextlib.suppress(OSError, InputError):
            return self.identity == identity
        return False

    @property
    def result(self) -> dict[str, Any] | None:
        """How the run ended, or None while it has not."""
        return self._read("result.json") if (self.path / "result.json").exists() else None

    def _read(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / name).read_bytes())
        except ValueError as error:
            raise InputError(f"{self.path / name} is damaged ({error})") from None
        if not isinstance(content, dict):
            raise InputError(f"{self.path / name} is not a file of a run")
        return content

    def rows(self) -> list[dict[str, Any]]:
        """The metrics so far; a line that a kill cut off is left out."""
        file, rows = self.path / "metrics.jsonl", []
        for line in file.read_text().splitlines() if file.exists() else ():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return rows

    def x(self) -> np.ndarray | None:
        """x as of the newest checkpoint; None where there is none."""
        file = self.path / "x.npy"
        return np.load(file, allow_pickle=False) if file.exists() else None

    def checkpoint(self, experiment: Experiment) -> Snapshot | None:
        """The run as of its newest checkpoint, with a state of the experiment that runs it; None where there is none."""
        file = self.path / "checkpoint"
        if not file.exists():
            return None
        stored = Checkpoint.read(file, self.configuration.fingerprint())
        try:
            state = experiment.restored(stored.leaves)
        except InputError as error:
            raise InputError(f"{file} has {error}, or remove it to start this run over") from None
        totals, reported = Totals(*stored.totals), dict(stored.reported)
        return Snapshot(state, stored.step, totals, stored.seconds, reported=reported)

    def execute(
        self,
        stop: StopRequest,
        observe: Callable[[Snapshot], None],
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        experiment: Experiment | None = None,
    ) -> None:
        """Run from the checkpoint, or from the start, to the end. Raises `Diverged` or `Interrupted`.

        The experiment is what the configuration describes; it is given where a federation is to take its steps.
        """
        if self.result is not None:
            return
        with locked(self.path):
            self._execute(stop, observe, checkpoint_seconds, experiment or self.configuration.experiment())

    def _execute(
        self, stop: StopRequest, observe: Callable[[Snapshot], None], checkpoint_seconds: float, experiment: Experiment
    ) -> None:
        run, identity = self.configuration.fingerprint(), self.identity
        try:
            start = self.checkpoint(experiment)
            kept = [row for row in self.rows() if start is not None and row["step"] <= start.step]
            write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept).encode())
            last_row, saved = kept[-1]["step"] if kept else None, time.monotonic()
            with (self.path / "metrics.jsonl").open("a") as metrics:
                for moment in experiment.run(start):
                    if moment.metrics is not None and moment.step != last_row:
                        metrics.write(json.dumps(moment.row()) + "\n")
                        metrics.flush()
                        last_row = moment.step
                    observe(moment)
                    if stop.signum is not None or time.monotonic() - saved >= checkpoint_seconds:
                        os.fsync(metrics.fileno())
                        self._write_checkpoint(moment, experiment, run, identity)
                        saved = time.monotonic()
                    stop.check()
                os.fsync(metrics.fileno())
        except Diverged as error:
            self._finish({"status": "diverged", "reason": str(error), "caveats": experiment.caveats()}, identity)
            raise
        self._write_checkpoint(moment, experiment, run, identity)
        self._finish({"status": "finished", "caveats": experiment.caveats(), **moment.row()}, identity)

    def _require(self, identity: str) -> None:
        if not self.holds(identity):
            raise InputError(f"{self.path} was given to another run while this one was at work: choose another --out")

    def _finish(self, result: dict[str, Any], identity: str) -> None:
        self._require(identity)
        write_atomically(self.path / "result.json", (json.dumps(result, indent=2) + "\n").encode())

    def _write_checkpoint(self, moment: Snapshot, experiment: Experiment, run: str, identity: str) -> None:
        leaves = experiment.saved(moment)
        checkpoint = Checkpoint(run, moment.step, list(moment.totals), moment.seconds, leaves, moment.reported).encoded()
        self._require(identity)
        write_atomically(self.path / "checkpoint", checkpoint)
        x = io.BytesIO()
        np.save(x, np.asarray(moment.state.x), allow_pickle=False)
        write_atomically(self.path / "x.npy", x.getvalue())
