"""A researcher's session with a federation's server: its sites and jobs, and its errors in one line."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

from fedbilevel.errors import InputError, in_one_line
from fedbilevel.federation.connection import Connection, is_lost
from fedbilevel.federation.nvflare_support import require_flare
from fedbilevel.federation.provision import ADMIN, Federation

CONNECT = 10.0  # seconds within which the server must answer


class Session:
    """Requests to the server in our own terms; `engine` takes FLARE's own calls."""

    def __init__(self, federation: Federation, engine: Connection):
        self.federation, self.engine = federation, engine

    @classmethod
    @contextlib.contextmanager
    def open(cls, federation: Federation, say: Callable[[str], None]) -> Iterator[Session]:
        """A session with the researcher's certificate; `InputError` if the server does not answer."""
        require_flare()
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        logging.getLogger("nvflare").setLevel(logging.CRITICAL)
        before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a server that hangs up is an error to report, not our end
        (federation.admin / "transfer").mkdir(exist_ok=True)

        def new_session() -> Any:
            with contextlib.redirect_stdout(io.StringIO()):  # FLARE prints a greeting
                return new_secure_session(ADMIN, str(federation.admin.resolve()), timeout=CONNECT)

        try:
            with told(federation):
                engine = Connection(new_session, say)
            try:
                yield cls(federation, engine)
            finally:
                engine.close()
        finally:
            signal.signal(signal.SIGPIPE, before)

    def connected(self) -> list[str]:
        """The sites that are connected, in the federation's order."""
        names = {client.name for client in self.engine.get_system_info().client_info}
        return [site for site in self.federation.sites if site in names]

    def running(self) -> set[str]:
        """The jobs that have processes; FLARE's list of jobs also has those that a killed server left."""
        return {job.job_id for job in self.engine.get_system_info().job_info}

    def jobs(self, name: str, finished: bool) -> set[str]:
        """The jobs of this name that have finished, or those that have not."""
        named = [job for job in self.engine.list_jobs() if job.get("job_name") == name]
        return {job["job_id"] for job in named if has_finished(str(job.get("status", ""))) == finished}

    def status(self, job: str) -> str:
        """How a job is doing, in FLARE's words."""
        return str(self.engine.get_job_meta(job).get("status", ""))

    def abort(self, job: str) -> None:
        """End a job at once."""
        with contextlib.suppress(Exception):  # it has ended, or the server has
            self.engine.abort_job(job)


def has_finished(status: str) -> bool:
    """Whether a job with this status has ended, successfully or not."""
    return status.startswith("FINISHED")


@contextlib.contextmanager
def told(federation: Federation) -> Iterator[None]:
    """During the block, turn any error from the server into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise trouble(federation, error) from None


def trouble(federation: Federation, error: Exception) -> InputError:
    """The one-line error for one that came from the server, or on the way to it."""
    server, said = f"the server at {federation.host}:{federation.port}", f"{type(error).__name__}: {in_one_line(error)}"
    if is_lost(error):
        return InputError(f"{server} does not answer ({said}): start it, then resume")
    return InputError(f"{server} failed to do as asked ({said}): fix that, then resume")
