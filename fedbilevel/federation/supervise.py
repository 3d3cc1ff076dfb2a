"""Runs on a federation: submitted as jobs, followed in their run folders, and resubmitted when a job dies."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from fedbilevel.errors import Diverged, InputError, in_one_line
from fedbilevel.federation.connection import is_lost
from fedbilevel.federation.following import FolderWatch, follow
from fedbilevel.federation.job import JOB, STATUS, STOP, read_status, write_job
from fedbilevel.federation.leftovers import end_orphans, tidy
from fedbilevel.federation.provision import Federation
from fedbilevel.federation.returning_sites import ReturningSites
from fedbilevel.federation.session import Session, told
from fedbilevel.federation.waiting import POLL
from fedbilevel.runs.experiment import Snapshot
from fedbilevel.runs.files import locked
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.stopping import StopRequest

GATHER = 30.0  # seconds that sites have to connect before a run continues without them
LEAST_FREE = 1 << 20  # bytes of a disk that is not full
DEATHS = 3  # consecutive jobs that die before a checkpoint


class Supervisor:
    """The researcher's side of a federation."""

    def __init__(self, federation: Federation, say: Callable[[str], None]):
        self.federation, self._say = federation, say
        self._returning = ReturningSites(say)
        self._submitted: set[str] = set()

    def run(self, folder: RunFolder, stop: StopRequest, observe: Callable[[Snapshot], None]) -> None:
        """Bring a run to its end, with as many jobs as it takes. Raises `Diverged` or `Interrupted`."""
        deaths, watch = 0, FolderWatch(folder, observe, self._say)
        with locked(folder.path, by="config.json"), Session.open(self.federation, self._say) as session:
            while folder.result is None:
                before = _checkpointed(folder)
                ended = self._job(session, watch, stop)
                stop.check()
                if folder.result is not None:
                    break
                status = read_status(folder.path)
                reason = full_disk(folder.path, self.federation.folder) or status.get("error", ended)
                deaths = 0 if _checkpointed(folder) > before else deaths + 1
                if status.get("final") or deaths >= DEATHS:
                    logs = self.federation.folder / "server" / "console.txt"
                    raise InputError(f"the run stopped: {reason}; fix that (see {logs}), then resume it")
                self._say(f"the job ended early ({reason}); continuing from the last checkpoint")
        if (result := folder.result) and result["status"] == "diverged":
            raise Diverged(result.get("reason", f"{folder.path} diverged"))

    def _job(self, session: Session, watch: FolderWatch, stop: StopRequest) -> str:
        """Run one job until it or the run ends; returns how the job ended."""
        self._gather(session, stop)
        if stop.signum is not None:
            return "stopped"
        folder = watch.folder
        with TemporaryDirectory(dir=self.federation.admin) as temporary, told(self.federation):
            end_orphans(session, folder, self._submitted, self._say)
            tidy(session, folder)
            for name in (STATUS, STOP):
                (folder.path / name).unlink(missing_ok=True)
            write_job(Path(temporary) / JOB, folder, self.federation.sites)
            try:
                job = session.engine.submit_job(str(Path(temporary) / JOB))
            except Exception as error:
                if not is_lost(error):
                    raise
                return f"the server did not confirm the job ({in_one_line(error)})"
        self._submitted.add(job)
        try:
            return follow(session, job, watch, self._returning, stop)
        except BaseException:  # nobody is left to follow it
            session.abort(job)
            raise

    def _gather(self, session: Session, stop: StopRequest) -> None:
        """Wait until all sites are connected, or their time is up."""
        deadline = time.monotonic() + GATHER
        while stop.signum is None:
            with told(self.federation):
                there = session.connected()
            absent = [site for site in self.federation.sites if site not in there]
            if not absent:
                return
            if time.monotonic() > deadline:
                if not there:
                    raise InputError("no site is connected: start the sites with 'fedbilevel federation start'")
                self._say(f"continuing without {', '.join(absent)}: not connected")
                return
            time.sleep(POLL)


def full_disk(*places: Path) -> str:
    """Which of these places has no room left for what a job writes, in words; nothing if all have."""
    full = [place for place in places if shutil.disk_usage(place).free < LEAST_FREE]
    return f"the disk with {full[0]} is full" if full else ""


def _checkpointed(folder: RunFolder) -> float:
    """When the last checkpoint was written."""
    file = folder.path / "checkpoint"
    return file.stat().st_mtime if file.exists() else 0.0
