"""Founding a federation and a site's own data, without its processes."""

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedbilevel.command import main
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.errors import InputError, in_one_line
from fedbilevel.federation import following, leftovers
from fedbilevel.federation.begin_message import PROTOCOL, BeginMessage, Holdings
from fedbilevel.federation.job import STOP, job_name, read_status, write_status
from fedbilevel.federation.nvflare_support import require_flare
from fedbilevel.federation.provision import Federation
from fedbilevel.federation.returning_sites import ReturningSites
from fedbilevel.federation.session import Session, told
from fedbilevel.federation.site_data import SiteData
from fedbilevel.federation.supervise import Supervisor
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.files import locked
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.stopping import StopRequest
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.label_errors import LabelErrors
from fedbilevel.tasks.quadratic import Quadratic

COMMAND = [sys.executable, "-m", "fedbilevel"]


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("founded") / "f"
    arguments = ["federation", "init", folder, "--sites", "a,b", "--host", "fed.example.org", "--port", "9001"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "edit" in done.stdout and "site.toml" in done.stdout
    return folder


def test_kits_refuse_code_and_shell_and_keep_logs_and_keys_to_themselves(founded):
    for name in ("server", "a", "b"):
        local = founded / name / "local"
        ((role, rights),) = json.loads((local / "authorization.json").read_text())["permissions"].items()
        assert role == "project_admin" and rights["byoc"] == rights["shell_commands"] == "none"
        resources = json.loads((local / "resources.json").read_text())
        own = ["federation.server.ExperimentServer", "controller.CollabController"]
        own = own if name == "server" else ["federation.site.Site", "executor.CollabExecutor"]
        assert [path.endswith(name) for path, name in zip(resources["class_allow_list"], own, strict=True)] == [True, True]
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert "site_log_streamer" not in json.dumps(resources) and resources["allow_log_streaming"] is False
        assert not list((founded / name).rglob("*.sh"))
        readme = (founded / name / "readme.txt").read_text()
        assert f"fedbilevel federation start FOLDER --site {name}\n" in readme and "start.sh" not in readme
        for file in (founded / name).rglob("*"):
            assert file.stat().st_mode & 0o077 == 0, file
    client = json.loads((founded / "a" / "startup" / "fed_client.json").read_text())
    assert client["servers"][0]["service"]["target"] == "fed.example.org:9001" and client["require_signed_jobs"] is True
    assert client["client"]["connection_security"] == "mtls"
    certificates = {(founded / name / "startup" / "client.crt").read_bytes() for name in ("a", "b", "admin")}
    assert len(certificates) == 3
    assert SiteData.read(founded / "b" / "local" / "site.toml").client == 1


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedbilevel", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main.main()
        return exit.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "new", "--sites", "a,a"], "--sites needs one or more different names; given: a,a"),
        (["init", "new", "--sites", ","], "--sites needs one or more different names"),
        (["init", "new", "--sites", "server"], "'server' cannot be a site's name"),
        (["init", "new", "--sites", "a b"], "'a b' cannot be a site's name"),
        (["init", "new", "--sites", "../a"], "'../a' cannot be a site's name"),
        (["init", "new", "--sites", "a", "--host", "a/b"], "--host must be the name or address"),
        (["init", "new", "--sites", "a", "--port", "0"], "--port must be from 1 to 65535; given: 0"),
        (["init", "with space", "--sites", "a"], "has a space in its path"),
        (["init", "full", "--sites", "a"], "is not an empty folder"),
        (["status", "full"], "full holds no federation"),
        (["start", "full"], "full holds no federation"),
        (["start", "full", "--site", "a"], "is not a start-up kit"),
        (["revoke", "full", "a"], "full holds no federation"),
    ],
)
def test_what_cannot_be_founded_or_started_is_said_in_one_line(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, err = run("federation", *arguments)
    assert code == 2 and message in err and err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["full"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--federation", "nowhere"], "nowhere holds no federation"),
        (["--federation", "{founded}", "--knob", "clients=3"], "the federation has 2 sites, but quadratic was given clients=3"),
        (
            ["--federation", "{founded}", "--round-timeout", "0"],
            "--round-timeout must be above 0 and at most 86400 seconds, a day; given: 0.0",
        ),
        (["--federation", "{founded}", "--round-timeout", "1e9"], "at most 86400 seconds, a day; given: 1000000000.0"),
        (["--federation", "{founded}", "--round-timeout", "nan"], "at most 86400 seconds, a day; given: nan"),
        (["--federation", "{founded}", "--chunk-size", "2"], "chunk size is for simulated clients"),
    ],
)
def test_runs_that_no_federation_can_take_are_refused(run, founded, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, err = run("run", "quadratic", "simfbo", *(a.format(founded=founded) for a in arguments))
    assert code == 2 and message in err and err.count("\n") == 1 and not os.listdir(tmp_path)


def test_a_server_that_is_not_there_is_said_in_one_line(founded):
    script = (
        f"import sys; sys.argv = ['fedbilevel', 'federation', 'status', {str(founded)!r}]\n"
        "from fedbilevel.federation import session; session.CONNECT = 1.0\nfrom fedbilevel.command import main; main.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "the server at fed.example.org:9001 does not answer" in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stdout + done.stderr


def test_without_the_engine_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'fedbilevel\[deploy\]'"):
        require_flare()


def test_help_waits_for_neither_jax_nor_the_engine():
    script = (
        "import sys; sys.argv = ['fedbilevel', 'federation', 'start', '--help']\nfrom fedbilevel.command import main\n"
        "try: main.main()\nexcept SystemExit: pass\nassert not {'jax', 'nvflare', 'psutil'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


def site(tmp_path, **entries):
    knobs = entries.pop("knobs", {})
    lines = [f"{k} = {json.dumps(v)}" for k, v in entries.items()]
    lines += ["[knobs]", *(f"{k} = {json.dumps(v)}" for k, v in knobs.items())]
    (tmp_path / "site.toml").write_text("\n".join(lines) + "\n")
    return SiteData.read(tmp_path / "site.toml")


KNOBS = {"clients": 3, "noise": 0.2, "data_seed": 5}


def leaves(population):
    return [np.asarray(leaf) for leaf in jax.tree.leaves((population.upper.rows, population.lower.rows))]


def test_a_share_files_and_a_function_give_the_same_rows(tmp_path, monkeypatch):
    whole = Quadratic(**KNOBS).build().population
    _, share = site(tmp_path, task="quadratic", loader="share", client=2).load(Quadratic(**KNOBS))
    rows = {
        f"{what}_{field}": np.asarray(array)
        for what, shards in (("upper", share.upper), ("lower", share.lower))
        for field, array in shards.rows._asdict().items()
    }
    np.savez(tmp_path / "rows.npz", **rows)
    _, files = site(tmp_path, task="quadratic", loader="files", path="rows.npz").load(Quadratic(**KNOBS))
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom fedbilevel.tasks.quadratic import LowerRows, UpperRows\n"
        f"a = np.load({str(tmp_path / 'rows.npz')!r})\n"
        "def rows(): return UpperRows(a['upper_c'], a['upper_d']), LowerRows(a['lower_A'], a['lower_B'], a['lower_b'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _, function = site(tmp_path, task="quadratic", loader="function", function="mine:rows").load(Quadratic(**KNOBS))
    expected = [leaf[64:] for leaf in leaves(whole)]  # the third client's 32 rows
    for population in (share, files, function):
        assert population.size == 1 and population.batch_size == whole.batch_size
        for mine, theirs in zip(leaves(population), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_images_can_come_from_files(tmp_path):
    part = DataCleaning(clients=4).build().population.only(1)
    named = {"upper": part.upper.rows, "lower": part.lower.rows}
    arrays = {f"{what}_{k}": np.asarray(v) for what, rows in named.items() for k, v in rows._asdict().items()}
    np.savez(tmp_path / "rows.npz", **arrays)
    own = site(tmp_path, task="data-cleaning", loader="files", path="rows.npz")
    _, files = own.load(DataCleaning(clients=4))
    assert [a.shape for a in leaves(files)] == [a.shape for a in leaves(part)]
    np.savez(tmp_path / "rows.npz", **{name: array.astype(np.float64) for name, array in arrays.items()})
    for mine, theirs in zip(leaves(own.load(DataCleaning(clients=4))[1]), leaves(part), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    np.savez(tmp_path / "rows.npz", **arrays | {"lower_images": arrays["lower_images"][:, 1:]})
    with pytest.raises(InputError, match=r"lower\.images has rows of uint8\[7, 8\], but the task's are uint8\[8, 8\]"):
        own.load(DataCleaning(clients=4))
    np.savez(tmp_path / "rows.npz", **arrays | {"lower_images": arrays["lower_images"] + 0.5})
    with pytest.raises(InputError, match=r"lower\.images holds 0.5, which uint8, the type of the task's rows, cannot"):
        own.load(DataCleaning(clients=4))
    for name, wrong, message in (("lower_place", 440, "must be at most 439, "), ("upper_labels", -1, "must not be below 0")):
        np.savez(tmp_path / "rows.npz", **arrays | {name: np.append(arrays[name][:-1], np.int32(wrong))})
        with pytest.raises(InputError, match=message):
            own.load(DataCleaning(clients=4))
    np.savez(tmp_path / "rows.npz", upper_images=arrays["upper_images"])
    with pytest.raises(InputError, match="has no array 'upper_labels': data-cleaning needs upper_images, upper_labels"):
        own.load(DataCleaning(clients=4))


def broken():
    raise ValueError("no")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (dict(task="quadratic"), "missing required field `loader`"),
        (dict(task="quadratic", loader="magic"), "loader must be one of share, files, function, task, table; given: magic"),
        (dict(task="quadratic", loader="share", cliet=1), "unknown entry 'cliet'; did you mean client"),
        (dict(task="quadratic", loader="share", client="1"), "client: Expected `int`, got `str`"),
        (dict(task="quadratic", loader="share", client=3), "client must be from 0 to 2; given: 3"),
        (dict(task="quadratic", loader="files"), "path must name an .npz file; given: ''"),
        (dict(task="quadratic", loader="files", path="site.toml"), "is not an .npz file of plain arrays"),
        (dict(task="quadratic", loader="function", function="os"), "must be of the form module:name"),
        (dict(task="quadratic", loader="function", function="no_such:rows"), "cannot be imported"),
        (dict(task="quadratic", loader="function", function="os:getcwd"), "must return"),
        (dict(task="valley", loader="share"), "set up for the task valley, not for quadratic: refused"),
        (dict(task="quadratic", loader="share", knobs={"noise": 0.1}), "insists on noise = 0.1, but the run has noise = 0.2"),
        (
            dict(task="quadratic", loader="share", knobs={"noize": 0.1}),
            "a knob 'noize' that quadratic does not have; did you mean noise",
        ),
    ],
)
def test_a_site_says_what_it_cannot_use_or_will_not_do(tmp_path, entries, message):
    with pytest.raises(InputError, match=message.replace("[", r"\[")) as caught:
        own = site(tmp_path, **entries)
        own.agree("quadratic", KNOBS)
        own.load(Quadratic(**KNOBS))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"categories": "smoker,age"}, "insists on categories = 'smoker', but the run has categories = 'smoker,age': refused"),
        ({"checked": "age"}, "insists on checked = 'checked', but the run has checked = 'age': refused"),
        ({"label": "age"}, "insists on label = 'label', but the run has label = 'age': refused"),
        ({"features": "age"}, "insists on features = 'smoker,age', but the run has features = 'age': refused"),
    ],
)
def test_a_run_that_cleans_a_table_reads_the_columns_that_the_site_names(tmp_path, change, line):
    """Columns of numbers must not pass for categories, whose names are sent. What the site does not name has its default."""
    columns = {"features": "smoker,age", "categories": "smoker"}
    own = site(tmp_path, task="label-errors", loader="table", path="rows.csv", knobs=columns)
    knobs = dataclasses.asdict(LabelErrors(**columns, decay=0.1))
    own.agree("label-errors", knobs)
    with pytest.raises(InputError, match=line):
        own.agree("label-errors", knobs | change)


def test_damaged_or_missing_configurations_are_named(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*site\.toml"):
        SiteData.read(tmp_path / "site.toml")
    (tmp_path / "site.toml").write_text("task = \n")
    with pytest.raises(InputError, match=r"site\.toml is not a TOML file"):
        SiteData.read(tmp_path / "site.toml")


# --- the roster, and the supervisor, against engines that misbehave ---


class Sites:
    """A transport of two sites that answer as they are told to."""

    def __init__(self, begin, answer=None):
        self.answers = {"begin": begin, "answer": answer or {}}
        self.asked, self.timeouts = [], []

    def call(self, method, requests, timeout=None, enough=None):
        self.asked += [(method, m) for m in requests]
        self.timeouts += [timeout] * bool(requests)
        said = {m: self.answers[method][m].pop(0) for m in requests}
        return {m: s for m, s in said.items() if isinstance(s, bytes)}, {
            m: s for m, s in said.items() if isinstance(s, Failure)
        }


HELD = b'{"simulated": true, "upper": 2, "lower": 3}'
LATE = Failure(Kind.LATE, "b did not answer within 120 s")


def refused(site):
    return Failure(Kind.REFUSED, f"{site}: this site is set up for another task")


def roster(sites):
    from fedbilevel.federation.roster import Roster

    return Roster(sites, {0: b"run", 1: b"run"}, 3.0)


def test_a_site_that_refuses_the_run_is_left_out_and_the_others_go_on():
    sites = Sites({0: [HELD], 1: [refused("b")]}, {0: [b"1", b"2"]})
    there = roster(sites)
    assert list(there.begin()) == [1] and there.left_out == {1: refused("b")}
    for reply in (b"1", b"2"):
        replies, errors = there.ask({0: b"?", 1: b"?"})
        assert replies == {0: reply} and not errors[1].sent
    assert ("answer", 1) not in sites.asked


@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        ({0: [refused("a")], 1: [refused("b")]}, InputError),
        ({0: [refused("a")], 1: [Failure(Kind.UNREACHABLE, "b is not connected", sent=False)]}, InputError),
        ({0: [refused("a")], 1: [LATE]}, RuntimeError),
        ({0: [Failure(Kind.UNREACHABLE, "a could not be reached (InputError: ...)")], 1: [LATE]}, RuntimeError),
    ],
)
def test_only_a_refusal_by_all_sites_is_the_end(begin, kind):
    with pytest.raises(kind, match="no site takes part; a") as caught:
        roster(Sites(begin)).begin()
    assert type(caught.value) is kind


def test_a_site_that_missed_the_beginning_is_told_again_but_not_for_ever():
    begin = {0: [HELD], 1: [LATE, LATE._replace(sent=False), HELD]}
    there = roster(Sites(begin, {0: [b"1"] * 2, 1: [b"2"]}))
    there.begin()
    replies, errors = there.ask({0: b"?", 1: b"?"})
    assert replies == {0: b"1"} and list(errors) == [1] and not there.left_out  # it is still at it
    assert there.ask({0: b"?", 1: b"?"}) == ({0: b"1", 1: b"2"}, {}) and there.data == dict.fromkeys(
        (0, 1), Holdings(True, 2, 3)
    )
    trouble = Failure(Kind.BROKEN, "b: MemoryError at the site: see its log")
    sites = Sites({0: [HELD], 1: [trouble] * 9}, {0: [b"1"] * 9})
    there = roster(sites)
    there.begin()
    for _ in range(5):
        replies, errors = there.ask({0: b"?", 1: b"?"})
        assert replies == {0: b"1"} and list(errors) == [1]
    assert there.left_out == {1: trouble} and len(sites.answers["begin"][1]) == 9 - 3


def test_a_sites_first_answer_may_take_as_long_as_its_beginning():
    answers = {0: [b"1"] * 3, 1: [Failure(Kind.UNREACHABLE, "b could not be reached"), b"2", b"2"]}
    sites = Sites({0: [HELD], 1: [HELD]}, answers)
    there = roster(sites)
    there.begin()
    for _ in range(3):
        there.ask({0: b"?", 1: b"?"})
    assert sites.timeouts == [120.0, 120.0, 120.0, None]


def flare(monkeypatch, answers, aborted):
    """A transport to two sites, the second of which answers or raises what is given."""
    from nvflare.collab import CollabCallError

    from fedbilevel.federation import flare

    def proxy(answers):
        def answer(request):
            given = next(answers)
            if isinstance(given, str):
                raise CollabCallError("b", "answer", given)
            return [True, given]

        return lambda timeout: SimpleNamespace(answer=answer)

    monkeypatch.setattr(flare, "ABORTING", 0.5)
    proxies = {0: proxy(iter([b"1"] * 9)), 1: proxy(iter(answers))}
    return flare.Flare(proxies, {0: "a", 1: "b"}, 5.0, aborted)


def test_answers_that_came_while_the_engine_ended_the_job_do_not_count(monkeypatch):
    """It ends the sites' parts first, and says so to the server's a moment later."""
    looks = itertools.count()
    transport = flare(monkeypatch, [b"2", "gone"], lambda: next(looks) > 5)
    assert transport.ask({0: b"?", 1: b"?"}) == ({0: b"1", 1: b"2"}, {})
    with pytest.raises(RuntimeError, match="FLARE aborted the job"):
        transport.ask({0: b"?", 1: b"?"})


def test_a_site_that_cannot_be_reached_holds_the_others_up_once(monkeypatch):
    transport = flare(monkeypatch, ["gone"] * 9, lambda: False)
    times = [time.monotonic()]
    for _ in range(5):
        replies, errors = transport.ask({0: b"?", 1: b"?"})
        assert replies == {0: b"1"} and "b could not be reached" in errors[1].line
        times.append(time.monotonic())
    assert times[1] - times[0] >= 0.5 and times[-1] - times[1] < 0.5


def test_first_answers_are_not_held_up_and_late_ones_are_collected_once(monkeypatch):
    free = threading.Event()

    def slowly():
        yield b"3"
        free.wait(10)
        yield b"2"

    transport = flare(monkeypatch, slowly(), lambda: False)
    assert transport.call("answer", {0: b"?", 1: b"?"}, enough=2) == ({0: b"1", 1: b"3"}, {})
    for sent in (True, False):
        replies, failures = transport.call("answer", {0: b"?", 1: b"?"}, enough=1)
        assert replies == {0: b"1"} and failures[1].kind == "under way" and failures[1].sent is sent
    assert transport.late() == ({}, {})
    assert transport.ask({1: b"?"})[1][1].kind == "late"  # a busy site is not asked
    free.set()
    transport.wait([0, 1])
    assert transport.late() == ({1: b"2"}, {}) and transport.late() == ({}, {})


class Engine:
    """The engine's connection, with one job."""

    def __init__(self, jobs=(), parts=()):
        self.jobs, self.parts, self.aborted = list(jobs), parts, []

    def list_jobs(self):
        return self.jobs

    def get_system_info(self):
        running = [j for j in self.jobs if j["status"] == "RUNNING"]
        return SimpleNamespace(client_info=[], job_info=[SimpleNamespace(job_id=j["job_id"]) for j in running])

    def get_client_job_status(self):
        return self.parts

    def abort_job(self, job):
        self.aborted.append(job)
        next(j for j in self.jobs if j["job_id"] == job)["status"] = "FINISHED:ABORTED"


def federation(tmp_path):
    return Federation(tmp_path, "localhost", 8002, ("a", "b"))


def test_a_site_that_never_gets_a_part_does_not_restart_the_job_for_ever(tmp_path):
    said = []
    returning = ReturningSites(said.append)
    engine = Engine(parts=[{"client_name": "a", "job_id": "1"}, {"client_name": "b", "status": "no jobs"}])
    session = Session(federation(tmp_path), engine)
    assert [returning.found(session, "1", begun=True) for _ in range(6)] == [["b"]] * 3 + [[]] * 3
    assert len(said) == 1 and said[0].startswith("b is connected but got no part in 3 jobs")
    engine.parts = [{"client_name": name, "job_id": "1"} for name in "ab"]
    assert returning.found(session, "1", begun=True) == []
    engine.parts = [engine.parts[0], {"client_name": "b", "status": "no jobs"}]
    assert returning.found(session, "1", begun=True) == ["b"]  # it had a part meanwhile


def test_jobs_of_a_run_that_nobody_follows_are_stopped_first_and_no_others(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"configuration": {}, "identity": "ab"}')
    jobs = [("1", "ab", "RUNNING"), ("2", "ab", "FINISHED:COMPLETED"), ("3", "cd", "RUNNING"), ("4", "ab", "DISPATCHED")]
    engine = Engine({"job_id": j, "job_name": job_name(run), "status": status} for j, run, status in jobs)
    session, folder, said = Session(federation(tmp_path), engine), RunFolder(tmp_path), []
    write_status(tmp_path, {"ended": True})
    leftovers.end_orphans(session, folder, set(), said.append)
    assert sorted(engine.aborted) == ["1", "4"] and len(said) == 1 and (tmp_path / STOP).exists()
    monkeypatch.setattr(leftovers, "STOPPING", 0.0)
    with locked(tmp_path), pytest.raises(InputError, match="an earlier job of this run is still working in"):
        leftovers.end_orphans(session, folder, set(), said.append)


def test_a_job_that_nobody_follows_may_write_its_checkpoint_before_it_is_aborted(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"configuration": {}, "identity": "ab"}')
    engine = Engine([{"job_id": "1", "job_name": job_name("ab"), "status": "RUNNING"}])

    def pause(seconds):
        assert (tmp_path / STOP).exists() and not engine.aborted
        write_status(tmp_path, {"ended": True})

    monkeypatch.setattr("fedbilevel.federation.waiting.time.sleep", pause)
    leftovers.end_orphans(Session(federation(tmp_path), engine), RunFolder(tmp_path), set(), lambda line: None)
    assert engine.aborted == ["1"]


class Line:
    """A session whose calls give or raise what comes next."""

    def __init__(self, *said):
        self.said = list(said)

    def list_jobs(self):
        given = self.said.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    def submit_job(self, path):
        return self.list_jobs()

    def close(self):
        raise ConnectionError("gone")


def connected(monkeypatch, *sessions):
    """A connection that opens these sessions one after the other, or fails to, and what it says."""
    from fedbilevel.federation import connection

    monkeypatch.setattr(connection, "PAUSE", 0.01)
    monkeypatch.setattr(connection, "PATIENCE", 0.3)
    sessions, said = list(sessions), []

    def new_session():
        given = sessions.pop(0) if len(sessions) > 1 else sessions[0]
        if isinstance(given, Exception):
            raise given
        return given

    return connection.Connection(new_session, said.append), said


def test_a_lost_connection_is_made_anew(monkeypatch):
    gone, other = ConnectionError("gone"), ValueError("no such job")
    line, said = connected(monkeypatch, Line("jobs", gone), RuntimeError("still starting"), Line(gone), Line("jobs", other))
    assert line.list_jobs() == "jobs" and line.losses == 0 and not said
    assert line.list_jobs() == "jobs" and line.losses == 2
    assert said == ["the connection to the server is lost: retrying for 0 s"]
    with pytest.raises(ValueError, match="no such job"):
        line.list_jobs()
    line.close()


def test_a_server_that_stays_away_is_given_up(monkeypatch):
    line, said = connected(monkeypatch, Line(ConnectionError("first")), ConnectionError("gone"))
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="gone"):
        line.list_jobs()
    assert time.monotonic() - began > 0.3 and len(said) == 1


def test_a_job_is_not_submitted_twice_when_the_connection_is_lost_meanwhile(monkeypatch):
    line, _ = connected(monkeypatch, Line(ConnectionError("gone")), Line("jobs", "submitted"))
    with pytest.raises(ConnectionError):
        line.submit_job("path")
    assert line.list_jobs() == "jobs"


def test_a_job_that_a_restarted_server_no_longer_runs_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "POLL", 0.01)
    (folder,) = RunFolder.create(
        {tmp_path / "run": Configuration.resolve("quadratic", {}, "simfbo", {}, RunOptions(rounds=20))}
    )
    engine = Engine([{"job_id": "1", "job_name": "any", "status": "DISPATCHED"}])
    losses = iter([0, 0, 0, 1, 1, 1])
    monkeypatch.setattr(Engine, "losses", property(lambda self: next(losses)), raising=False)
    monkeypatch.setattr(Engine, "get_job_meta", lambda self, job: self.jobs[0], raising=False)
    session, watch = Session(federation(tmp_path), engine), following.FolderWatch(folder, pytest.fail, pytest.fail)
    ended = following.follow(session, "1", watch, ReturningSites(pytest.fail), StopRequest())
    assert ended == "the server was restarted" and engine.aborted == ["1"]


def test_jobs_of_other_runs_are_not_tidied_away(tmp_path, monkeypatch):
    jobs = [("1", "ab", "FINISHED:COMPLETED"), ("2", "cd", "FINISHED:COMPLETED"), ("3", "ab", "RUNNING")]
    engine, deleted = Engine({"job_id": j, "job_name": job_name(run), "status": s} for j, run, s in jobs), []
    monkeypatch.setattr(Engine, "delete_job", lambda self, job: deleted.append(job), raising=False)
    (tmp_path / "config.json").write_text('{"configuration": {}, "identity": "ab"}')
    leftovers.tidy(Session(federation(tmp_path), engine), RunFolder(tmp_path))
    assert deleted == ["1"]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The server's part of a job, its run folder, and a function that says what its sites do at the beginning."""
    from fedbilevel.federation import server

    (folder,) = RunFolder.create(
        {tmp_path / "run": Configuration.resolve("quadratic", {"clients": 1}, "simfbo", {}, RunOptions(rounds=20))}
    )
    workspace = SimpleNamespace(get_root_dir=lambda: str(tmp_path))
    monkeypatch.setattr(server, "collab", SimpleNamespace(workspace=workspace, clients=[], is_aborted=False))
    monkeypatch.setattr(server, "keep_compiled", lambda kit: None)

    def beginning(begin, left_out):
        there = SimpleNamespace(begin=begin, left_out=left_out, data={})
        monkeypatch.setattr(server, "Roster", lambda *given: there)

    return server.ExperimentServer(str(folder.path), folder.identity, ["a"]), folder, beginning


def test_whatever_ends_a_job_is_one_line_in_its_status_and_a_traceback_in_the_log(server, monkeypatch, caplog):
    def fail(*arguments):
        raise KeyError("three\nlines\n")

    job, folder, beginning = server
    beginning(dict, {0: refused("a")})
    monkeypatch.setattr("fedbilevel.federation.server.DeployedEngine", fail)
    job.run()
    assert read_status(folder.path) == {
        "ended": True,
        "said": ["rows of the sites: a ? (weight 1)"],
        "left_out": ["a: this site is set up for another task"],
        "error": r"KeyError: 'three\nlines\n'",
    }
    assert "Traceback" in caplog.text


def test_a_job_whose_folder_was_given_to_another_run_writes_nothing_there(server):
    job, folder, beginning = server
    given_away = []

    def give_away():
        given_away.extend(RunFolder.create({folder.path: folder.configuration}, force=True))
        raise RuntimeError("none of 4 clients answered")

    beginning(give_away, {})
    job.run()
    assert given_away and read_status(folder.path) == {}
    with pytest.raises(InputError, match="holds a different run from the job's"):
        job.run()


def test_a_run_whose_folder_was_given_to_another_writes_no_checkpoint_and_no_result(tmp_path):
    configuration = Configuration.resolve("quadratic", {}, "simfbo", {}, RunOptions(rounds=20))
    (folder,) = RunFolder.create({tmp_path: configuration})
    config = json.loads((tmp_path / "config.json").read_text())

    def give_away(moment):
        (tmp_path / "config.json").write_text(json.dumps(config | {"identity": "another"}))

    for seconds in (0.0, 1e9):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="was taken over by another run"):
            folder.execute(StopRequest(), give_away, seconds)
        assert not (tmp_path / "checkpoint").exists() and not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("by", ["", "config.json"])
def test_a_folder_where_a_run_is_at_work_is_not_replaced(tmp_path, by):
    configuration = Configuration.resolve("quadratic", {}, "simfbo", {}, RunOptions(rounds=20))
    before = RunFolder.create({tmp_path: configuration})[0].identity
    with locked(tmp_path, by), pytest.raises(InputError, match="is being run by another process: wait for it, or stop it"):
        RunFolder.create({tmp_path / "other": configuration, tmp_path: configuration}, force=True)
    assert RunFolder(tmp_path).identity == before and not (tmp_path / "other").exists()
    RunFolder.create({tmp_path: configuration}, force=True)


def test_one_command_at_a_time_follows_a_run(tmp_path):
    (tmp_path / "config.json").write_text('{"configuration": {}, "identity": "ab"}')
    with locked(tmp_path, by="config.json"), pytest.raises(InputError, match="is being run by another process"):
        Supervisor(federation(tmp_path), pytest.fail).run(RunFolder(tmp_path), StopRequest(), pytest.fail)


def test_trouble_with_a_server_that_answers_is_not_called_silence(tmp_path):
    lost, other = ConnectionError("x\ny"), ValueError("z")
    for error, line in ((lost, "does not answer (ConnectionError: x y)"), (other, "failed to do as asked (ValueError: z)")):
        with pytest.raises(InputError, match=re.escape(line)), told(federation(tmp_path)):
            raise error


def test_what_others_wrote_is_one_short_line():
    assert in_one_line("a\nERROR b\x1b[2J\r") == "a ERROR b[2J" and len(in_one_line("x" * 10**4)) == 500


def test_a_sites_log_is_not_filled_by_refusals(own_site, caplog):
    from fedbilevel.federation.sparse_log import MOST_LINES

    for _ in range(3000):
        assert own_site.answer(b"?") == [False, "refused", "no run has begun here: refused"]
    assert len(caplog.records) == MOST_LINES + 1 + 3 and "one in 1000" in caplog.text


def test_a_site_that_is_told_twice_of_a_run_loads_its_data_once(own_site, tmp_path, monkeypatch):
    loaded, part = [], Quadratic(**KNOBS).build().population.only(1)

    def rows():
        loaded.append(True)
        return tuple(jax.tree.map(np.asarray, shards.rows) for shards in (part.upper, part.lower))

    monkeypatch.setitem(sys.modules, "own_rows", SimpleNamespace(rows=rows))
    site(tmp_path / "local", task="quadratic", loader="function", function="own_rows:rows")
    first = BeginMessage("quadratic", KNOBS, "fedavg", {}, "float64", "ab", number=1, weight=1.0).encoded()
    for _ in range(2):
        done, reply = own_site.begin(first)
        assert done and len(loaded) == 1
        assert json.loads(reply) == {"simulated": False, "upper": 32, "lower": 32, "test": 0, "found": []}
    assert own_site.begin(first.replace(b'"ab"', b'"cd"'))[0] and len(loaded) == 2


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (b'{"protocol": 9, "version": "9.1", "anything": 1}', "the server speaks protocol 9 (fedbilevel 9.1), and this site"),
        (
            b'{"task": "quadratic", "knobs": {}}',
            f"the server speaks protocol 0 (fedbilevel 0.1.0), and this site protocol {PROTOCOL}",
        ),
        (b'{"protocol": %d, "version": "1", "run": {"task": 3}}' % PROTOCOL, "run.task: Expected `str`, got `int`"),
        (b'{"protocol": "1"}', "protocol: Expected `int`, got `str`"),
        (b"\x80 garbage", "the message to begin a run: "),
    ],
)
def test_a_site_refuses_a_server_of_another_protocol_in_one_line(own_site, message, line):
    done, kind, said = own_site.begin(message)
    assert (done, kind) == (False, "refused") and line in said and "\n" not in said


def test_a_site_of_the_first_version_refuses_a_server_of_this_one():
    """It looks for the run at the top of the message, and refuses what has none there."""
    message = BeginMessage("quadratic", {}, "fedavg", {}, "float32", "ab", number=0, weight=1.0, names=("a",), sites=[[]])
    assert json.loads(message.encoded()).keys() == {"protocol", "version", "run"}
    assert BeginMessage.read(message.encoded()) == message


def test_sites_agree_on_all_of_a_run_but_which_of_them_each_is():
    same = {"precision": "float64", "identity": "ab", "hyperparameters": {"gamma": 0.1}, "aggregate": "secure-sum"}

    def run(number=0, weights=(0.5, 1.5), **change):
        how = same | {"names": ("a", "b"), "weight": weights[number]} | change
        return BeginMessage.read(BeginMessage("quadratic", {}, "fedavg", number=number, weights=weights, **how).encoded())

    assert run(0).agreement() == run(1).agreement()
    others = [{"hyperparameters": {"gamma": 1e-30}}, {"weights": (0.4, 1.6)}, {"aggregate": "secure-sum(bound=9)"},
              {"names": ("a", "c")}, {"fit": "another"}, {"planned": {"local_y": 1}}]  # fmt: skip
    assert len({run(0).agreement(), *(run(0, **other).agreement() for other in others)}) == len(others) + 1
    for false in ({"weight": 2.0}, {"weights": (0.5, 1.5, 1.0)}):
        with pytest.raises(InputError, match="the weights of a run with secure sums are not one for each site"):
            run(0, **false).agreement()


def test_a_hangup_stops_a_run_as_ctrl_c_does_unless_it_is_to_be_ignored():
    script = (
        "import os, signal, sys\nfrom fedbilevel.runs.stopping import stop_request\nsignal.signal(signal.SIGHUP, {})\n"
        "with stop_request() as stop: os.kill(os.getpid(), signal.SIGHUP); print(stop.signum)"
    )
    said = [
        subprocess.run([sys.executable, "-c", script.format(f"signal.{kind}")], capture_output=True, text=True).stdout
        for kind in ("SIG_DFL", "SIG_IGN")
    ]
    assert said == ["1\n", "None\n"]
