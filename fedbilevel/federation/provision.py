"""Start-up kits: what the server, every site and the researcher get when a federation is created.

    FOLDER/federation.toml      what was created: host, port, sites
    FOLDER/server               the server's kit
    FOLDER/<site>               a site's kit; in it, `local/site.toml` is the site's own and describes its data
    FOLDER/admin                the researcher's kit, which may start runs
    FOLDER/authority            the key that signs certificates: keep it offline

A kit holds a certificate and its key, so each goes to its owner and to nobody else. Every kit refuses jobs that ship
code, allows only the classes named here, and sends no logs to the server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbilevel.errors import InputError
from fedbilevel.federation.nvflare_support import require_flare
from fedbilevel.user_files import naming, read_json, read_toml

ADMIN = "admin@fedbilevel.org"  # FLARE wants an email address; no mail is ever sent
ORGANISATION = "fedbilevel"
SERVER, ADMINISTRATOR, AUTHORITY = "server", "admin", "authority"
RESERVED = (SERVER, ADMINISTRATOR, AUTHORITY)
DEFAULT_PORT = 8002
HEARTBEAT, HEARTBEAT_TIMEOUT = 4, 20  # seconds between a site's heartbeats, and until a silent site counts as gone
SITES_ANSWER = 3.0  # seconds that the server waits for its sites before it answers a researcher, who waits for five
UNGUARDED = ("startup/start.sh", "startup/sub_start.sh", "startup/stop_fl.sh")  # FLARE's scripts: they start it as it is
CALLS = "nvflare.collab.runtime.cell_dispatcher"  # logs two lines per call, and runs make thousands of calls

SERVER_CLASS = "fedbilevel.federation.server.ExperimentServer"
SITE_CLASS = "fedbilevel.federation.site.Site"
CONTROLLER_CLASS = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR_CLASS = "nvflare.collab.runtime.executor.CollabExecutor"
CLASSES = {"server": (SERVER_CLASS, CONTROLLER_CLASS), "site": (SITE_CLASS, EXECUTOR_CLASS)}
FORMATTER = "fedbilevel.federation.log_lines.PlainFormatter"
ENGINE = "fedbilevel.federation.guarded_engine"
LAUNCHERS = "fedbilevel.federation.job_launchers"

RIGHTS = {  # of the only role; nobody may ship code or run shell commands
    "submit_job": "any",
    "manage_job": "any",
    "view": "any",
    "operate": "any",
    "clone_job": "none",
    "download_job": "none",
    "shell_commands": "none",
    "byoc": "none",
}

KIT_README = """\
This is the start-up kit of {name} in a federation. It holds a private key: keep it to yourself. Start it with

    fedbilevel federation start FOLDER --site {name}

where FOLDER is the folder that holds this one. It does not run under NVIDIA FLARE's own commands.
"""

SITE_TOML = """\
# What data this site has. It stays here: nothing in this file is sent anywhere, except for the task and the knobs
# below in the line that refuses a run.

task = "data-cleaning"        # the task whose losses this site computes; runs of other tasks are refused
loader = "share"              # share: this site's share of the task's simulated clients (for trials)
                              # files: an .npz with arrays upper_<field> and lower_<field>, a row per sample
                              # function: module:name of your own function, which returns (upper rows, lower rows)
                              # task: an own task reads this site's file itself
                              # table: a .csv or .parquet file, for an own task on tables
client = {number}                    # share: which of the simulated clients this site is
# path = "rows.npz"           # files, table: relative to this file
# function = "mine:rows"      # function
# data = "/srv/data"          # task: the folder with this site's file

[knobs]                       # settings of the task that this site insists on; a run with others is refused
# clients = {sites}

[policy]                      # what this site insists on besides; a run that does not comply is refused
# least_batch_size = 32       # rows in a minibatch
# least_rows = 100            # rows behind any answer
# memory = 4.0                # gigabytes that a run may make this site use, and half of what it may keep on disk
# seconds = 600.0             # that a request may take by an optimistic estimate
# secure_sum = true           # the server learns sums over sites, and nothing of this one alone
# at_least = 3                # the fewest sites in such a sum
# most_weight = 0.75          # the largest share of the weights that one site has in such a sum
# colluding = 1               # sites whose noise others may know, where runs have private-sum: the fewest that it must bear
# refuse = ["gather"]         # algorithms whose server needs what each site sends, and not only their mean
# epsilon = 8                 # privacy of the rows, of all that they are ever asked for by all runs
# delta = 1e-5                # with that
# ledger = "/srv/privacy"     # with that: the folder, outside of this kit, of what these rows have been asked for

[trusted]                     # own code that this site runs, by SHA-256: 'fedbilevel federation trust' writes it
"""


@dataclass(frozen=True)
class Federation:
    """A federation, as its folder describes it."""

    folder: Path
    host: str
    port: int
    sites: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Federation:
        """Read a federation from its folder; `InputError` if that holds none."""
        file = folder / "federation.toml"
        if not file.exists():
            raise InputError(f"{folder} holds no federation: create one with 'fedbilevel federation init {folder}'")
        read = read_toml(file, cls, folder=folder)
        with naming(file):
            _check(read.sites, read.host, read.port)
        return read

    def write(self) -> None:
        """Write its description into its folder."""
        lines = [f"host = {json.dumps(self.host)}", f"port = {self.port}", f"sites = {json.dumps(list(self.sites))}"]
        (self.folder / "federation.toml").write_text("\n".join(lines) + "\n")

    @property
    def admin(self) -> Path:
        """The researcher's kit."""
        return self.folder / ADMINISTRATOR


def found(folder: Path, sites: Sequence[str], host: str, port: int = DEFAULT_PORT) -> Federation:
    """Create certificates and start-up kits in a new folder; `InputError` if an argument cannot be used."""
    require_flare()
    folder = folder.resolve()
    if re.search(r"\s", str(folder)):
        raise InputError(f"the folder {str(folder)!r} has a space in its path, which the engine cannot take: choose another")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not an empty folder: choose another")
    _check(sites, host, port)
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    try:
        kits, state = _provisioned(folder / ".new", sites, host, port)
        (kits / ADMIN).rename(folder / ADMINISTRATOR)
        (kits / host).rename(folder / SERVER)
        state.rename(folder / AUTHORITY)
        for site in sites:
            (kits / site).rename(folder / site)
        _lock_down(folder / SERVER, "server")
        for number, site in enumerate(sites):
            _lock_down(folder / site, "site")
            (folder / site / "local" / "site.toml").write_text(SITE_TOML.format(number=number, sites=len(sites)))
    except BaseException:
        for name in (SERVER, ADMINISTRATOR, AUTHORITY, *sites):
            shutil.rmtree(folder / name, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(folder / ".new", ignore_errors=True)
    federation = Federation(folder, host, port, tuple(sites))
    federation.write()
    for path in folder.rglob("*"):
        os.chmod(path, 0o700 if path.is_dir() or path.suffix == ".sh" else 0o600)
    return federation


def _check(sites: Sequence[str], host: str, port: int) -> None:
    for site in sites:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", site) or site in RESERVED:
            raise InputError(f"{site!r} cannot be a site's name: use letters, digits and -, and none of {', '.join(RESERVED)}")
    if len(set(sites)) < len(sites) or not sites:
        raise InputError(f"--sites needs one or more different names; given: {','.join(sites)}")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
        raise InputError(f"--host must be the name or address by which the sites reach the server; given: {host}")
    if host in sites:
        raise InputError(f"--host and a site are both called {host}: rename the site")
    if not 1 <= port <= 65535:
        raise InputError(f"--port must be from 1 to 65535; given: {port}")


def _provisioned(workspace: Path, sites: Sequence[str], host: str, port: int) -> tuple[Path, Path]:
    """FLARE's kits and the state of its certificate authority."""
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Project
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.signature import SignatureBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner

    project = Project(name="fedbilevel", description="", props={"api_version": 3, "name": "fedbilevel"})
    project.set_server(host, ORGANISATION, {"fed_learn_port": port, "admin_port": port})
    for site in sites:
        project.add_client(site, ORGANISATION, {})
    project.add_admin(ADMIN, ORGANISATION, {"role": "project_admin"})
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme="tcp", require_signed_jobs=True),
        CertBuilder(),
        SignatureBuilder(),
    ]
    context = Provisioner(str(workspace), builders).provision(project, logger=_Silent())
    if context.get(CtxKey.BUILD_ERROR):
        raise InputError(f"FLARE could not make the kits: {'; '.join(map(str, context.get(CtxKey.ERRORS, [])))}")
    return workspace / "fedbilevel" / "prod_00", workspace / "fedbilevel" / "state"


class _Silent:
    """Discards what FLARE logs while it makes kits; errors come back in its context."""

    def debug(self, message: str) -> None:
        """Discard the message."""

    info = warning = error = debug


def _lock_down(kit: Path, kind: str) -> None:
    """Allow only the classes that an experiment needs, refuse shipped code, send no logs, and start nothing unguarded."""
    local = kit / "local"
    for script in UNGUARDED:
        (kit / script).unlink()
    (kit / "readme.txt").write_text(KIT_README.format(name=kit.name))
    resources: dict[str, Any] = read_json(local / "resources.json.default", dict[str, Any])
    resources |= {"class_allow_list": list(CLASSES[kind]), "allow_log_streaming": False}
    resources["components"] = [c for c in resources["components"] if c["id"] not in ("site_log_streamer", "log_receiver")]
    for server in resources.get("servers", []):
        server |= {"heart_beat_timeout": HEARTBEAT_TIMEOUT, "admin_timeout": SITES_ANSWER}
    for component in resources["components"]:
        if component["id"] == "job_scheduler":
            component["args"] |= {"min_schedule_interval": 1.0, "max_schedule_interval": 10.0}
        if component["id"] == "process_launcher":
            component["path"] = f"{LAUNCHERS}.{kind.capitalize()}Jobs"
    logs: dict[str, Any] = read_json(local / "log_config.json.default", dict[str, Any])
    logs["loggers"][CALLS] = {"level": "WARNING"}
    logs["loggers"]["root"]["handlers"].remove("jsonFileHandler")  # the same once more
    for name in ("baseFormatter", "consoleFormatter"):
        logs["formatters"][name]["()"] = FORMATTER
    (local / "log_config.json").write_text(json.dumps(logs, indent=2) + "\n")
    (local / "resources.json").write_text(json.dumps(resources, indent=2) + "\n")
    policy = {"format_version": "1.0", "permissions": {"project_admin": RIGHTS}}
    (local / "authorization.json").write_text(json.dumps(policy, indent=2) + "\n")
