"""What a run's earlier jobs left at the server: jobs that nobody follows any more, and records of finished ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Set

from fedbilevel.errors import InputError
from fedbilevel.federation.job import STOP, STOPPING, job_name, read_status
from fedbilevel.federation.session import Session
from fedbilevel.federation.waiting import wait_until
from fedbilevel.runs.files import is_locked
from fedbilevel.runs.folder import RunFolder


def end_orphans(session: Session, folder: RunFolder, own: Set[str], say: Callable[[str], None]) -> None:
    """Stop the run's jobs that are not our own, after a checkpoint if possible, and wait until they have ended."""
    orphans = session.jobs(job_name(folder.identity), finished=False) - own

    def at_work() -> bool:
        return bool(orphans & session.running())

    if at_work():
        say("stopping a job of this run that an earlier command left behind")
        (folder.path / STOP).touch()
        wait_until(lambda: "ended" in read_status(folder.path) or not at_work(), STOPPING)
    for job in orphans:
        session.abort(job)
    if not wait_until(lambda: not is_locked(folder.path) and not at_work(), STOPPING):
        raise InputError(f"an earlier job of this run is still working in {folder.path}: wait until it ends, then resume")


def tidy(session: Session, folder: RunFolder) -> None:
    """Have FLARE forget the run's finished jobs: their results are in the run folder."""
    for job in session.jobs(job_name(folder.identity), finished=True):
        with contextlib.suppress(Exception):  # another researcher may have done it
            session.engine.delete_job(job)
