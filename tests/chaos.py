"""Faults in a real federation on this machine's loopback: each run must end with the numbers of one that nothing disturbed.

    python tests/chaos.py                            every kind of fault in every kind of run, then 12 drawn at random
    python tests/chaos.py --kinds site full_site     these kinds of fault alone
    python tests/chaos.py --faults 5 --seed 2        so many, all drawn at random

Runs are of two kinds: with plain means, and with secure sums over at least two of the three sites. Each fault happens at a
random moment of a run of its own. A table says when, how long the run took and whether its metrics and its last x and y are
those of the undisturbed run of its kind, to the last bit. They may be others only from a row on that counts an absence, and
must be finite then. An absence is allowed where a site is away for longer; in the first row, only if the fault came before
the run had a checkpoint, for then it begins anew, perhaps without a site. Otherwise the exit status is 1. A fault that found
the run ended, or nothing to disturb, is made again in another run. Full disks are small ones that root can mount: others
leave these kinds out.
"""

import argparse
import contextlib
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from real_federations import COMMAND, ENVIRONMENT, Running, command, free_port

SITES = ["hospital-1", "hospital-2", "hospital-3"]
PLAIN = ["quadratic", "fedbio-local", "--knob", "lower_level=local", "--knob", "noise=0.1", "--every", "50", "--rounds", "400"]
RUNS = {"plain": PLAIN, "secure": [*PLAIN, "--aggregate", "secure-sum", "--set-aggregate", "at_least=2"]}
LONGEST = 300  # seconds that a run with a fault may take
PAUSES = [0.0, 2.0]  # seconds that a killed `federation start` stays away
ROOM = 1 << 27  # bytes of a disk that is filled
RANDOM = 12
TRIES = 5  # to make a fault while there is something to disturb
SAME, DIFFERENT = "the same", "DIFFERENT"


class Missed(Exception):
    """There was nothing to disturb."""


class Ended(NamedTuple):
    """What came of a run."""

    rows: list[dict]  # of metrics, without their seconds
    point: dict[str, np.ndarray]  # the arrays of x and y
    status: str
    had_checkpoint: bool  # when the fault came
    seconds: float
    said: str


class Chaos:
    """A federation, each of whose kits has a process that restarts it, and a run on it."""

    def __init__(self, folder, choose, disks):
        self.folder, self._choose, self.runs = folder, choose, folder / "runs"
        command("federation", "init", folder / "f", "--sites", ",".join(SITES), "--port", free_port())
        if disks:
            for place in (folder / "f" / "server", folder / "f" / SITES[0], self.runs):
                disks.enter_context(mounted(place))
        self.kits = {name: Running(folder / "f", name) for name in ("server", *SITES)}
        self.kits["server"].serve()
        self.kits["server"].await_sites()

    def end(self):
        for kit in self.kits.values():
            kit.stop()

    def run(self, kind, name, fault=None, moment=0.0):
        """A run of that kind; a fault happens that many seconds after its beginning.

        Raises `Missed`, once the run has ended, if there was nothing to disturb.
        """
        began, out = time.monotonic(), self.runs / name
        words = "run", *RUNS[kind], "--federation", self.folder / "f", "--out", out
        self.process = self._command(*words)
        missed = had_checkpoint = False
        if fault:
            time.sleep(moment)
            had_checkpoint = bool(list(out.glob("*/checkpoint")))
            try:
                if self.process.poll() is not None:
                    raise Missed
                fault(self)
            except Missed:
                missed = True
        said, _ = self.process.communicate(timeout=LONGEST)
        if not list(out.glob("*/result.json")):  # the command was killed, or gave up
            self.kits["server"].await_sites()
            said += command(*(("resume", out) if list(out.glob("*/config.json")) else words), timeout=LONGEST).stdout
        if missed:
            raise Missed
        (folder,) = (file.parent for file in out.glob("*/metrics.jsonl"))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
        status = json.loads((folder / "result.json").read_text())["status"]
        with np.load(folder / "solution.npz") as point:
            return Ended(rows, dict(point), status, had_checkpoint, time.monotonic() - began, said)

    def _command(self, *words):
        words = [*COMMAND, *map(str, words)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)

    def _kill(self, name, kind):
        for victim in self._victims(name, kind):
            victim.kill()

    def _victims(self, name, kind=""):
        if found := self.kits[name].processes(name, kind):
            return found
        raise Missed

    def site_job(self):
        """A site's process for the job."""
        self._kill(self._choose.choice(SITES), "worker_process")

    def site(self):
        """All processes of a site; they are restarted at once."""
        self._kill(self._choose.choice(SITES), "")

    def site_for_good(self):
        """A site with what restarts it; it is back at once or after a while."""
        kit = self.kits[self._choose.choice(SITES)]
        kit.kill()
        time.sleep(self._choose.choice(PAUSES))
        kit.start()

    def server_job(self):
        """The server's process for the job."""
        self._kill("server", "runner_process")

    def server(self):
        """All processes of the server; they are restarted at once."""
        self._kill("server", "")

    def command(self):
        """The researcher's command; it is resumed."""
        self.process.kill()

    def everything(self):
        """Everything on the machine; the processes are started again, and the command is resumed."""
        self.process.kill()
        for kit in self.kits.values():
            kit.kill()
        for kit in self.kits.values():
            kit.start()

    def frozen_site(self):
        """A site that is stopped for some seconds and goes on."""
        self._freeze(self._choose.choice(SITES))

    def frozen_server(self):
        """The same for the server."""
        self._freeze("server")

    def _freeze(self, name):
        victims = self._victims(name)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for victim in victims:
                victim.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(self._choose.uniform(3, 8))

    def full_site(self):
        """A site whose disk is full for some seconds."""
        self._fill(self.folder / "f" / SITES[0])

    def full_server(self):
        """The same for the server's kit."""
        self._fill(self.folder / "f" / "server")

    def full_runs(self):
        """The same for the folder of the runs; the command gives up, and is resumed."""
        self._fill(self.runs)

    def _fill(self, disk):
        filler, refused = disk / "filler", None
        with filler.open("wb", buffering=0) as file:
            while refused is None:
                try:
                    file.write(bytes(1 << 16))
                except OSError as error:
                    refused = error.errno
        assert refused == errno.ENOSPC
        time.sleep(self._choose.uniform(3, 8))
        filler.unlink()


@contextlib.contextmanager
def mounted(folder):
    """During the block, a folder with its files is a small disk of its own."""
    aside = folder.with_name(folder.name + "-aside")
    folder.mkdir(exist_ok=True)
    folder.rename(aside)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM},mode=700", "chaos", folder], check=True)
    try:
        shutil.copytree(aside, folder, symlinks=True, dirs_exist_ok=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


FULL = [Chaos.full_site, Chaos.full_server, Chaos.full_runs]
FAULTS = [
    *(Chaos.site_job, Chaos.site, Chaos.site_for_good, Chaos.server_job, Chaos.server),
    *(Chaos.command, Chaos.everything, Chaos.frozen_site, Chaos.frozen_server),
]


AWAY = [Chaos.site_for_good, Chaos.full_site]  # for longer: sites may be absent at any time


def compared(run, undisturbed, away):
    """Whether a run has the numbers of the undisturbed one, at least until an absence that its fault excuses."""
    rows, usual = run.rows, undisturbed.rows
    if run.status != "finished" or len(rows) != len(usual):
        return f"{DIFFERENT}: {run.status}, with {len(rows)} of {len(usual)} rows"
    if rows == usual:
        return SAME if bits(run.point) == bits(undisturbed.point) else f"{DIFFERENT}: x and y"
    first = next(k for k in range(len(rows)) if rows[k] != usual[k])
    at = f"round {rows[first]['rounds']}"
    excused = away if first else not run.had_checkpoint
    if not (rows[first]["absences"] and excused):
        return f"{DIFFERENT}: metrics at {at}, with {rows[first]['absences']} absences"
    if any(measured(row) != measured(other) for row, other in zip(rows, usual, strict=True)):
        return f"{DIFFERENT}: metrics that are not finite, after an absence at {at}"
    if run.point.keys() != undisturbed.point.keys() or not all(np.isfinite(v).all() for v in run.point.values()):
        return f"{DIFFERENT}: x and y that are not finite, after an absence at {at}"
    return f"the same until an absence, counted at {at}"


def bits(point):
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in point.items()}


def measured(row):
    """The names of a row's finite numbers."""
    return {name for name, value in row.items() if value is not None and math.isfinite(value)}


def main():
    root = os.geteuid() == 0
    kinds = {fault.__name__: fault for fault in FAULTS + FULL * root}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=kinds, help="these kinds of fault alone, once in every kind of run")
    parser.add_argument("--faults", type=int, help="only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    choose = random.Random(given.seed)
    every = [(run, fault) for fault in kinds.values() for run in RUNS]
    faults = [(run, fault) for run, fault in every if given.faults is None and fault.__name__ in (given.kinds or kinds)]
    faults += [] if given.kinds else choose.choices(every, k=RANDOM if given.faults is None else given.faults)
    different = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as disks:
        chaos = Chaos(Path(folder), choose, disks if root else None)
        disks.callback(chaos.end)
        undisturbed = {run: chaos.run(run, f"undisturbed-{run}") for run in RUNS}
        for run, usual in undisturbed.items():
            print(f"{run:7} {'undisturbed':16} {usual.seconds:16.0f} s", flush=True)
            assert not compared(usual, usual, False).startswith(DIFFERENT), usual
        if not root:
            print("no full disks, which only root can mount")
        for number, (run, fault) in enumerate(faults):
            usual, name = undisturbed[run], f"{run:7} {fault.__name__:16}"
            for again in range(TRIES):
                moment = choose.uniform(0, usual.seconds)
                with contextlib.suppress(Missed):
                    ended = chaos.run(run, f"{number}-{again}", fault, moment)
                    break
                print(f"{name} after {moment:4.1f}          nothing to disturb: again", flush=True)
            else:
                sys.exit(f"{fault.__name__} was not made in {TRIES} runs")
            verdict = compared(ended, usual, fault in AWAY)
            different += verdict.startswith(DIFFERENT)
            print(f"{name} after {moment:4.1f} {ended.seconds:5.0f} s  {verdict}", flush=True)
            if verdict != SAME:
                print(ended.said, flush=True)
    print(f"{len(faults)} faults, {different} runs with other numbers")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
