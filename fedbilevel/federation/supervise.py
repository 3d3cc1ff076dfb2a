"""Runs on a federation: submitted as jobs, followed in their run folders, and submitted again when a job dies."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedbilevel.core.traffic import Totals
from fedbilevel.errors import Diverged, InputError, in_one_line
from fedbilevel.federation.connection import PATIENCE, Connection, is_lost
from fedbilevel.federation.job import JOB, STATUS, STOP, job_name, read_status, write_job
from fedbilevel.federation.nvflare_support import require_flare
from fedbilevel.federation.provision import ADMIN, Federation
from fedbilevel.runs.experiment import COUNTERS, Snapshot
from fedbilevel.runs.files import is_locked, locked
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.stopping import StopRequest

POLL = 0.5  # seconds between two looks at a job
RETURN = 5.0  # seconds between two looks for sites that came back
CONNECT = 10.0  # seconds in which the server must answer
GATHER = 30.0  # seconds that sites get to connect before a run goes on without them
STOPPING = 60.0  # seconds, at least, that a job gets to stop after its checkpoint; two rounds may take longer
DEATHS = 3  # jobs in a row that die before a checkpoint
RETURNS = 3  # jobs in a row that are restarted for a site that then gets no part


class Supervisor:
    """The researcher's side of a federation."""

    def __init__(self, federation: Federation, say: Callable[[str], None]):
        self.federation, self._say = federation, say
        self._submitted: set[str] = set()
        self._returns: Counter[str] = Counter()
        self._left_out: set[str] = set()

    @contextlib.contextmanager
    def session(self) -> Iterator[Connection]:
        """A connection to the server with the researcher's certificate; `InputError` if the server does not answer."""
        require_flare()
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        logging.getLogger("nvflare").setLevel(logging.CRITICAL)
        before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a server that hangs up is an error to report, not an end
        (self.federation.admin / "transfer").mkdir(exist_ok=True)

        def new_session() -> Any:
            with contextlib.redirect_stdout(io.StringIO()):  # the engine greets
                return new_secure_session(ADMIN, str(self.federation.admin.resolve()), timeout=CONNECT)

        try:
            with self._told():
                session = Connection(new_session, self._say)
            try:
                yield session
            finally:
                session.close()
        finally:
            signal.signal(signal.SIGPIPE, before)

    def connected(self, session: Connection) -> list[str]:
        """The sites that are connected, in the federation's order."""
        names = {client.name for client in session.get_system_info().client_info}
        return [site for site in self.federation.sites if site in names]

    def running(self, session: Connection) -> list[str]:
        """The jobs that have processes; the engine lists those too that a killed server left."""
        return [job.job_id for job in session.get_system_info().job_info]

    def run(self, folder: RunFolder, stop: StopRequest, observe: Callable[[Snapshot], None]) -> None:
        """Bring a run to its end, with as many jobs as that takes. Raises `Diverged` or `Interrupted`."""
        deaths, seen = 0, _Seen(observe)
        with locked(folder.path, by="config.json"), self.session() as session:
            while folder.result is None:
                before = _progress(folder)
                ended = self._job(session, folder, stop, seen)
                stop.check()
                if folder.result is not None:
                    break
                status = read_status(folder.path)
                reason = status.get("error", ended)
                deaths = 0 if _progress(folder) > before else deaths + 1
                if status.get("final") or deaths >= DEATHS:
                    logs = self.federation.folder / "server" / "console.txt"
                    raise InputError(f"the run stopped: {reason}; mend that ({logs} says more), then resume it")
                self._say(f"the job ended early ({reason}); going on from the last checkpoint")
        result = folder.result or {}
        if result["status"] == "diverged":
            raise Diverged(str(result["reason"]))

    def _job(self, session: Connection, folder: RunFolder, stop: StopRequest, seen: _Seen) -> str:
        """One job, until it or the run ends: how the job ended."""
        self._gather(session, stop)
        if stop.signum is not None:
            return "stopped"
        with TemporaryDirectory(dir=self.federation.admin) as temporary, self._told():
            self._end_orphans(session, folder)
            self._tidy(session, job_name(folder.identity))
            for name in (STATUS, STOP):
                (folder.path / name).unlink(missing_ok=True)
            write_job(Path(temporary) / JOB, folder, self.federation.sites)
            try:
                job = session.submit_job(str(Path(temporary) / JOB))
            except Exception as error:
                if not is_lost(error):
                    raise
                return f"the server did not say whether it takes the job ({in_one_line(error)})"
        self._submitted.add(job)
        try:
            return self._followed(session, job, folder, stop, seen)
        except BaseException:  # nobody would follow it
            _abort(session, job)
            raise

    def _followed(self, session: Connection, job: str, folder: RunFolder, stop: StopRequest, seen: _Seen) -> str:
        """How a job ended, which is stopped where that is asked for or a site came back."""
        back: list[str] = []
        status, looked, stopping = "", time.monotonic(), math.inf
        losses = session.losses
        answered, grace = looked, max(STOPPING, 2 * folder.configuration.round_timeout)
        while not status.startswith("FINISHED"):
            time.sleep(POLL)
            seen.look(folder)
            now, said = time.monotonic(), read_status(folder.path)
            for line in said.get("left_out", []):
                if line not in self._left_out:
                    self._say(f"going on without a site that refuses the run: {line}")
                    self._left_out.add(line)
            if said.get("ended") or now - stopping > grace:
                _abort(session, job)  # nothing is left to do there, but the engine waits for lost sites
                status = "ended"
                break
            try:
                status, answered = str(session.get_job_meta(job).get("status", "")), time.monotonic()
                if session.losses > losses and job not in self.running(session) and not status.startswith("FINISHED"):
                    _abort(session, job)
                    status = "FINISHED:the server was started again"
                losses = session.losses
                if said.get("begun") and now - looked > RETURN and not back:
                    looked, back = now, self._back(session, job)
            except Exception as error:
                if is_lost(error) or now - answered > PATIENCE:
                    raise InputError(self._trouble(error)) from None
            if (stop.signum is not None or back) and stopping == math.inf:
                stopping = now
                (folder.path / STOP).touch()
        seen.look(folder)
        (folder.path / STOP).unlink(missing_ok=True)
        return f"{' and '.join(back)} came back" if back else status.removeprefix("FINISHED:").lower().replace("_", " ")

    def _back(self, session: Connection, job: str) -> list[str]:
        """The sites that are connected and have no part in a running job: a site that was restarted cannot rejoin it."""
        parts: dict[str, set[str]] = {}
        for part in session.get_client_job_status() or ():
            known = parts.setdefault(part["client_name"], set())
            known.add(part.get("job_id", part.get("status", "")))
        with_part = {site for site, jobs in parts.items() if job in jobs}
        for site in with_part:
            del self._returns[site]
        back = [s for s in self.federation.sites if with_part and s in parts and s not in with_part and _well(parts[s])]
        self._returns.update(back)
        for site in back:
            if self._returns[site] == RETURNS + 1:
                why = "console.txt in that site's kit says more"
                self._say(f"{site} is connected and got no part in {RETURNS} jobs ({why}): going on without it")
        return [site for site in back if self._returns[site] <= RETURNS]

    def _end_orphans(self, session: Connection, folder: RunFolder) -> None:
        """Stop jobs of the run that another command left, after a checkpoint if they can, and wait for their end."""
        name = job_name(folder.identity)
        orphans = {j["job_id"] for j in session.list_jobs() if j.get("job_name") == name and not _ended(j)} - self._submitted
        deadline = time.monotonic() + STOPPING
        if orphans & set(self.running(session)):
            self._say("stopping a job of this run that an earlier command left behind")
            (folder.path / STOP).touch()
            while not read_status(folder.path).get("ended") and time.monotonic() < deadline:
                time.sleep(POLL)
                if not orphans & set(self.running(session)):
                    break
        for job in orphans:
            _abort(session, job)
        deadline = time.monotonic() + STOPPING
        while is_locked(folder.path) or orphans & set(self.running(session)):
            if time.monotonic() > deadline:
                raise InputError(f"an earlier job of this run still works in {folder.path}: wait for its end, then resume")
            time.sleep(POLL)

    def _gather(self, session: Connection, stop: StopRequest) -> None:
        """Wait until all sites are connected, or as long as they get."""
        deadline = time.monotonic() + GATHER
        while stop.signum is None:
            with self._told():
                there = self.connected(session)
            absent = [site for site in self.federation.sites if site not in there]
            if not absent:
                return
            if time.monotonic() > deadline:
                if not there:
                    raise InputError("no site is connected: start them with 'fedbilevel federation start'")
                self._say(f"going on without {', '.join(absent)}: not connected")
                return
            time.sleep(POLL)

    def _tidy(self, session: Connection, name: str) -> None:
        """Have the engine forget jobs of this name that ended: their results are in the run folder."""
        for job in session.list_jobs():
            if job.get("job_name") == name and _ended(job):
                with contextlib.suppress(Exception):  # another researcher may have done it
                    session.delete_job(job["job_id"])

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Within it, trouble with the server is said in one line."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            raise InputError(self._trouble(error)) from None

    def _trouble(self, error: Exception) -> str:
        server, said = f"the server at {self.federation.host}:{self.federation.port}", in_one_line(error)
        if is_lost(error):
            return f"{server} does not answer ({type(error).__name__}: {said}): start it, then resume"
        return f"{server} did not do as asked ({type(error).__name__}: {said}): mend that, then resume"


class _Seen:
    """Shows the rows of a run's metrics as they appear, each once, also where a job repeats some."""

    def __init__(self, observe: Callable[[Snapshot], None]):
        self._observe, self._last = observe, -1

    def look(self, folder: RunFolder) -> None:
        for row in folder.rows():
            if row["step"] > self._last:
                self._last = row["step"]
                step, *totals, seconds = (row[name] for name in COUNTERS)
                metrics = {name: value for name, value in row.items() if name not in COUNTERS}
                self._observe(Snapshot(None, step, Totals(*totals), seconds, metrics))


def _ended(job: dict[str, Any]) -> bool:
    return str(job.get("status", "")).startswith("FINISHED")


def _abort(session: Connection, job: str) -> None:
    with contextlib.suppress(Exception):  # it has ended, or the server has
        session.abort_job(job)


def _well(jobs: set[str]) -> bool:
    """Whether a site that said this about its jobs has no trouble of its own."""
    return not any("error" in job or "timeout" in job or "no_reply" in job for job in jobs)


def _progress(folder: RunFolder) -> float:
    """When the last checkpoint was written."""
    file = folder.path / "checkpoint"
    return file.stat().st_mtime if file.exists() else 0.0
