"""Faults in a real federation on this machine's loopback: each run must end with the numbers of one that nothing disturbed.

    python tests/chaos.py [--faults N] [--seed N]

First every kind of fault once, then N at random moments. A table says for each what the run cost and whether its metrics,
absences included, are those of the undisturbed run to the last bit; the exit status is 1 if one's are not.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from real_federations import COMMAND, ENVIRONMENT, Running, command, free_port, until

SITES = ["hospital-1", "hospital-2", "hospital-3"]
RUN = ["quadratic", "fedbio-local", "--knob", "lower_level=local", "--knob", "noise=0.1", "--every", "50", "--rounds", "400"]
LONGEST = 300  # seconds that a run with a fault may take
PAUSES = [0.0, 2.0]  # seconds that a killed `federation start` stays away


class Chaos:
    """A federation, each of whose kits has a process that restarts it, and a run on it."""

    def __init__(self, folder, choose):
        self.folder, self._choose = folder, choose
        command("federation", "init", folder / "f", "--sites", ",".join(SITES), "--port", free_port())
        self.kits = {name: Running(folder / "f", name) for name in ("server", *SITES)}
        self.kits["server"].serve()
        self.kits["server"].await_sites()

    def end(self):
        for kit in self.kits.values():
            kit.stop()

    def run(self, name, fault=None):
        """The rows of a run, how long it took, and what it said; a fault happens after its first checkpoint."""
        began, out = time.monotonic(), self.folder / name
        self.process = self._command("run", *RUN, "--federation", self.folder / "f", "--out", out)
        if fault:
            until(lambda: list(out.glob("*/checkpoint")) or self.process.poll() is not None, 90, "a checkpoint")
            time.sleep(self._choose.uniform(0, 3))
            fault(self)
        said, _ = self.process.communicate(timeout=LONGEST)
        if not list(out.glob("*/result.json")):  # the command was killed, or gave up
            self.kits["server"].await_sites()
            said += command("resume", out, timeout=LONGEST).stdout
        (file,) = out.glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows], time.monotonic() - began, said

    def _command(self, *words):
        words = [*COMMAND, *map(str, words)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)

    def _kill(self, name, kind):
        for victim in self.kits[name].processes(name, kind):
            victim.kill()

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
        victims = self.kits[name].processes(name)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for victim in victims:
                victim.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(self._choose.uniform(3, 8))


FAULTS = [
    *(Chaos.site_job, Chaos.site, Chaos.site_for_good, Chaos.server_job, Chaos.server),
    *(Chaos.command, Chaos.everything, Chaos.frozen_site, Chaos.frozen_server),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=6, help="how many, at random, after one of each kind")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    choose = random.Random(given.seed)
    faults = [*FAULTS, *choose.choices(FAULTS, k=given.faults)]
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), choose)
        try:
            undisturbed, seconds, _ = chaos.run("undisturbed")
            print(f"{'undisturbed':16} {seconds:5.0f} s", flush=True)
            for number, fault in enumerate(faults):
                rows, seconds, said = chaos.run(f"{number}", fault)
                same = rows == undisturbed
                different += not same
                absences = sum(row["absences"] for row in rows)
                print(
                    f"{fault.__name__:16} {seconds:5.0f} s  {'the same' if same else 'DIFFERENT'}, {absences:g} absences",
                    flush=True,
                )
                if not same:
                    print(said, flush=True)
        finally:
            chaos.end()
    print(f"{len(faults)} faults, {different} runs with other numbers")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
