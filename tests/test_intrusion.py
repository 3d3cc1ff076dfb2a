"""An admitted site and a server that go beyond what they may, and kits used otherwise than ours are: with real processes."""

import json
import re
import shutil
import subprocess
import sys
import uuid

import pytest
from nvflare.private.admin_defs import Message
from raw_cell import RawCell
from real_federations import ENVIRONMENT, HERE, Running, command, free_port, port_of, status, tls, until

from fedbilevel.federation.processes import PROGRAMS

pytestmark = [pytest.mark.federation, pytest.mark.intrusion]


class Intruder:
    """A site that was admitted and does not run our program: what it was given, and what it can send."""

    name = "intruder"

    def __init__(self, federation):
        self.federation, self.kit, self.lines = federation, federation.folder / self.name, []
        self.first = self.connection(self.name)
        self.stale, self.servers = self.first.register(self.name)
        self.fresh, _ = self.first.register(self.name)

    def connection(self, greeting):
        self.lines.append(tls(port_of(self.federation), self.kit))
        return RawCell(self.lines[-1], self.kit, greeting)

    def leave(self):
        for line in self.lines:
            line.close()


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intrusion") / "f"
    command("federation", "init", folder, "--sites", "target,intruder", "--port", free_port())
    return folder


@pytest.fixture(scope="module")
def federation(founded):
    running = Running(founded, "server", "target")
    try:
        running.serve()
        until(lambda: "target: connected" in status(founded), 90, "the site to connect")
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def intruder(federation):
    intruder = Intruder(federation)
    yield intruder
    intruder.leave()


ADMITTED = "it is from intruder to target, and sites answer only the server"
FORGED = "intruder says that it is from server"
RESEARCHER = "_admin_" + str(uuid.uuid4())


@pytest.mark.parametrize(
    ("topic", "token", "greeting", "origin", "line"),
    [
        *((topic, "fresh", "intruder", None, ADMITTED) for topic in ("sys.shell", "sys.info", "train.shutdown", "train.abort")),
        ("train.check_status", "stale", "intruder", None, ADMITTED),
        ("train.check_status", "fresh", "intruder", "server", FORGED),
        ("train.check_status", "stale", "intruder", "server", FORGED),
        ("train.check_status", "servers", "intruder", "server", FORGED),
        ("train.check_status", "servers", "intruder.x", "target", "intruder.x says that it is from target"),
        ("train.check_status", "stale", RESEARCHER, None, f"the certificate of intruder does not speak for {RESEARCHER}"),
    ],
)
def test_no_request_of_another_site_reaches_a_site(federation, intruder, topic, token, greeting, origin, line):
    """With whatever token it was ever given, and wherever it says that it comes from."""
    own = intruder.first if greeting == intruder.name else intruder.connection(greeting)
    body = f"cat {federation.folder / 'target' / 'startup' / 'client.key'}" if topic == "sys.shell" else ""
    request, mark, before = Message(topic, body), str(uuid.uuid4()), federation.log().count(line)
    request.set_header("_userName", mark)
    answer = own.ask("target", "admin", "admin", getattr(intruder, token), request, origin, seconds=2)
    assert answer is None
    until(lambda: federation.log().count(line) > before, 10, "the refusal in the log")
    assert mark not in (federation.folder / "target" / "audit.log").read_text()
    assert federation.log().count("target ended") == 0 and federation.processes("target")


@pytest.mark.parametrize(
    ("channel", "topic"),
    [("server_parent_listener", "get_clients"), ("server_parent_listener", "update_run_status"), ("cellnet.channel", "bulk")],
)
def test_a_site_asks_the_server_only_for_what_runs_need(federation, intruder, channel, topic):
    assert intruder.first.ask("server", channel, topic, {**intruder.fresh, "job_id": "x"}, {"x": 1}, seconds=2) is None
    line = f"intruder asks for {topic} of {channel}, which runs do not need"
    until(lambda: line in federation.log(), 10, "the refusal in the log")


def test_a_server_does_not_take_a_site_for_another_that_it_names(federation, intruder):
    """The server's own token, which is in each of its answers, is nobody else's."""
    assert intruder.first.ask("server", "task", "heart_beat", intruder.servers, {"x": 1}, seconds=2) is None
    until(lambda: "intruder calls itself server" in federation.log(), 10, "the refusal in the log")


@pytest.mark.parametrize("kind", ["client", "server"])
def test_a_kit_does_not_run_under_flares_own_programs(founded, kind):
    kit = founded / {"client": "intruder", "server": "server"}[kind]
    options = ["secure_train=true", "org=fedbilevel", "config_folder=config", *(["uid=intruder"] if kind == "client" else [])]
    words = [sys.executable, "-m", PROGRAMS[kind], "-m", kit, "-s", f"fed_{kind}.json", "--set", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=kit, env=ENVIRONMENT)
    assert "this kit runs only under its guards: start it with 'fedbilevel federation start'" in done.stdout + done.stderr
    assert "Connector" not in done.stdout + done.stderr  # it neither connects nor listens


@pytest.mark.slow
def test_a_second_process_with_a_sites_kit_on_the_same_machine_is_reported(federation, tmp_path):
    shutil.copytree(federation.folder / "target", tmp_path / "copy" / "target", ignore=shutil.ignore_patterns("*.txt", "*.log"))
    line = r"target connects from 127\.0\.0\.1:\d+ and from 127\.0\.0\.1:\d+: does a second process use its kit\?"
    assert not re.search(line, federation.log())
    second = Running(tmp_path / "copy", "target")
    try:
        until(lambda: re.search(line, federation.log()), 60, "the line in the log")
    finally:
        second.stop()


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What a site says to its server's owner, by what it was asked."""
    folder = tmp_path_factory.mktemp("hostile") / "f"
    command("federation", "init", folder, "--sites", "target,intruder", "--port", free_port())
    out = folder / "said.json"
    words = [sys.executable, HERE / "hostile_engine.py", folder / "server", "target", folder / "intruder", out]
    target = Running(folder, "target")
    try:
        target.serve()
        with (
            (folder / "hostile.txt").open("wb") as log,
            subprocess.Popen(words, stdout=log, stderr=log, env=ENVIRONMENT) as server,
        ):
            try:
                until(lambda: out.exists() or server.poll() is not None, 120, "the attacks")
            finally:
                server.kill()
        return json.loads(out.read_text()), (folder / "start.txt").read_text()
    finally:
        target.stop()


REQUESTS = ["shell", "machine", "environment", "resources", "site log", "job log", "statistics", "component", "task"]


@pytest.mark.slow
@pytest.mark.parametrize("request_", [*REQUESTS, "restart", "shutdown"])
def test_a_site_does_for_its_server_only_what_runs_need(said, request_):
    answers, started = said
    assert answers[request_] == "invalid_request" and "target ended" not in started


@pytest.mark.slow
def test_a_site_takes_no_job_that_another_site_has_signed(said):
    assert said[0]["job"] == "app app does not pass signature verification"


@pytest.mark.slow
def test_nobody_can_have_a_site_connect_elsewhere(said):
    assert said[0]["dial"] == "no"
