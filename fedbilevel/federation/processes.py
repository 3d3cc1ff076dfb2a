"""The processes of a federation on this machine: started, restarted when they die, and all ended when we end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from fedbilevel.core.locks import held
from fedbilevel.errors import InputError
from fedbilevel.federation.provision import ENGINE, HEARTBEAT, ORGANISATION, SERVER
from fedbilevel.runs.stopping import heeded
from fedbilevel.user_files import read_json

RESTARTS, WITHIN = 5, 120.0  # a kit that dies this often within this many seconds is given up
PROGRAMS = {kind: f"nvflare.private.fed.app.{kind}.{kind}_train" for kind in ("server", "client")}
MOST_LOG = 50 << 20  # bytes above which a kit's log begins anew, beside the one before
LOGS = ("console.txt", "audit.log")  # those that FLARE itself does not bound
GRACE = 5.0  # seconds that processes have to end on their own
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class KitProcess:
    """FLARE's process for one kit, which starts others for each job."""

    def __init__(self, kit: Path):
        if not (kit / "startup").is_dir():
            raise InputError(f"{kit} is not a start-up kit: give the folder that holds it, and its name with --site")
        if re.search(r"\s", str(kit)):
            raise InputError(f"the kit {str(kit)!r} has a space in its path, which FLARE cannot handle: move it")
        self.kit, self.name = kit.resolve(), kit.name
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it and its jobs log to `console.txt` in its kit."""
        self.bound_logs()
        (self.kit / "tmp").mkdir(exist_ok=True)
        (self.kit / "transfer").mkdir(exist_ok=True)
        if self.name == SERVER:
            keep_storage_inside(self.kit)
        kind = "server" if self.name == SERVER else "client"
        options = ["secure_train=true", f"org={ORGANISATION}", "config_folder=config"]
        options += [f"uid={self.name}", f"heart_beat_interval={HEARTBEAT}"] if kind == "client" else []
        with (self.kit / "console.txt").open("ab") as console:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-u", "-m", ENGINE, PROGRAMS[kind]),
                    *("-m", str(self.kit), "-s", f"fed_{kind}.json", "--set", *options),
                ],
                cwd=self.kit,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self.kit / "tmp")},
                start_new_session=True,  # Ctrl-C reaches only us; we then stop it in order
                preexec_fn=_die_with_parent,
            )

    def bound_logs(self) -> None:
        """Empty a log that has grown too large, after a copy: its processes hold it open, and append to what is there.

        While the disk is too full for a copy, it stays.
        """
        for file in (self.kit / name for name in LOGS):
            with contextlib.suppress(OSError):
                if file.stat().st_size > MOST_LOG:
                    shutil.copyfile(file, file.with_name(f"{file.stem}.old{file.suffix}"))
                    os.truncate(file, 0)

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process ID."""
        assert self._process is not None
        return self._process.pid


def run(kits: Sequence[KitProcess], say: Callable[[str], None]) -> None:
    """Keep the kits' processes running until a signal to stop, then stop them all. One that keeps dying is given up."""
    deaths: dict[KitProcess, list[float]] = {kit: [] for kit in kits}
    with _signals() as stopped, _private_files(), contextlib.ExitStack() as alone, _nothing_left():
        for kit in kits:
            taken = f"the kit {kit.kit} is already running: stop its other process first"
            alone.enter_context(held(kit.kit / "startup", taken))
        for kit in kits:
            kit.start()
        while not stopped():
            time.sleep(0.2)
            for kit in deaths:
                kit.bound_logs()
            for kit in [kit for kit in deaths if not kit.alive]:
                now = time.monotonic()
                deaths[kit] = [*(t for t in deaths[kit] if now - t < WITHIN), now]
                if len(deaths[kit]) >= RESTARTS:
                    del deaths[kit]
                    trouble = f"{kit.name} ended {RESTARTS} times in {WITHIN:.0f} s: read {kit.kit / 'console.txt'}"
                    if not deaths:
                        raise InputError(trouble)
                    say(trouble)
                    continue
                say(f"{kit.name} ended; restarting it")
                _end([p for p in psutil.Process().children(recursive=True) if _of(p, kit.kit)])
                kit.start()


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """During the block, files and folders that we and our processes make are for their owner alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _of(process: psutil.Process, kit: Path) -> bool:
    """Whether a process works for a kit."""
    with contextlib.suppress(psutil.Error):
        return str(kit) in process.cmdline()
    return False


def keep_storage_inside(kit: Path) -> None:
    """Have the server keep its jobs in its kit instead of in a shared folder."""
    file = kit / "local" / "resources.json"
    resources = read_json(file, dict[str, Any])
    try:
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit / "storage" / "snapshots")
        for component in resources["components"]:
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = str(kit / "storage" / "jobs")
    except (KeyError, TypeError) as error:
        raise InputError(f"{file} is not what the engine wrote there (it has no {error}): restore it from the kit") from None
    file.write_text(json.dumps(resources, indent=2) + "\n")


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """During the block, record signals to stop instead of acting on them."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in heeded()}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """When the block ends, end all processes started in it and their descendants, orphaned ones included."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # a killed process's orphans become our children
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        _end([p for p in psutil.Process().children(recursive=True) if p not in before])


def _end(processes: list[psutil.Process]) -> None:
    for act in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                act(process)
        _, processes = psutil.wait_procs(processes, GRACE)
