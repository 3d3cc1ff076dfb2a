"""A real federation: a server and three sites in processes of their own over mutual TLS, on this machine's loopback."""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
from real_federations import (
    COMMAND,
    ENVIRONMENT,
    HERE,
    Running,
    assert_equal,
    command,
    free_port,
    port_of,
    rows,
    status,
    tls,
    until,
)

from fedbilevel.command import main
from fedbilevel.federation.job import write_job
from fedbilevel.runs.folder import RunFolder

pytestmark = pytest.mark.federation

SITES = [f"hospital-{m}" for m in range(1, 4)]
ADMIN = "admin@fedbilevel.org"
SMALL = ["--knob", "noise=0.1", "--every", "10"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "f"
    command("federation", "init", folder, "--sites", ",".join(SITES), "--port", free_port())
    resources = folder / "server" / "local" / "resources.json"  # the server's owner may run what it likes on its machine
    content = json.loads(resources.read_text())
    content["class_allow_list"].append("hostile.HostileServer")
    resources.write_text(json.dumps(content))
    running, last = Running(folder, "server", *SITES[:-1]), Running(folder, SITES[-1])
    try:
        running.serve()
        running.last = last  # a site whose processes nobody starts again
        running.await_sites()
        yield running
    finally:
        last.stop()
        running.stop()
        assert not [p for name in ("server", *SITES) for p in running.processes(name)], "processes were left behind"


LOCAL = ["quadratic", "fedbio-local", "--knob", "lower_level=local", *SMALL[:2], "--every", "50", "--rounds", "400"]
RUNS = {
    "fedmbo": ["quadratic", "fedmbo", *SMALL, "--rounds", "40", "--set", "neumann_terms=4", "--clients-per-round", "2"],
    "mefbo": ["quadratic", "mefbo", *SMALL[:2], "--every", "50", "--rounds", "20000"],
    "fedbioacc": ["quadratic", "fedbioacc", *SMALL, "--rounds", "41", "--set", "local_steps=2"],
    "fedbio-local": LOCAL,
    "sampled": [*LOCAL[:-1], "200", "--clients-per-round", "2"],
    "long": [*LOCAL[:-1], "1600"],
    "commfedbio": ["quadratic", "commfedbio", *SMALL, "--rounds", "40", "--set", "system_rounds=2"],
    "secure": ["quadratic", "fedbio", *SMALL, "--rounds", "30", "--aggregate", "secure-sum"],
    "buffered": [*LOCAL[:-1], "1200", "--aggregate", "buffered", "--set-aggregate", "first=2"],
    "digits": ["data-cleaning", "fedbioacc", "--set", "local_steps=2", "--rounds", "21", "--every", "10"],
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Gives the folder of a run that is simulated when it is first asked for, in single precision as the sites' runs are."""
    folder = tmp_path_factory.mktemp("simulated")

    @functools.cache
    def simulate(name):
        jax.config.update("jax_enable_x64", False)
        try:
            arguments = [*RUNS[name], "--knob", f"clients={len(SITES)}", "--out", str(folder / name)]
            main.app(["run", *arguments], standalone_mode=False)
        finally:
            jax.config.update("jax_enable_x64", True)
        return folder / name

    return simulate


@pytest.mark.slow
def test_sites_that_insist_on_secure_sums_have_them_and_nothing_else(federation, simulated, tmp_path):
    for site in SITES:
        with (federation.folder / site / "local" / "site.toml").open("a") as file:
            file.write("[policy]\nsecure_sum = true\nat_least = 3\n")
    try:
        plain = [*RUNS["secure"][:-2], "--federation", federation.folder]
        refused = command("run", *plain, "--out", tmp_path / "plain", check=False)
        assert "this site insists on secure sums, but the run's aggregation is Mean: refused" in refused.stderr
        command("run", *RUNS["secure"], "--federation", federation.folder, "--out", tmp_path / "secure")
    finally:
        federation.serve()
    ours, theirs = rows(tmp_path / "secure"), rows(simulated("secure"))
    assert all(row.get("drift") is None for row in (*ours, *theirs))
    for a, b in zip(ours, theirs, strict=True):
        names = [name for name in b if name != "drift"]
        np.testing.assert_allclose([a[n] for n in names], [b[n] for n in names], rtol=1e-4)


def begin_ledger(kit):
    """What its owner does before a first run with a budget."""
    (kit / "privacy").mkdir(0o700, exist_ok=True)
    (kit / "privacy" / "ledger.jsonl").touch(0o600)
    return kit / "privacy" / "ledger.jsonl"


@pytest.mark.slow
def test_sites_with_a_privacy_budget_keep_to_it_over_all_runs(federation, tmp_path):
    for site in SITES:
        with (federation.folder / site / "local" / "site.toml").open("a") as file:
            file.write("[policy]\nepsilon = 7\n")
        begin_ledger(federation.folder / site)
    words = ["run", "quadratic", "simfbo", *SMALL, "--rounds", "20", "--every", "10", "--loss-bound", "1e12"]
    words += ["--federation", federation.folder]
    try:
        refused = command(*words, "--out", tmp_path / "plain", check=False)
        assert "this site insists on privacy of its rows (ε = 7 in all), which the run does not have" in refused.stderr
        command(*words, "--epsilon", "6", "--out", tmp_path / "first")
        spent = [row["epsilon"] for row in rows(tmp_path / "first")]
        assert spent == sorted(spent) and 5.9 < spent[-1] <= 6
        ledger = (federation.folder / SITES[0] / "privacy" / "ledger.jsonl").read_text()
        assert len(ledger.splitlines()) == 20 + 3  # answers, and metrics at the start, halfway and at the end
        again = command(*words, "--epsilon", "6", "--seed", "1", "--out", tmp_path / "second", check=False)
        assert "of this site's privacy in all, and it allows 7 at δ = 1e-05: refused" in again.stderr
        assert (federation.folder / SITES[0] / "privacy" / "ledger.jsonl").read_text() == ledger
    finally:
        federation.serve()


@pytest.mark.slow
def test_sites_that_trust_no_server_have_sums_with_their_own_noise_within_their_budgets(federation, tmp_path):
    for site in SITES:
        with (federation.folder / site / "local" / "site.toml").open("a") as file:
            file.write("[policy]\nsecure_sum = true\nat_least = 3\nepsilon = 30\n")
    ledgers = [begin_ledger(federation.folder / site) for site in SITES]
    words = ["run", "quadratic", "simfbo", *SMALL, "--rounds", "20", "--loss-bound", "1e12", "--federation", federation.folder]

    def paid():
        return [len(file.read_text().splitlines()) for file in ledgers]

    before = paid()
    try:
        refused = command(*words, "--aggregate", "secure-sum", "--out", tmp_path / "exact", check=False)
        assert "insists on privacy of its rows" in refused.stderr and paid() == before
        command(*words, "--aggregate", "private-sum", "--set-aggregate", "epsilon=6", "--out", tmp_path / "first")
        spent = [row["epsilon"] for row in rows(tmp_path / "first")]
        assert spent == sorted(spent) and 5.9 < spent[-1] <= 6
        assert paid() == [n + 20 + 3 for n in before]  # answers, and metrics at the start, halfway and at the end
        more = [*words, "--aggregate", "private-sum", "--set-aggregate", "epsilon=30", "--seed", "1"]
        again = command(*more, "--out", tmp_path / "second", check=False)
        assert "of this site's privacy in all, and it allows 30 at δ = 1e-05: refused" in again.stderr
        assert paid() == [n + 20 + 3 for n in before]
    finally:
        federation.serve()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedmbo", "commfedbio"])
def test_the_deployed_trajectory_and_traffic_are_the_simulated_ones(federation, simulated, tmp_path, algorithm):
    """FedBiOAcc, FedBiO-Local and MeFBO: below, beside a server that cheats, deaths, and strangers."""
    command("run", *RUNS[algorithm], "--federation", federation.folder, "--out", tmp_path / "deployed")
    found = rows(tmp_path / "deployed")
    assert_equal(found, rows(simulated(algorithm)))
    assert len(found) >= 4 and {"x_error", "y_error"} <= set(found[0])


@contextlib.contextmanager
def slowed(federation, name):
    """During the block, a site's processes for the job run for half of the time."""
    ended, victims = threading.Event(), federation.processes(name, "worker_process")

    def slow_down():
        while not ended.wait(0.2):
            for number, pause in ((signal.SIGSTOP, 0.2), (signal.SIGCONT, 0)):
                for victim in victims:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        victim.send_signal(number)
                time.sleep(pause)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_a_run_that_did_not_wait_for_a_slow_site_is_repeated_in_a_simulation_to_the_last_bit(federation, tmp_path, started):
    """The server's process is killed in between: what was under way then is lost, and the record says so."""
    out = tmp_path / "deployed"
    run = started(federation, out, *RUNS["buffered"])
    until(lambda: list(out.glob("*/checkpoint")) or run.poll() is not None, 120, "a checkpoint")
    with slowed(federation, SITES[0]):
        time.sleep(5)
        kill_once(federation, out, "server", "runner_process", run)
    said = run.communicate(timeout=240)
    assert run.returncode == 0, said
    lines = [json.loads(line) for line in (out / "fedbio-local" / "arrivals.jsonl").read_text().splitlines()]
    late = [m for line in lines for m, _ in line["late"]]
    assert set(late) == {0, 1, 2}
    again = [*RUNS["buffered"], "--knob", f"clients={len(SITES)}", "--arrivals", out / "fedbio-local" / "arrivals.jsonl"]
    command("run", *again, "--out", tmp_path / "repeated")
    assert rows(out) == rows(tmp_path / "repeated")


def kill_once(federation, run, name, kind, process):
    """Kill processes of a participant after the first checkpoint, while the command still runs."""
    until(lambda: list(run.glob("*/checkpoint")) or process.poll() is not None, 90, "a checkpoint")
    victims = federation.processes(name, kind)
    assert victims and process.poll() is None
    for victim in victims:
        victim.kill()


@pytest.fixture
def started():
    """Starts runs in the background; those that a failed test leaves are killed."""
    processes = []

    def start(federation, out, *arguments):
        words = [*COMMAND, "run", *map(str, arguments), "--federation", federation.folder, "--out", out]
        processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("with_the_command", [True, False])
def test_a_killed_job_process_and_a_killed_server_cost_nothing_but_time(
    federation, simulated, started, tmp_path, with_the_command
):
    """What the sites keep survives both: the numbers are those of a run that was never interrupted.

    Where the command dies with the server, `resume` goes on; where it lives it does so itself.
    """
    out = tmp_path / "deployed"
    process = started(federation, out, *LOCAL)
    kill_once(federation, out, SITES[1], "worker_process", process)
    job = next(out.glob("*/config.json")).with_name("job.json")
    until(lambda: not job.exists(), 60, "the next job")
    until(lambda: job.exists() and "begun" in job.read_text(), 90, "the next job's beginning")
    kill_once(federation, out, "server", "", process)
    if with_the_command:
        process.kill()
        assert process.communicate()[0].count("continuing from the last checkpoint") == 1
        assert not list(out.glob("*/result.json"))
        federation.await_sites()
        command("resume", out)
    else:
        stdout, stderr = process.communicate(timeout=180)
        assert process.returncode == 0, stdout + stderr
        assert stdout.count("continuing from the last checkpoint") == 2
        assert "the connection to the server is lost" in stdout and "the server was restarted" in stdout
    assert_equal(rows(out), rows(simulated("fedbio-local")))  # no gap, no double row, and the sites' own y as ever
    identity = json.loads((out / "fedbio-local" / "config.json").read_text())["identity"]
    assert 1 <= len(list((federation.folder / SITES[1] / "kept" / identity).iterdir())) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed and back at once", "frozen"])
def test_a_site_that_is_back_at_once_costs_nothing_but_time(federation, simulated, started, tmp_path, fault):
    out = tmp_path / "deployed"
    process = started(federation, out, *LOCAL)
    until(lambda: list(out.glob("*/checkpoint")) or process.poll() is not None, 90, "a checkpoint")
    began, victims = time.monotonic(), federation.processes(SITES[1])
    if fault == "frozen":
        for victim in victims:
            victim.suspend()
        time.sleep(12)
        for victim in victims:
            victim.resume()
    else:
        for victim in victims:
            victim.kill()
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0 and time.monotonic() - began < 120, stdout + stderr
    assert "lost" not in stdout and "without" not in stdout
    assert ("continuing from the last checkpoint" in stdout) == (fault != "frozen")
    assert_equal(rows(out), rows(simulated("fedbio-local")))
    (file,) = out.glob("*/metrics.jsonl")
    assert all(json.loads(line)["absences"] == 0 for line in file.read_text().splitlines())


@pytest.mark.slow
def test_a_run_outlives_a_slow_site_and_one_that_dies_comes_back_and_dies_again(federation, started, tmp_path):
    out, before, rounds = tmp_path / "deployed", len(federation.log()), 800
    federation.configure(SITES[1], task="quadratic", loader="function", function="hostile:slow_rows")
    try:
        process = started(federation, out, *LOCAL[:-1], rounds, "--round-timeout", 3)
        late, back = f"{SITES[1]} did not answer within 3 s", "client 1 takes part again"
        until(lambda: back in (log := federation.log()[before:]) and late in log, 90, "the slow site to be back")
        federation.last.kill()
        until(lambda: "client 2 is left out" in federation.log()[before:], 30, "the killed site to be missed")
        federation.last.start()
        job = next(out.glob("*/config.json")).with_name("job.json")
        until(lambda: not job.exists() or process.poll() is not None, 60, "the job's end, for the site that is back")
        done, again = len(rows(out)), federation.log().count("client 2 is left out")
        until(lambda: job.exists() and len(rows(out)) > done + 1, 90, "the next job's rows")
        federation.last.kill()
        stdout, stderr = process.communicate(timeout=120)
    finally:
        federation.serve()
        federation.last.start()
    assert process.returncode == 0, stdout + stderr
    assert f"{SITES[-1]} came back" in stdout and federation.log().count("client 2 is left out") > again
    (file,) = out.glob("*/metrics.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["rounds"] for row in found] == list(range(0, rounds + 1, 50))  # no gap, no double row
    absences = [row["absences"] for row in found]
    alone = [k for k, missed in enumerate(absences) if missed >= 51]  # without the killed site: fifty rounds, and the losses
    assert alone[-1] == len(found) - 1 and alone != list(range(alone[0], len(found))), absences  # it was there in between
    assert all(np.isfinite(row["upper_loss"]) for row in found)
    federation.await_sites()


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True])
def test_no_secure_sum_is_asked_for_twice_of_other_sites_when_a_site_dies_and_the_server_too(
    federation, started, tmp_path, later
):
    out, rounds, before = tmp_path / "deployed", 400, {name: len(federation.log(name)) for name in ("server", *SITES)}
    patience = ["--round-timeout", 5] if later else []
    process = started(federation, out, *LOCAL, "--aggregate", "secure-sum(at_least=2)", *patience)
    until(lambda: list(out.glob("*/checkpoint")) or process.poll() is not None, 90, "a checkpoint")
    federation.last.kill()
    if later:
        until(lambda: "client 2 is left out" in federation.log()[before["server"] :], 60, "the killed site to be missed")
    federation.last.start()
    job = next(out.glob("*/config.json")).with_name("job.json")
    until(lambda: not job.exists() or process.poll() is not None, 90, "the job's end, for the site that is back")
    until(lambda: job.exists() and "begun" in job.read_text(), 90, "the next job's beginning")
    kill_once(federation, out, "server", "runner_process", process)
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stdout + stderr
    assert stdout.count("continuing from the last checkpoint") == 2
    (file,) = out.glob("*/metrics.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["rounds"] for row in found] == list(range(0, rounds + 1, 50))
    assert all(np.isfinite(row["upper_loss"]) for row in found)
    assert not later or any(row["absences"] for row in found)
    for name in ("server", *SITES):
        assert "in a sum over other sites" not in federation.log(name)[before[name] :]
    identity = json.loads((out / "fedbio-local" / "config.json").read_text())["identity"]
    answered = [(federation.folder / site / "sums" / identity).stat().st_size // 32 for site in SITES]
    assert answered[0] == answered[1] >= answered[2] > 0


@pytest.mark.slow
def test_a_job_that_a_killed_command_left_is_stopped_by_resume(federation, simulated, started, tmp_path):
    out = tmp_path / "deployed"
    process = started(federation, out, *RUNS["long"])
    until(lambda: list(out.glob("*/checkpoint")), 90, "a checkpoint")
    process.kill()
    process.wait()
    assert not list(out.glob("*/result.json"))
    assert "stopping a job of this run that an earlier command left behind" in command("resume", out).stdout
    assert_equal(rows(out), rows(simulated("long")))


def test_ctrl_c_leaves_a_run_that_resume_brings_to_the_simulated_end(federation, simulated, started, tmp_path):
    out = tmp_path / "deployed"
    process = started(federation, out, *RUNS["sampled"])
    until(lambda: list(out.glob("*/metrics.jsonl")) and rows(out), 90, "the first row")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 130 and stderr == f"fedbilevel: stopped; continue with: fedbilevel resume {out}\n"
    assert not list(out.glob("*/result.json")) and list(out.glob("*/checkpoint"))
    command("resume", out)
    assert_equal(rows(out), rows(simulated("sampled")))


@pytest.mark.intrusion
@pytest.mark.slow
def test_a_revoked_site_is_shut_out_until_it_is_readmitted(federation):
    port, kit = port_of(federation), federation.folder / SITES[-1]
    with tls(port, kit) as open_line:
        command("federation", "revoke", federation.folder, SITES[-1])
        assert hung_up(open_line)
    with tls(port, kit) as new_line:
        assert hung_up(new_line)
    assert f"the certificate of {SITES[-1]} is revoked" in federation.log()
    until(lambda: f"{SITES[-1]}: not connected" in status(federation.folder), 60, "the site to be gone")
    time.sleep(10)  # it keeps trying
    assert f"{SITES[-1]}: not connected" in status(federation.folder)
    command("federation", "revoke", federation.folder, SITES[-1], "--readmit")
    federation.await_sites()


# --- nobody else gets in ---


class InProgress:
    """A long run, beside which others try to get in."""

    def __init__(self, federation, out):
        words = [*COMMAND, "run", *RUNS["mefbo"], "--federation", federation.folder, "--out", out]
        self.out = out
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)

    def rows(self):
        return rows(self.out) if list(self.out.glob("*/metrics.jsonl")) else []


@pytest.fixture(scope="module")
def in_progress(federation, tmp_path_factory):
    run = InProgress(federation, tmp_path_factory.mktemp("in_progress") / "run")
    until(run.rows, 90, "the first row of a run")
    yield run
    run.process.kill()
    run.process.communicate()


@pytest.fixture
def beside_a_run(in_progress):
    """The run goes on after what a test does."""
    assert in_progress.process.poll() is None
    yield
    before = len(in_progress.rows())
    until(lambda: len(in_progress.rows()) > before, 30, "the run to go on")
    assert in_progress.process.poll() is None


def knock(port, certificate=None):
    """What a stranger learns who connects with the certificate of a kit, or with none."""
    with tls(port, certificate) as line:
        line.sendall(b"hello")
        return line.recv(100)


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
def test_without_a_certificate_the_door_is_shut(federation):
    with pytest.raises((ssl.SSLError, ConnectionError)):
        knock(port_of(federation))
    lines = ("refused a connection from 127.0.0.1", "peer did not return a certificate")
    until(lambda: all(line in federation.log() for line in lines), 10, "the refusal in the log")


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
def test_a_foreign_authoritys_certificate_does_not_open_it(federation, tmp_path):
    command("federation", "init", tmp_path / "foreign", "--sites", SITES[0], "--port", port_of(federation))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        knock(port_of(federation), tmp_path / "foreign" / SITES[0])
    until(lambda: "certificate verify failed" in federation.log(), 10, "the refusal in the log")


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
def test_a_stranger_who_connects_and_says_nothing_keeps_nobody_out(federation):
    with socket.create_connection(("127.0.0.1", port_of(federation))):
        began = time.monotonic()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            knock(port_of(federation))
        assert time.monotonic() - began < 5


def job(federation, path):
    """A job as the command submits it, for a run that does not matter."""
    folder = RunFolder(path / "run")
    folder.path.mkdir()
    (folder.path / "config.json").write_text('{"configuration": {}, "identity": "ab"}')
    write_job(path / "job", folder, SITES)
    return path / "job"


def submitted(kit, user, path):
    done = subprocess.run(
        [sys.executable, HERE / "intruder.py", kit, user, path], capture_output=True, text=True, timeout=120, env=ENVIRONMENT
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
def test_a_sites_kit_cannot_submit_a_job(federation, tmp_path):
    shutil.copytree(federation.folder / "admin", tmp_path / "kit")
    for name in ("client.crt", "client.key"):
        shutil.copy(federation.folder / SITES[0] / "startup" / name, tmp_path / "kit" / "startup" / name)
    path = job(federation, tmp_path)
    line = f"the certificate of {SITES[0]} does not speak for _admin_"
    assert "no session" in submitted(tmp_path / "kit", ADMIN, path)  # the certificate is not the administrator's
    refused = federation.log().count(line)
    config = tmp_path / "kit" / "startup" / "fed_admin.json"
    config.write_text(config.read_text().replace(ADMIN, SITES[0]))
    assert "no session" in submitted(tmp_path / "kit", SITES[0], path)  # it is the site's, but a site is no administrator
    assert federation.log().count(line) > refused > 0


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
@pytest.mark.parametrize("command", ["cells", "process_info server", "speed server 1000 1000", f"stop_cell {SITES[0]}"])
def test_nobody_can_command_the_engines_network(federation, command):
    said = submitted(federation.folder / "admin", ADMIN, command)
    assert f"Command {command.split()[0]} not found" in said


def frame(length):
    """The first bytes of a message that announces its length."""
    return struct.pack(">IHBBHHHH", length, 0, 1, 0, 0, 0, 0, 0)


def hung_up(line):
    """Whether the other end closes a connection without waiting for more."""
    line.settimeout(10)
    try:
        while line.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
def test_a_site_that_connects_from_two_places_is_reported(federation):
    line = f"{SITES[0]} connects from 127.0.0.2 and from 127.0.0.1: does a second process use its kit?"
    with tls(port_of(federation), federation.folder / SITES[0], "127.0.0.2"):
        until(lambda: line in federation.log(), 10, "the line in the log")


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
def test_an_announced_length_makes_no_process_take_memory(federation):
    """Neither with a site's certificate at the server's port, nor without any at the ports that are open on this machine."""
    everybody = [p for name in ("server", *SITES) for p in federation.processes(name)]
    before = {p.pid: p.memory_info().vms for p in everybody}
    ports = {c.laddr.port for p in everybody for c in p.net_connections("inet") if c.status == "LISTEN"}
    with contextlib.ExitStack() as opened:
        lines = [socket.create_connection(("127.0.0.1", port), timeout=10) for port in ports - {port_of(federation)}]
        lines += [tls(port_of(federation), federation.folder / SITES[0]) for _ in range(4)]
        for line in lines:
            opened.enter_context(line)
            line.sendall(frame(2**31 - 2**22))
        assert len(lines) > 4 and all(map(hung_up, lines))
    assert max(p.memory_info().vms - before[p.pid] for p in everybody) < 1 << 30


def peak(process):
    """The most memory that a process has had, in bytes."""
    (line,) = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
def test_a_long_greeting_makes_no_process_take_memory(federation):
    """A million empty lists in one megabyte would be sixty."""
    everybody = [p for name in ("server", *SITES) for p in federation.processes(name)]
    before = {p.pid: peak(p) for p in everybody}
    lists = (12 << 20) * b"\x90"
    greeting = b"\xdd" + struct.pack(">I", len(lists)) + lists
    ports = {c.laddr.port for p in everybody for c in p.net_connections("inet") if c.status == "LISTEN"}
    with contextlib.ExitStack() as opened:
        lines = [socket.create_connection(("127.0.0.1", port), timeout=10) for port in ports - {port_of(federation)}]
        lines.append(tls(port_of(federation), federation.folder / SITES[0]))
        for line in lines:
            opened.enter_context(line)
            line.sendall(struct.pack(">IHBBHHHH", 16 + len(greeting), 0, 4, 0, 0, 0, 0, 0) + greeting)
        until(lambda: "a greeting of" in federation.log(), 30, "the refusal in the log")
        time.sleep(3)
    assert max(peak(p) - before[p.pid] for p in everybody) < 300 << 20


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
def test_a_job_that_ships_code_is_refused(federation, tmp_path):
    path = job(federation, tmp_path)
    (path / "app" / "custom").mkdir()
    (path / "app" / "custom" / "evil.py").write_text("raise SystemExit\n")
    assert "FAILED_TO_RUN" in submitted(federation.folder / "admin", ADMIN, path)
    assert "BYOC not permitted" in federation.log()


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
@pytest.mark.parametrize("name", ["subprocess.Popen", "nvflare.app_common.logging.job_log_streamer.JobLogStreamer"])
def test_a_job_with_a_class_outside_the_list_is_refused(federation, tmp_path, name):
    path = job(federation, tmp_path)
    file = path / "app" / "config" / "config_fed_client.json"
    file.write_text(file.read_text().replace("fedbilevel.federation.site.Site", name))
    assert "ABNORMAL" in submitted(federation.folder / "admin", ADMIN, path)
    assert any(f"'{name}'" in (log := federation.log(site)) and "is not in allow_list" in log for site in SITES)


@pytest.mark.slow
@pytest.mark.intrusion
@pytest.mark.usefixtures("beside_a_run")
def test_nothing_is_left_outside_the_federations_and_the_runs_folder(federation, in_progress):
    jobs = [p for name in ("server", *SITES) for p in federation.processes(name, "_process")]
    assert len(jobs) >= 4  # the run's, one of each
    for name in ("server", *SITES):
        for process in federation.processes(name):
            for connection in process.net_connections("inet"):
                for address in (connection.laddr, connection.raddr):
                    assert not address or address.ip in ("127.0.0.1", "::1")
            for file in process.open_files():
                inside = (federation.folder, in_progress.out, Path(sys.prefix), Path(sys.base_prefix), HERE.parent)
                assert file.mode == "r" or any(Path(file.path).is_relative_to(folder) for folder in inside), file
    assert not [*federation.home.rglob("*"), *federation.temporary.rglob("*")]
    for name in ("server", *SITES):
        for file in (federation.folder / name).rglob("*"):
            assert "local" in file.parts or file.stat().st_mode & 0o077 == 0, file
    assert not {name for name in set(os.listdir("/tmp")) - federation.in_tmp_before if "flare" in name.lower()}


@pytest.mark.intrusion
@pytest.mark.slow
def test_the_run_beside_all_that_is_unharmed_and_stops_at_ctrl_c(in_progress, simulated):
    in_progress.process.send_signal(signal.SIGINT)
    stdout, stderr = in_progress.process.communicate(timeout=60)
    assert in_progress.process.returncode == 130 and "continue with: fedbilevel resume" in stderr
    assert "ended early" not in stdout
    found, expected = in_progress.rows(), rows(simulated("mefbo"))
    assert 4 <= len(found) < len(expected)
    assert_equal(found, expected[: len(found)])
    (file,) = in_progress.out.glob("*/metrics.jsonl")
    assert all(json.loads(line)["absences"] == 0 for line in file.read_text().splitlines())


@pytest.fixture(scope="module")
def hostile(federation, simulated, tmp_path_factory):
    """A run by a server that first asks the sites for all they must refuse: what they said, and the run's folder."""
    tmp_path = tmp_path_factory.mktemp("hostile")
    (tmp_path / "run" / "fedbioacc").mkdir(parents=True)
    shutil.copy(simulated("fedbioacc") / "fedbioacc" / "config.json", tmp_path / "run" / "fedbioacc")
    write_job(tmp_path / "job", RunFolder(tmp_path / "run" / "fedbioacc"), SITES)
    config = tmp_path / "job" / "app" / "config" / "config_fed_server.json"
    config.write_text(config.read_text().replace("fedbilevel.federation.server.ExperimentServer", "hostile.HostileServer"))
    script = [sys.executable, HERE / "intruder.py", federation.folder / "admin", ADMIN, tmp_path / "job"]
    with subprocess.Popen(script, stdout=subprocess.DEVNULL, env=ENVIRONMENT) as submission:
        until(lambda: list(tmp_path.glob("run/*/result.json")), 90, "the run's end")
        log = federation.log(SITES[2])
        submission.terminate()
    return json.loads((tmp_path / "run" / "fedbioacc" / "said.json").read_text()), tmp_path / "run", log


@pytest.mark.intrusion
@pytest.mark.parametrize(
    ("request_", "line"),
    [
        ("method", "'step' is not a client function of FedBiOAcc: refused"),
        ("private", "'__init__' is not a client function of FedBiOAcc: refused"),
        (
            "shape",
            "first_momentum was called with float32[5], float32[7], float32[8], "
            "but in this algorithm it takes float32[5], float32[8]",
        ),
        ("dtype", "first_momentum was called with float32[5], float16[8], float32[8]"),
        ("nan", "an argument holds a value that is not finite"),
        ("saving", "a Save has entries of another type than it should: refused"),
        ("many", "no call of this algorithm takes a value of 200,000 arrays: refused"),
        ("indices", "a Part has entries of another type than it should: refused"),
        ("garbage", "a message "),
    ],
)
def test_a_site_refuses_what_its_algorithm_does_not_ask_for(hostile, request_, line):
    said, _, log = hostile
    assert len(said[request_]) == len(SITES) and all(line in answer for answer in said[request_].values())
    assert f"refused: {line}" in log  # in the site's own log


@pytest.mark.intrusion
@pytest.mark.parametrize("method", ["prepare", "_begin"])
def test_a_site_answers_to_published_methods_alone(hostile, method):
    said, _, log = hostile
    line = f"no method named '{method}' or it is not collab"
    assert len(said[method]) == len(SITES) and all(line in answer for answer in said[method].values()), said[method]
    assert line in log


@pytest.mark.intrusion
def test_the_run_is_unharmed_by_refused_requests(hostile, simulated):
    _, run, _ = hostile
    assert_equal(rows(run), rows(simulated("fedbioacc")))
    assert len(rows(run)) >= 4


@pytest.fixture(scope="module")
def lied(federation, tmp_path_factory):
    """A run in which one site answers four times with what its algorithm does not give."""
    out = tmp_path_factory.mktemp("lied") / "run"
    federation.configure(SITES[1], task="quadratic", loader="function", function="hostile:lying_rows")
    try:
        command("run", "quadratic", "fedavg", *SMALL, "--rounds", 30, "--federation", federation.folder, "--out", out)
    finally:
        federation.serve()
    (file,) = out.glob("*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()], federation.log()


@pytest.mark.intrusion
@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["float32[3]", "float16[8]", "an answer holds a value that is not finite", "float32 2026-01-01 - all is well[2J"]
)
def test_the_server_refuses_a_sites_false_answer(lied, line):
    found, log = lied
    assert any("client 1 is left out of this round" in entry and line in entry for entry in log.splitlines())
    assert [row["rounds"] for row in found] == [0, 10, 20, 30]
    assert sum(row["absences"] for row in found) == 4 and "client 1 takes part again" in log
    assert "\x1b" not in log and max(map(len, log.splitlines())) < 5000
    assert not any(entry.startswith("2026-01-01") for entry in log.splitlines())
    assert "x_error" not in found[-1]  # the truth about simulated data says nothing about a site's own


@pytest.mark.slow
def test_a_site_refuses_another_task_and_the_run_says_so_in_one_line(federation, tmp_path):
    done = command(
        "run", "valley", "mefbo", "--rounds", 20, "--federation", federation.folder, "--out", tmp_path / "run", check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "this site is set up for the task quadratic, not for valley: refused" in done.stderr


@pytest.mark.slow
def test_a_run_goes_on_without_a_site_that_refuses_it(federation, tmp_path):
    out = tmp_path / "run"
    federation.configure(SITES[2], task="valley", loader="share", client=2)
    try:
        arguments = ["quadratic", "fedavg", *SMALL, "--rounds", 30, "--federation", federation.folder, "--out", out]
        said = command("run", *arguments).stdout
    finally:
        federation.serve()
    line = f"{SITES[2]}: this site is set up for the task valley, not for quadratic: refused"
    assert said.count(line) == 1
    (file,) = out.glob("*/metrics.jsonl")
    assert [json.loads(row)["absences"] for row in file.read_text().splitlines()] == [1, 11, 11, 11]
    assert "x_error" not in rows(out)[-1]  # nobody has heard what data that site has


@pytest.mark.slow
def test_the_digits_are_cleaned_as_in_the_simulation(federation, simulated, tmp_path):
    """What `make federation-demo` shows."""
    federation.serve("data-cleaning")
    try:
        command("run", *RUNS["digits"], "--federation", federation.folder, "--out", tmp_path / "deployed")
    finally:
        federation.serve()
    found = rows(tmp_path / "deployed")
    assert_equal(found, rows(simulated("digits")))
    assert {"test_accuracy", "roc_auc"} <= set(found[0])
