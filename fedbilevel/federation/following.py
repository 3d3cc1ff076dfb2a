"""Following a run's job: showing what it writes in the run folder, and stopping it when there is a reason."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

from fedbilevel.core.traffic import Totals
from fedbilevel.federation.connection import PATIENCE, is_lost
from fedbilevel.federation.job import STOP, STOPPING, Status, read_status
from fedbilevel.federation.returning_sites import ReturningSites
from fedbilevel.federation.session import Session, has_finished, trouble
from fedbilevel.federation.waiting import POLL
from fedbilevel.runs.experiment import COUNTERS, Snapshot
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.stopping import StopRequest

RETURN = 2.0  # seconds between two checks for sites that came back


class FolderWatch:
    """Shows what a run's jobs write in its folder as it appears, each item once even if a job repeats it."""

    def __init__(self, folder: RunFolder, observe: Callable[[Snapshot], None], say: Callable[[str], None]):
        self.folder, self._observe, self._say = folder, observe, say
        self._last_step = -1
        self._told: set[str] = set()

    @functools.cached_property
    def _diagnostics(self) -> dict[str, str]:
        return self.folder.configuration.configured_algorithm().diagnostics()

    def look(self) -> Status:
        """Show new rows of metrics, and sites that are newly left out; returns the job's status."""
        for row in self.folder.rows():
            if row["step"] > self._last_step:
                self._last_step = row["step"]
                step, *totals, seconds = (row[name] for name in COUNTERS)
                reported = {name: row.pop(name) for name in self._diagnostics if name in row}
                metrics = {name: value for name, value in row.items() if name not in COUNTERS}
                self._observe(Snapshot(None, step, Totals(*totals), seconds, metrics, reported))
        status = read_status(self.folder.path)
        refused = [f"continuing without a site that refuses the run: {line}" for line in status.get("left_out", [])]
        for line in (*status.get("said", []), *refused):
            if line not in self._told:
                self._say(line)
                self._told.add(line)
        return status


def follow(session: Session, job: str, watch: FolderWatch, returning: ReturningSites, stop: StopRequest) -> str:
    """Follow a job to its end, stopping it on request or when a site comes back; returns how it ended."""
    back: list[str] = []
    status, looked, stopping = "", time.monotonic(), math.inf
    losses = session.engine.losses
    answered, grace = looked, max(STOPPING, 2 * watch.folder.configuration.round_timeout)
    while not has_finished(status):
        time.sleep(POLL)
        said, now = watch.look(), time.monotonic()
        if said.get("ended") or now - stopping > grace:
            session.abort(job)  # it has nothing left to do, but FLARE waits for lost sites
            status = "ended"
            break
        try:
            status, answered = session.status(job), time.monotonic()
            if session.engine.losses > losses and job not in session.running() and not has_finished(status):
                session.abort(job)
                status = "FINISHED:the server was restarted"
            losses = session.engine.losses
            if now - looked > RETURN and not back:
                looked, back = now, returning.found(session, job, begun=bool(said.get("begun")))
        except Exception as error:
            if is_lost(error) or now - answered > PATIENCE:
                raise trouble(session.federation, error) from None
        if back and returning.restarted(job, back):
            session.abort(job)  # it waits for an answer that will never come, and must not do without it
            break
        if (stop.signum is not None or back) and stopping == math.inf:
            stopping = now
            (watch.folder.path / STOP).touch()
    watch.look()
    (watch.folder.path / STOP).unlink(missing_ok=True)
    return f"{' and '.join(back)} came back" if back else status.removeprefix("FINISHED:").lower().replace("_", " ")
