"""What the guards of FLARE's processes refuse, and what these processes leave on disks and in logs, without the processes."""

import datetime
import json
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedbilevel.errors import InputError
from fedbilevel.federation import (
    compile_cache,
    guards,
    job_launchers,
    listener,
    processes,
    same_kit,
    sparse_log,
    supervise,
)
from fedbilevel.federation.job_launchers import MOST_FOLDERS, SiteJobs, is_job_id, tidy
from fedbilevel.federation.listener import Revoked
from fedbilevel.federation.log_lines import MOST_CHARACTERS, PlainFormatter
from fedbilevel.federation.provision import ENGINE
from fedbilevel.federation.returning_sites import ReturningSites

JOB = "ba5ce263-3c9c-47d7-af15-e1f9afbfb2fa"
GUARDED = """
import json, struct, sys, socket
from types import SimpleNamespace
from fedbilevel.federation.guarded_engine import guard
guard()
from nvflare.fuel.f3.cellnet.net_agent import NetAgent
from nvflare.fuel.f3.cellnet.net_manager import NetManager
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.fuel.f3.streaming.blob_streamer import BlobTask
from nvflare.fuel.hci.server.login import validate_admin_leaf_cert
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.server.admin import NetManager as served

said = {}
try:
    ClientEngine.delete_run(SimpleNamespace(args=SimpleNamespace(workspace=sys.argv[1])), "startup")
except ValueError as error:
    said["deleting"] = str(error)
registered = []
agent = NetAgent(SimpleNamespace(register_request_cb=lambda **named: registered.append(named)))
said["registered"], said["commands"] = len(registered), len(NetManager(agent).get_spec().cmd_specs)
here, there = socket.socketpair()
there.sendall(struct.pack(">IHBBHHHH", 2**31 - 2**22, 0, 1, 0, 0, 0, 0, 0))
try:
    SocketConnection.read_frame(SimpleNamespace(sock=here, name="", read_into=lambda b, o, n: here.recv_into(b, n)))
except Exception as error:
    said["frame"] = str(error)
for name, size in (("small", 1000), ("large", 20 << 20)):
    blob = BlobTask(None, SimpleNamespace(get_size=lambda: size), 1 << 32)
    said[name] = len(blob.buffer)
said["does"] = [topic for processor in ClientRequestProcessors.request_processors for topic in processor.get_topics()]
said["job_does"] = [command.get_command_name() for command in AdminCommands.commands]
said["login"], said["served"] = validate_admin_leaf_cert.__name__, served is NetManager
print(json.dumps(said))
"""


def test_a_guarded_process_deletes_no_kit_takes_no_network_messages_and_makes_no_room_for_huge_frames(tmp_path):
    (tmp_path / "startup").mkdir()
    for name in ("startup", "local"):
        (tmp_path / name).mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", GUARDED, tmp_path], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert (tmp_path / "startup").is_dir() and said["deleting"] == "not the identity of a job: refused"
    assert said["registered"] == said["commands"] == 0 and said["served"]
    assert "exceeds limit" in said["frame"] and str(guards.MOST_FRAME) in said["frame"]
    assert said["small"] == 1000 and said["large"] == 0  # until its pieces come
    assert said["login"] == "require_role"
    assert set(said["does"]) == guards.FOR_THE_SERVER and said["job_does"] == ["abort"]
    assert not [topic for topic in said["does"] if re.search("shell|info|env|log|restart|shutdown", topic)]


UNKNOWN = """
import sys
{missing}
sys.argv = ["guarded_engine", "this"]
from fedbilevel.federation.guarded_engine import main
main()
"""


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("from nvflare.fuel.f3.drivers import socket_conn\ndel socket_conn.MAX_FRAME_SIZE", "MAX_FRAME_SIZE"),
        (
            "from nvflare.fuel.f3.cellnet.core_cell import CoreCell\ndel CoreCell.process_message",
            "CoreCell has no process_message",
        ),
        ("from nvflare.fuel.f3.streaming import blob_streamer\ndel blob_streamer.BlobTask", "BlobTask"),
        ("sys.modules['nvflare.fuel.hci.server.login'] = None", "nvflare.fuel.hci.server"),
        (
            "from nvflare.private.fed.client import training_cmds as c\nc.AbortAppProcessor.get_topics = lambda self: []",
            "nothing there answers to train.abort",
        ),
    ],
)
def test_a_version_of_flare_that_cannot_be_guarded_does_not_start(missing, named):
    words = [sys.executable, "-c", UNKNOWN.format(missing=missing)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert re.match(
        r"fedbilevel: nvflare \S+ cannot be guarded \(.+\): install the version that is known to work, 2\.9", done.stderr
    )
    assert named in done.stderr


@pytest.mark.parametrize(
    ("job", "is_one"),
    [(JOB, True), ("startup", False), ("local", False), ("", False), (None, False), (JOB.upper(), False), (f"../{JOB}", False)],
)
def test_only_what_flares_server_gives_is_a_jobs_identity(job, is_one):
    assert is_job_id(job) == is_one
    if not is_one:
        with pytest.raises(ValueError, match="not the identity of a job"):
            guards.require_job_id(job)


def certificate(**named):
    """A certificate, with or without a role, signed by itself."""
    key, day = ec.generate_private_key(ec.SECP256R1()), datetime.timedelta(1)
    now = datetime.datetime.now(datetime.UTC)
    attributes = {"name": x509.NameOID.COMMON_NAME, "role": guards.ROLE}
    name = x509.Name([x509.NameAttribute(attributes[what], value) for what, value in named.items()])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    return builder.serial_number(1).not_valid_before(now).not_valid_after(now + day).sign(key, hashes.SHA256())


def test_only_a_certificate_with_a_role_is_an_administrators():
    guards.require_role(certificate(name="admin@fedbilevel.org", role="project_admin"))
    with pytest.raises(ValueError, match="has no role"):
        guards.require_role(certificate(name="hospital-1"))


def test_the_list_of_revoked_sites_is_read_again_when_it_changes(tmp_path):
    file = tmp_path / "disabled_clients.json"
    revoked = Revoked(file)
    assert revoked.names() == frozenset()
    file.write_text('{"disabled_clients": ["a"]}')
    assert revoked.names() == {"a"} == revoked.names()
    file.write_text('{"disabled_clients": ["a", "b"]}')
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert revoked.names() == {"a", "b"}
    file.unlink()
    assert revoked.names() == frozenset()


def test_an_entry_of_a_log_is_printable_bounded_and_cannot_pass_for_another(caplog):
    entry = logging.LogRecord(
        "site", logging.WARNING, "", 0, "%s", ("a\n2026 - all is well\x1b[2J\r\u202e" + "x" * 10**6,), None
    )
    text = PlainFormatter("%(levelname)s %(message)s").format(entry)
    lines = text.split("\n")
    assert lines[0] == "WARNING a" and lines[1].startswith("    | 2026 - all is well[2J") and len(text) < MOST_CHARACTERS + 100
    assert all(line.isprintable() for line in lines)


def test_warnings_that_others_cause_do_not_fill_the_log_and_are_logged_again_after_an_hour(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sparse_log.time, "monotonic", lambda: now[0])
    log = sparse_log.SparseLog(logging.getLogger("strangers"))
    for _ in range(10**5):
        log.warning("refused")
    assert len(caplog.records) == sparse_log.MOST_LINES + 1 + 10**5 // sparse_log.THEN
    now[0] += 3601
    caplog.clear()
    log.warning("refused")
    assert len(caplog.records) == 1


def test_a_jobs_process_is_guarded_and_older_jobs_folders_are_deleted(tmp_path, monkeypatch):
    command = f"python -m nvflare.private.fed.app.client.worker_process -m {tmp_path}"
    with pytest.raises(RuntimeError, match="only under its guards"):
        SiteJobs()
    monkeypatch.setattr(job_launchers, "require_guarded", lambda: None)
    monkeypatch.setattr(job_launchers.ClientProcessJobLauncher, "get_command", lambda self, meta, context: command)
    workspace = SimpleNamespace(get_root_dir=lambda: str(tmp_path))
    for name in ("startup", "local", "kept"):
        (tmp_path / name).mkdir()
    names = [f"{JOB[:-2]}{k:02d}" for k in range(MOST_FOLDERS + 3)]
    for k, name in enumerate(names):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (k, k))
    engine = SimpleNamespace(get_all_job_ids=lambda: [names[1]])
    context = SimpleNamespace(get_prop=lambda name: workspace, get_engine=lambda: engine)
    made = SiteJobs().get_command({}, context)
    assert made == command.replace("-m nvflare", f"-m {ENGINE} nvflare", 1)
    assert {p.name for p in tmp_path.iterdir()} == {"startup", "local", "kept", names[1], *names[3:]}
    tidy(tmp_path, [])
    assert len(list(tmp_path.iterdir())) == 3 + MOST_FOLDERS
    command = "python -c 'import nvflare'"
    with pytest.raises(RuntimeError, match="unguarded"):
        SiteJobs().get_command({}, context)


def test_a_second_process_with_a_kit_is_refused_and_what_the_first_writes_is_private(tmp_path, monkeypatch):
    (tmp_path / "a" / "startup").mkdir(parents=True)
    kit = processes.KitProcess(tmp_path / "a")
    began = threading.Event()

    def start():
        (tmp_path / "a" / "console.txt").write_text("begun")
        began.set()

    monkeypatch.setattr(kit, "start", start)
    monkeypatch.setattr(processes.KitProcess, "alive", property(lambda self: True))
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    with processes.held(tmp_path / "a" / "startup", "?"), pytest.raises(InputError, match="is already running: stop its other"):
        processes.run([kit], pytest.fail)
    assert not began.is_set()
    with subprocess.Popen(["sleep", "60"]) as others:
        processes.run([kit], pytest.fail)
        assert others.poll() is None  # was there before
        others.kill()
    assert began.is_set() and (tmp_path / "a" / "console.txt").stat().st_mode & 0o077 == 0
    before = os.umask(0o022)
    os.umask(before)
    assert before != 0o077


def test_a_log_that_grows_while_its_process_runs_is_bounded(tmp_path, monkeypatch):
    """Its process holds it open and goes on writing; what it wrote last is kept."""
    (tmp_path / "a" / "startup").mkdir(parents=True)
    monkeypatch.setattr(processes, "MOST_LOG", 10**5)
    kit, console = processes.KitProcess(tmp_path / "a"), tmp_path / "a" / "console.txt"
    talking = "import itertools, time\nfor n in itertools.count(): print(n, 100 * 'x', flush=True); time.sleep(1e-4)"
    with console.open("ab") as out, subprocess.Popen([sys.executable, "-c", talking], stdout=out) as process:
        sizes, begun_anew = [], 0
        while begun_anew < 3:
            time.sleep(0.05)
            kit.bound_logs()
            sizes.append(console.stat().st_size)
            begun_anew += len(sizes) > 1 and sizes[-1] < sizes[-2]
        process.kill()
    assert max(sizes) <= 10**5 and len(list(console.parent.glob("*.txt"))) == 2
    old = console.with_name("console.old.txt").read_text()
    numbers = [int(line.split()[0]) for line in old.splitlines()[1:-1]]
    assert len(old) > 10**5 and numbers == list(range(numbers[0], numbers[-1] + 1))


def test_a_site_that_is_connected_anew_is_not_taken_for_two(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(same_kit.time, "monotonic", lambda: now[0])
    displacements = same_kit.Displacements()
    assert not displacements.repeated("a") and not displacements.repeated("a") and not displacements.repeated("b")
    now[0] += 61
    assert not displacements.repeated("a") and not displacements.repeated("a") and displacements.repeated("a")


def test_a_restarted_site_is_told_from_one_that_was_never_there():
    returning = ReturningSites(pytest.fail)
    parts = [{"client_name": name, "job_id": "1"} for name in "ab"]
    session = SimpleNamespace(
        engine=SimpleNamespace(get_client_job_status=lambda: parts), federation=SimpleNamespace(sites="abc")
    )
    assert returning.found(session, "1", begun=True) == [] and not returning.restarted("1", [])
    parts = [parts[0], *({"client_name": name, "status": "no jobs"} for name in "bc")]
    assert returning.found(session, "1", begun=False) == ["b"]  # c may still be on its way
    assert returning.found(session, "1", begun=True) == ["b", "c"]
    assert returning.restarted("1", ["b", "c"]) and not returning.restarted("1", ["c"]) and not returning.restarted("2", ["b"])
    parts = [{"client_name": name, "status": "no jobs"} for name in "abc"]
    assert returning.found(session, "1", begun=False) == ["a", "b"] and returning.found(session, "2", begun=False) == []


def test_afull_disk_is_named(tmp_path, monkeypatch):
    assert supervise.full_disk(tmp_path) == ""
    monkeypatch.setattr(supervise.shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    assert supervise.full_disk(tmp_path) == f"the disk with {tmp_path} is full"


def test_the_programs_that_a_kit_keeps_are_bounded_and_the_newest_stay(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 25)
    monkeypatch.setattr(compile_cache, "jax", SimpleNamespace(config=SimpleNamespace(update=lambda name, value: None)))
    compile_cache.keep_compiled(tmp_path)  # there is no folder yet
    (tmp_path / "compiled").mkdir()
    for k in range(5):
        (tmp_path / "compiled" / f"{k}").write_bytes(bytes(10))
        os.utime(tmp_path / "compiled" / f"{k}", (k, k))
    compile_cache.keep_compiled(tmp_path)
    assert {file.name for file in (tmp_path / "compiled").iterdir()} == {"3", "4"}


def test_strangers_cannot_hide_that_a_second_process_uses_a_kit(monkeypatch, caplog):
    class Connection(ssl.SSLSocket):
        def __init__(self, refused):
            self.refused = refused

        def getpeercert(self, binary_form=False):
            return None

    class Server(listener.GuardedServer):
        def __init__(self):
            pass

        def _refused(self, request):
            return request.refused

        def _hosts(self, name):
            return ["10.0.0.1"]

    monkeypatch.setattr(listener, "get_certificate_common_name", lambda certificate: "clinic")
    monkeypatch.setattr(listener.tcp_driver.TcpStreamServer, "finish_request", lambda *given: None)
    for _ in range(sparse_log.MOST_LINES + 50):
        Server().finish_request(Connection("no certificate"), ("10.0.0.2", 1))
    assert len(caplog.records) == sparse_log.MOST_LINES + 1
    Server().finish_request(Connection(""), ("10.0.0.2", 1))
    assert caplog.messages[-1] == "clinic connects from 10.0.0.2 and from 10.0.0.1: does a second process use its kit?"
