"""The run folder: a run's configuration, its metrics as they come, and checkpoints that survive a kill.

config.json       the resolved configuration, the versions it ran with, and the SHA-256 of the user's code
metrics.jsonl     one line of numbers for each time metrics were due
checkpoint        the newest state; replaced atomically
x.npy             its x, for reports; that of the best round so far, if the run keeps that
solution.npz      likewise x and y as the user's trees, with an array for each leaf, named by its path
arrivals.jsonl    which answers came in time and which late, if its federation does not wait for all
preprocessing.json  what turned tables into its rows, where it has any
result.json       how the run ended: finished, or diverged and why

Several runs that begin together are subfolders of one folder. While their configurations are written, it holds
starting.json with all of them, so that either all or none begin, whenever a kill comes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from fedbilevel.core.clients import PerClient
from fedbilevel.core.problem import LOSSES, Tree
from fedbilevel.engines.arrivals import ARRIVALS
from fedbilevel.errors import Diverged, FolderTaken, InputError
from fedbilevel.own_code import Hashes, confirmed, hashes
from fedbilevel.runs.advice import advice_on_data, advice_on_run
from fedbilevel.runs.best_round import EndPoint
from fedbilevel.runs.checkpoint import Checkpoint
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.ending import Result
from fedbilevel.runs.experiment import Experiment, Snapshot
from fedbilevel.runs.files import locked, require_place, write_atomically
from fedbilevel.runs.rows import Row, row_check, with_bytes
from fedbilevel.runs.stopping import StopRequest
from fedbilevel.runs.stored_trees import Stored, encoded, read_trees
from fedbilevel.runs.versions import versions_here
from fedbilevel.tasks.base import Judged, Task
from fedbilevel.tasks.data.preprocessing import Preprocessing
from fedbilevel.user_files import naming, read_array, read_json, read_json_lines

CHECKPOINT_SECONDS = 10.0
PREPROCESSING = "preprocessing.json"
FILES = (
    "config.json",
    "metrics.jsonl",
    "checkpoint",
    "x.npy",
    "solution.npz",
    PREPROCESSING,
    ARRIVALS,
    "result.json",
    "job.json",
    "sites.json",
    "sums",
    "stop",
)
STARTING = "starting.json"


@dataclass(frozen=True)
class Beginning:
    """What `config.json` holds; that of old runs lacks some of it."""

    configuration: Mapping[str, Any]  # as `Configuration.plain` returns it
    versions: Mapping[str, str] = field(default_factory=dict)
    bytes_per_float: Literal[4, 8] = 4
    identity: str = ""  # distinguishes this run from all others, even with the same configuration
    code: Hashes = field(default_factory=dict)  # the SHA-256 of the user's files that define its task or its algorithm
    headline: str = ""  # the metric to compare runs by
    diagnostics: Sequence[str] | None = None  # the names of what its algorithm reports besides the metrics
    started: str = ""  # when, in UTC

    @classmethod
    def of(cls, configuration: Configuration) -> Beginning:
        """The beginning of a run that starts now."""
        diagnostics = list(configuration.configured_algorithm().diagnostics())
        return cls.now(configuration, hashes(configuration.names()), configuration.task_class().headline, diagnostics)

    @classmethod
    def now(cls, configuration: Configuration, code: Hashes, headline: str, diagnostics: Sequence[str]) -> Beginning:
        """The same where these are known, without building what the configuration describes."""
        versions = versions_here(*configuration.packages())
        size: Literal[4, 8] = 8 if jax.numpy.zeros(()).dtype == "float64" else 4
        started = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(configuration.plain(), versions, size, secrets.token_hex(8), code, headline, diagnostics, started)


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, runs: Mapping[Path, Configuration], force: bool = False) -> list[RunFolder]:
        """Create new runs, all or none; a folder that holds a run is refused unless `force`, which removes that run's files.

        Several runs must be subfolders of one folder.
        """
        parent = next(iter(runs)).parent
        cls.complete(parent)
        for path in runs:
            cls(path)._require_free(force)
        require_place(parent, "sweep.json", "tuning.json", "config.json")
        begin = {path: Beginning.of(configuration) for path, configuration in runs.items()}
        if len(runs) == 1:
            return [cls(path)._begin(beginning) for path, beginning in begin.items()]
        parent.mkdir(parents=True, exist_ok=True)
        with locked(parent):
            planned = {path.name: asdict(beginning) for path, beginning in begin.items()}
            write_atomically(parent / STARTING, json.dumps(planned).encode())
            return cls._begin_planned(parent)

    @classmethod
    def complete(cls, path: Path) -> None:
        """Finish the start of several runs in a folder, if a kill interrupted it."""
        if (path / STARTING).exists():
            with locked(path):
                cls._begin_planned(path)

    @classmethod
    def _begin_planned(cls, path: Path) -> list[RunFolder]:
        plan = path / STARTING
        planned = read_json(plan, dict[str, Beginning])
        with naming(plan):
            for beginning in planned.values():
                Configuration.read(beginning.configuration)
        begin = {cls(path / Path(name).name): beginning for name, beginning in planned.items()}
        begun = [run if run.holds(b.identity) else run._begin(b) for run, b in begin.items()]
        plan.unlink()
        return begun

    def begin(self, beginning: Beginning) -> RunFolder:
        """Begin one run in a folder that holds none."""
        self._require_free(force=False)
        return self._begin(beginning)

    def _require_free(self, force: bool) -> None:
        require_place(self.path, "sweep.json", "tuning.json")
        if (self.path / "config.json").exists() and not force:
            raise FolderTaken(f"{self.path} already holds a run: resume it, or choose another folder", replaceable=True)
        for by in ("", "config.json"):  # a run's own process, and a command that follows one elsewhere
            if (self.path / by).exists():
                with locked(self.path, by):
                    pass

    def _begin(self, beginning: Beginning) -> RunFolder:
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self._write(beginning)
        return self

    def _write(self, beginning: Beginning) -> None:
        write_atomically(self.path / "config.json", (json.dumps(asdict(beginning), indent=2) + "\n").encode())

    def confirm_code(self, *, changed: bool = False, trusted: bool = False) -> None:
        """Raise `InputError` if the user's code that it needs may not be executed, or has changed and must not have."""
        began = self._beginning()
        code = confirmed(self.configuration.names(), began.code, changed=changed, trusted=trusted)
        if code != began.code:
            with locked(self.path):
                self._write(replace(began, code=code))

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
        """The configuration as it was resolved when the run began."""
        stored = self._beginning().configuration
        with naming(self.path / "config.json"):
            return Configuration.read(stored)

    @property
    def bytes_per_float(self) -> int:
        """The size of a number that the run sends."""
        return self._beginning().bytes_per_float

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions that the run began with."""
        return self._beginning().versions

    @property
    def started(self) -> str:
        """When the run began, in UTC; empty if its version did not note it."""
        return self._beginning().started

    @property
    def code(self) -> Hashes:
        """The SHA-256 of the user's files that define its task or its algorithm, the newest last."""
        return self._beginning().code

    @property
    def data_elsewhere(self) -> bool:
        """Whether a site of its federation has said that its data is its own, and not the task's simulated one."""
        with contextlib.suppress(InputError):
            return not all(
                said.get("simulated") for said in read_json(self.path / "sites.json", dict[str, dict[str, Any]]).values()
            )
        return False

    @property
    def headline(self) -> str:
        """The metric to compare runs by."""
        return self._beginning().headline or self.configuration.task_class().headline

    @property
    def diagnostics(self) -> Sequence[str]:
        """The names of what its algorithm reports besides the metrics."""
        known = self._beginning().diagnostics
        return list(self.configuration.configured_algorithm().diagnostics()) if known is None else known

    @property
    def identity(self) -> str:
        """Distinguishes this run from all others, even with the same configuration."""
        return self._beginning().identity

    def _beginning(self) -> Beginning:
        return read_json(self.path / "config.json", Beginning)

    def holds(self, identity: str) -> bool:
        """Whether the folder still holds the run with this identity."""
        with contextlib.suppress(InputError):
            return self.identity == identity
        return False

    @property
    def result(self) -> Result | None:
        """How the run ended, or None while it has not."""
        file = self.path / "result.json"
        return read_json(file, Result) if file.exists() else None

    def rows(self) -> list[dict[str, Any]]:
        """The metrics so far; a line cut off by a kill is left out. `InputError` if a finished run lacks its last row."""
        ended = self.result  # before the rows, since a run that is under way may end meanwhile
        last, rows = ended.get("step") if ended else None, list(self._rows())
        if last is not None and (not rows or rows[-1]["step"] != last):
            raise InputError(
                f"{self.path / 'metrics.jsonl'} does not end with step {last}, as the run did: restore it, or remove "
                "result.json and the checkpoint beside it to start this run over"
            )
        return rows

    def _rows(self) -> Iterator[dict[str, Any]]:
        file, options = self.path / "metrics.jsonl", self.configuration.options
        rows, size = read_json_lines(file, Row, row_check(options)) if file.exists() else iter(()), self.bytes_per_float
        return (with_bytes(row, size) for row in rows)

    def x(self) -> np.ndarray | None:
        """x at the newest checkpoint; None if there is none."""
        file = self.path / "x.npy"
        return read_array(file) if file.exists() else None

    def point(self) -> dict[str, Tree]:
        """x and y at the newest checkpoint, as the user's trees; `InputError` if there is none."""
        return self._solution().trees

    def best_round(self) -> int | None:
        """The round that they are of, if it is the best so far; None if it is the last. `InputError` if there is none."""
        return self._solution().best_round

    def _solution(self) -> Stored:
        file = self.path / "solution.npz"
        if not file.exists():
            raise InputError(f"{self.path} has no x and y yet: it has not reached a checkpoint, or version 0.1 wrote it")
        return read_trees(file)

    def preprocessing(self) -> Preprocessing | None:
        """What turned tables into the run's rows; None if it has no tables."""
        file = self.path / PREPROCESSING
        return Preprocessing.load(file) if file.exists() else None

    def confirm_tables(self, preprocessing: Preprocessing) -> None:
        """Raise `InputError` if the run began with another preprocessing than the tables have now."""
        if self.preprocessing() not in (None, preprocessing):
            raise InputError(f"{self.path}: the tables have changed since the run began: restore them, or start a new run")

    def checkpoint(self, experiment: Experiment) -> Snapshot | None:
        """The run at its newest checkpoint, with a state for this experiment; None if there is no checkpoint."""
        stored = self._stored()
        return self._restored(stored, experiment) if stored else None

    def _stored(self) -> Checkpoint | None:
        file = self.path / "checkpoint"
        return Checkpoint.read(file, self.configuration.fingerprint()) if file.exists() else None

    def _restored(self, stored: Checkpoint, experiment: Experiment) -> Snapshot:
        try:
            state = experiment.restored(list(stored.leaves))
        except InputError as error:
            raise InputError(f"{self.path / 'checkpoint'} has {error}, or remove it to start this run over") from None
        totals = stored.totals.with_bytes(self.bytes_per_float)
        return Snapshot(state, stored.step, totals, stored.seconds, reported=dict(stored.reported))

    def _rows_until(self, stored: Checkpoint) -> list[dict[str, Any]]:
        """The rows that were written before a checkpoint; `InputError` if some of them are missing."""
        wanted = 1 if stored.rows is None else stored.rows
        kept = list(islice((row for row in self._rows() if row["step"] <= stored.step), stored.rows))
        if len(kept) < wanted:
            raise InputError(
                f"{self.path / 'metrics.jsonl'} has {len(kept)} of the {wanted} rows that it had when the checkpoint beside it "
                "was written: restore it, or remove the checkpoint to start this run over"
            )
        if stored.rows_sha256 not in (None, hashlib.sha256(_lines(kept)).hexdigest()):
            raise InputError(
                f"{self.path / 'metrics.jsonl'} has other numbers than when the checkpoint beside it was written: restore it, "
                "or remove the checkpoint to start this run over"
            )
        return kept

    def execute(
        self,
        stop: StopRequest,
        observe: Callable[[Snapshot], None],
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        experiment: Experiment | None = None,
    ) -> None:
        """Run from the checkpoint, or from the start, to the end. Raises `Diverged` or `Interrupted`.

        The experiment is the one that the configuration describes unless given: by a federation, whose sites take its steps.
        """
        if self.result is not None:
            return
        with locked(self.path):
            self._execute(stop, observe, checkpoint_seconds, experiment or self.experiment())

    def experiment(self) -> Experiment:
        """What the configuration describes, simulated and ready to run."""
        configuration = self.configuration
        with naming(self.path / "config.json"):
            return configuration.experiment()

    def _execute(
        self, stop: StopRequest, observe: Callable[[Snapshot], None], checkpoint_seconds: float, experiment: Experiment
    ) -> None:
        run, identity = self.configuration.fingerprint(), self.identity
        self._keep(experiment.task.preprocessing)
        try:
            stored = self._stored()
            start, kept = (self._restored(stored, experiment), self._rows_until(stored)) if stored else (None, [])
            end = EndPoint(experiment, stored.best if stored else None, kept)
            lines = _lines(kept)
            write_atomically(self.path / "metrics.jsonl", lines)
            rows, last_row, saved = len(kept), kept[-1]["step"] if kept else None, time.monotonic()
            digest = hashlib.sha256(lines)
            with (self.path / "metrics.jsonl").open("ab") as metrics:
                for moment in experiment.run(start):
                    if moment.metrics is not None and moment.step != last_row:
                        line = _lines([moment.row()])
                        metrics.write(line)
                        metrics.flush()
                        digest.update(line)
                        rows, last_row = rows + 1, moment.step
                    end.note(moment)
                    observe(moment)
                    if stop.signum is not None or time.monotonic() - saved >= checkpoint_seconds:
                        os.fsync(metrics.fileno())
                        self._write_checkpoint(moment, end, experiment, run, identity, rows, digest.hexdigest())
                        saved = time.monotonic()
                    stop.check()
                os.fsync(metrics.fileno())
        except Diverged as error:
            said = {"caveats": experiment.caveats(), "warnings": advice_on_data(experiment)}
            self._finish({"status": "diverged", "reason": str(error), **said}, identity)
            raise
        self._write_checkpoint(moment, end, experiment, run, identity, rows, digest.hexdigest())
        judged = self._judged(experiment.task)
        warnings = [*advice_on_run(experiment, self.rows(), moment.state, judged), *advice_on_data(experiment)]
        said = {"caveats": [*experiment.caveats(), *end.notes()], "warnings": warnings}
        self._finish({"status": "finished", **said, **moment.row(), **end.result()}, identity)

    def _judged(self, task: Task) -> Judged | None:
        """What knows the headline of the task, which was perhaps built where no configuration describes it."""
        if task.declared is not None:
            return task.declared.settings
        return None if self.headline in LOSSES else self.configuration.task_class()

    def _keep(self, preprocessing: Preprocessing | None) -> None:
        """Write the preprocessing beside the run; `InputError` if the run began with another."""
        if preprocessing is None:
            return
        self.confirm_tables(preprocessing)
        write_atomically(self.path / PREPROCESSING, preprocessing.encoded())

    def _require(self, identity: str) -> None:
        if not self.holds(identity):
            raise FolderTaken(f"{self.path} was taken over by another run while this one was running: choose another folder")

    def _finish(self, result: dict[str, Any], identity: str) -> None:
        self._require(identity)
        write_atomically(self.path / "result.json", (json.dumps(result, indent=2) + "\n").encode())

    def _write_checkpoint(
        self, moment: Snapshot, end: EndPoint, experiment: Experiment, run: str, identity: str, rows: int, rows_sha256: str
    ) -> None:
        leaves, so_far = experiment.saved(moment), (moment.totals, moment.seconds)
        checkpoint = Checkpoint(run, moment.step, *so_far, leaves, moment.reported, rows, rows_sha256, end.best).encoded()
        self._require(identity)
        write_atomically(self.path / "checkpoint", checkpoint)
        x, _ = end.arrays()
        if not isinstance(x, PerClient):
            content = io.BytesIO()
            np.save(content, np.asarray(x), allow_pickle=False)
            write_atomically(self.path / "x.npy", content.getvalue())
        write_atomically(self.path / "solution.npz", encoded(end.trees(), best_round=end.round))


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """The rows as lines of metrics.jsonl."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
