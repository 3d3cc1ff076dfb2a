"""A run as a FLARE job: what is submitted, and the small files by which supervisor and jobs communicate.

job.json    in the run folder, written by the job: whether its sites have begun, who is left out, whether it has ended, and why
sites.json  in the run folder, written by the job for later ones: what each site said about its data (`Holdings`)
sums        in the run folder, written by the job for later ones: the secure sums that a repeated step has from there
stop        in the run folder, written by the supervisor: stop after the next checkpoint
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from fedbilevel.errors import InputError
from fedbilevel.federation.provision import CONTROLLER_CLASS, EXECUTOR_CLASS, SERVER_CLASS, SITE_CLASS
from fedbilevel.runs.files import write_atomically
from fedbilevel.runs.folder import RunFolder
from fedbilevel.user_files import read_json

STATUS, SITES, STOP = "job.json", "sites.json", "stop"
STOPPING = 60.0  # seconds, at least, that a job has to stop after its checkpoint; two rounds may take longer
SYNC_SECONDS = 120  # how long sites may take to start their part of a job
JOB = "fedbilevel"


def job_name(identity: str) -> str:
    """The name of a run's jobs, by which those that nobody follows any more can be found."""
    return f"{JOB}-{identity}"


def write_job(path: Path, folder: RunFolder, sites: Sequence[str]) -> None:
    """Write the job that runs a run folder's experiment, as files for FLARE: names of installed classes, and no code."""
    server = {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": CONTROLLER_CLASS,
                "args": {"server_obj_id": "server", "collab_obj_ids": [], "sync_task_timeout": SYNC_SECONDS},
            }
        ],
        "components": [
            {
                "id": "server",
                "path": SERVER_CLASS,
                "args": {"folder": str(folder.path.resolve()), "identity": folder.identity, "sites": list(sites)},
            }
        ],
    }
    client = {
        "format_version": 2,
        "executors": [
            {"tasks": ["*"], "executor": {"path": EXECUTOR_CLASS, "args": {"client_obj_id": "site", "collab_obj_ids": []}}}
        ],
        "components": [{"id": "site", "path": SITE_CLASS, "args": {}}],
    }
    meta = {"name": job_name(folder.identity), "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["@ALL"]}}
    config = path / "app" / "config"
    config.mkdir(parents=True)
    for file, content in (
        (config / "config_fed_server.json", server),
        (config / "config_fed_client.json", client),
        (path / "meta.json", meta),
    ):
        file.write_text(json.dumps(content, indent=2))


class Status(TypedDict, total=False):
    """What a job says of itself."""

    begun: bool
    said: list[str]  # about its sites' data
    left_out: list[str]
    ended: bool
    error: str
    final: bool


def write_status(folder: Path, status: Status) -> None:
    """Tell the supervisor how the job is doing."""
    write_atomically(folder / STATUS, json.dumps(status).encode())


def read_status(folder: Path) -> Status:
    """The job's last status; empty if it has not written any yet."""
    with contextlib.suppress(InputError):
        return read_json(folder / STATUS, Status)
    return {}
