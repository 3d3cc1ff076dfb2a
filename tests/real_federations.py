"""What tests of real federations share: a server and sites in processes of their own, and the command beside them."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from fedbilevel.federation.provision import Federation

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "fedbilevel"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(*arguments, timeout=240, check=True, **options):
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, **options
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.2)
    return value


class Running:
    """A federation in a folder, with a process that keeps its kits running."""

    def __init__(self, folder, *names):
        self.folder, self.names = folder, names
        self.home, self.temporary = folder.parent / "home", folder.parent / "temporary"
        for place in (self.home, self.temporary):
            place.mkdir(exist_ok=True)
        self.in_tmp_before = set(os.listdir("/tmp"))
        self.start()

    def start(self):
        options = [o for name in self.names for o in ("--site", name)]
        with (self.folder / "start.txt").open("ab") as out:
            self.process = subprocess.Popen(
                [*COMMAND, "federation", "start", self.folder, *options],
                stdout=out,
                stderr=out,
                env={**ENVIRONMENT, "HOME": str(self.home), "TMPDIR": str(self.temporary)},
            )

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)

    def kill(self):
        """With -9, and all that it started."""
        for victim in [self.process, *(p for name in self.names for p in self.processes(name))]:
            victim.kill()
        self.process.wait(30)

    def log(self, name="server"):
        """Everything that a participant logged: its own process, and those of its jobs."""
        return (self.folder / name / "console.txt").read_text()

    def processes(self, name, kind=""):
        found = []
        for p in psutil.process_iter(["cmdline"]):
            words = p.info["cmdline"] or []
            if str(self.folder / name) in words and kind in " ".join(words):
                found.append(p)
        return found

    def configure(self, name, **entries):
        lines = [f"{k} = {json.dumps(v)}" for k, v in entries.items()]
        (self.folder / name / "local" / "site.toml").write_text("\n".join(lines) + "\n")

    def await_sites(self):
        until(
            lambda: (said := status(self.folder)).count(": connected") == said.count("connected") > 0,
            90,
            "all sites to connect",
        )

    def serve(self, task="quadratic"):
        """Every site of its federation holds its share of a task."""
        for m, site in enumerate(Federation.read(self.folder).sites):
            self.configure(site, task=task, loader="share", client=m)


def port_of(federation):
    return int(next(p for p in (federation.folder / "federation.toml").read_text().splitlines() if "port" in p).split()[-1])


def tls(port, certificate=None, source="127.0.0.1"):
    """A connection with the certificate of a kit, or with none, from one of this machine's addresses."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(certificate / "startup" / "client.crt", certificate / "startup" / "client.key")
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(source, 0)))


def status(folder):
    return command("federation", "status", folder, check=False).stdout


def rows(folder, *without):
    (file,) = folder.glob("*/metrics.jsonl")
    drop = ("seconds", "absences", *without)
    return [{k: v for k, v in json.loads(line).items() if k not in drop} for line in file.read_text().splitlines()]


REPORTED = ("drift", "hypergradient_norm", "u_norm")


def assert_equal(deployed, simulated):
    """float32, relative 1e-5, for every metric that both have; the counters to the last digit.

    What an algorithm reports has fewer digits: near a solution its hypergradient is a difference of almost equal numbers.
    """
    assert len(deployed) == len(simulated)
    for ours, theirs in zip(deployed, simulated, strict=True):
        for name in ("step", "rounds", "floats_up", "floats_down", "bytes_up", "bytes_down"):
            assert ours[name] == theirs[name]
        names = [n for n in ours if n in theirs and n not in REPORTED]
        assert {"upper_loss", "lower_loss"} <= set(names)
        np.testing.assert_allclose([ours[n] for n in names], [theirs[n] for n in names], rtol=1e-5)
        reported = [n for n in REPORTED if n in theirs]
        np.testing.assert_allclose([ours[n] for n in reported], [theirs[n] for n in reported], rtol=1e-3)
