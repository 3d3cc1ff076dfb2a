"""How a kit's process starts those of its jobs: like FLARE does, but guarded, and without leaving all their folders behind."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher

from fedbilevel.federation.guarded_process import require_guarded
from fedbilevel.federation.provision import ENGINE

MOST_FOLDERS = 8  # of jobs that have ended, at a site
UNGUARDED = " -m nvflare."


class ServerJobs(ServerProcessJobLauncher):
    """For the server's kit."""

    def __init__(self) -> None:
        require_guarded()
        super().__init__()

    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        """The command that starts a job's process."""
        return _guarded(super().get_command(job_meta, fl_ctx))


class SiteJobs(ClientProcessJobLauncher):
    """For a site's kit."""

    def __init__(self) -> None:
        require_guarded()
        super().__init__()

    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        """The command that starts a job's process."""
        tidy(Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()), fl_ctx.get_engine().get_all_job_ids())
        return _guarded(super().get_command(job_meta, fl_ctx))


def _guarded(command: str) -> str:
    if UNGUARDED not in command:
        raise RuntimeError(f"FLARE would start a job's process unguarded, by a command without{UNGUARDED}")
    return command.replace(UNGUARDED, f" -m {ENGINE} nvflare.", 1)


def is_job_id(job: Any) -> bool:
    """Whether this can be the identity of a job, as FLARE's server gives it."""
    return isinstance(job, str) and re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", job) is not None


def tidy(kit: Path, running: Collection[str]) -> None:
    """Delete the folders of all but the latest jobs and those that run; their results are in the run folders."""
    ended = (p for p in kit.iterdir() if is_job_id(p.name) and p.name not in running)
    folders = sorted(ended, key=lambda p: p.stat().st_mtime)
    for folder in folders[:-MOST_FOLDERS]:
        shutil.rmtree(folder, ignore_errors=True)
