"""The command as a user meets it: what it prints, what it refuses, and how it survives being stopped."""

import contextlib
import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.data.datasets import SETS

COMMAND = [sys.executable, "-m", "fedbilevel"]
SMALL = ["--knob", "clients=4", "--knob", "noise=0.1", "--rounds", "60"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "data-cleanin", "fedavg"], "there is no task 'data-cleanin'; did you mean data-cleaning or"),
        (["run", "quadratic", "fedbioac"], "there is no algorithm 'fedbioac'; did you mean fedbioacc"),
        (["run", "valley", "mefbo", "--steps", "1", "--knob", "noise=1e200"], "upper_loss is not finite at the start: check"),
        (["run", "quadratic", "zzz"], "there is no algorithm 'zzz'; choose from: fedpace, "),
        (["show", "fedmob"], "there is no algorithm or task 'fedmob'; did you mean fedmbo"),
        (["run", "quadratic", "simfbo", "--set", "gama_x=1"], "simfbo has no hyperparameter 'gama_x'; did you mean gamma_x"),
        (["run", "quadratic", "simfbo", "--set", "gamma_x=fast"], "gamma_x must be a number above 0; given: fast"),
        (["run", "quadratic", "simfbo", "--set", "gamma_x=-1"], "gamma_x must be a number above 0; given: -1"),
        (["run", "quadratic", "simfbo", "--set", "gamma_x=nan"], "gamma_x must be a number above 0; given: nan"),
        (
            ["run", "quadratic", "simfbo", "--set", "local_steps=2.5"],
            "local_steps must be a whole number of at least 1 (and below 2³¹); given: 2.5",
        ),
        (["run", "quadratic", "simfbo", "--set", "share_batch=maybe"], "share_batch must be true or false; given: maybe"),
        (["run", "quadratic", "simfbo", "--set", "gamma_x"], "'gamma_x' is not of the form NAME=VALUE"),
        (["run", "quadratic", "simfbo", "--set", "fedavg.gamma=1"], "'fedavg' is not among the algorithms simfbo"),
        (["run", "quadratic", "simfbo", "--knob", "client=3"], "quadratic has no setting 'client'; did you mean clients"),
        (["run", "quadratic", "simfbo", "--knob", "lower_level=both"], "lower_level must be one of global, local; given: both"),
        (["run", "quadratic", "simfbo", "simfbo"], "an algorithm is named twice"),
        (
            ["run", "quadratic", "simfbo", "--rounds", "0"],
            "rounds must be a whole number of at least 1",
        ),
        (["run", "quadratic", "simfbo", "--rounds", "many"], "Invalid value for '--rounds': 'many' is not a whole number"),
        (["run", "quadratic", "simfbo", "--dropout", "often"], "Invalid value for '--dropout': 'often' is not a number"),
        (["run", "quadratic", "simfbo", "--rounds", "5", "--steps", "5"], "either --rounds or --steps"),
        (["run", "quadratic", "simfbo", "--clients-per-round", "11"], "between 1 and the number of clients, 10; given: 11"),
        (["run", "quadratic", "simfbo", "--bernoulli", "1.5"], "above 0 and at most 1; given: 1.5"),
        (["run", "quadratic", "simfbo", "--dropout", "1"], "at least 0 and below 1; given: 1.0"),
        (["run", "quadratic", "simfbo", "--clients-per-round", "3", "--bernoulli", "0.5"], "not both"),
        (["run", "quadratic", "fedbio-local"], "FedBiOLocal is for a local lower level, but the task has a global one"),
        (["run", "data-cleaning", "fedavg", "--knob", "train_per_client=500"], "digits has 1397 training samples, too few"),
        (["run", "data-cleaning", "fedavg", "--data", "no/such"], "no/such does not exist"),
        (["run", "data-cleaning", "fedavg", "--knob", "dataset=mnist"], "mnist was not found: looked for train-"),
        (
            ["run", "data-cleaning", "fedavg", "--knob", "dataset=mnist", "--data", "."],
            "get it with 'fedbilevel data fetch mnist'",
        ),
        (["run", "quadratic", "simfbo", "--data", "no/such"], "no/such does not exist"),
        (["run", "quadratic", "simfbo", "--set", "gamma_x=inf"], "gamma_x must be a number above 0; given: inf"),
        (["run", "quadratic", "simfbo", "--set", "local_steps=99999999999"], "local_steps must be a whole number"),
        (["run", "quadratic", "simfbo", "--set", "local_steps=2000000000"], "minutes or more here, during which it can be"),
        (["run", "quadratic", "simfbo", "fedbioacc", "--rounds", "2"], "2 rounds are too few for FedBiOAcc"),
        (["run", "quadratic", "fednest", "--set", "estimator=phe"], "fednest is FedMBO with estimator = ihgp; given: phe"),
        (["run", "quadratic", "simfbo", "--loss-bound", "0"], "loss_bound must be a number above 0"),
        (["compare", ".", "--out", "x.xyz"], "must end in .png, .svg or .pdf; given: x.xyz"),
        (["resume", "no/such"], "no/such holds no run"),
        (["compare", "."], ". holds no run"),
        (["report", "."], ". holds no run: give a folder that 'fedbilevel run' wrote"),
        (["report", ".", "--out", "page.txt"], "the page's name must end in .html; given: page.txt"),
        (["watch", "no/such"], "no/such holds no run"),
        (["run", "quadratic", "simfbo", "--style", "poster"], "--style must be one of screen, paper; given: poster"),
        (["compare", ".", "--style", "a\nb\x1b[31m"], "--style must be one of screen, paper; given: a b[31m"),
        (["compare", ".", "--style", "poster"], "--style must be one of screen, paper; given: poster"),
        (["data", "fetch", "mnits"], "there is no data set 'mnits'; did you mean mnist"),
        (["data", "fetch", "digits"], "digits is bundled: nothing to fetch"),
        (["data", "fetch", "mini-imagenet"], "mini-imagenet has no free mirror: make it from ImageNet"),
        (["data", "fetch"], "Missing argument"),
        (["data", "show", "quadratic"], "quadratic has no classes to draw"),
        (["data", "show", "few-short"], "there is no task 'few-short'; did you mean few-shot"),
        (["data", "show", "few-shot", "--out", "a.jpg"], "must end in .png, .svg or .pdf; given: a.jpg"),
        (["data", "show", "loss-tuning", "--knob", "partition=dirichlet"], "partition must be iid, one-class, shards:S"),
        (["nonsense"], "No such command 'nonsense'"),
        (["run", "quadratic", "simfbo", "--loss-bound", "inf"], "loss_bound must be a number above 0; given: inf"),
        (["run", "quadratic", "simfbo", "--out", ""], "Invalid value for '--out': it is empty: name a folder"),
        (["data", "fetch", "mnist", "--to", " "], "Invalid value for '--to': it is empty: name a folder"),
        (
            ["run", "quadratic", "simfbo", "--set", "gamma_x=1", "--set", "gamma_x=2"],
            "--set gives gamma_x twice, as 1 and as 2",
        ),
        (["run", "quadratic", "simfbo", "--knob", "noise=1", "--knob", "noise=1"], "--knob gives noise twice, as 1 and as 1"),
        (["sweep", "quadratic", "simfbo", "--grid", "gamma_x=1", "--grid", "gamma_x=2"], "--grid gives gamma_x twice"),
        (
            ["sweep", "quadratic", "simfbo", "--grid", "gamma_x+eta_x=1", "--set", "eta_x=2"],
            "eta_x is in --grid and in --set: leave one out",
        ),
        (
            ["sweep", "quadratic", "simfbo", "--grid", "gamma_x=1,2", "--seeds", "5000000000"],
            "seeds must be a whole number of at least 1, and below 2³²; given: 5000000000",
        ),
        (
            ["sweep", "quadratic", "simfbo", "--grid", "gamma_x=1,2", "--seeds", "1000000"],
            "this sweep has 2,000,000 runs, but may have at most 100,000: give it fewer seeds or cells",
        ),
        (["sweep", "quadratic", "simfbo", "--grid", "gamma_x=1,2", "--by", "x"], "there is no metric 'x' to rank by"),
        (["sweep", "quadratic", "fedbioacc", "--grid", "eta=1,2", "--rounds", "2"], "2 rounds are too few for FedBiOAcc"),
        (["sweep", "quadratic", "fedbio-local", "--grid", "eta=1,2"], "FedBiOLocal is for a local lower level"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(run, arguments, message, tmp_path):
    code, out, err = run(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("fedbilevel: ") and err.count("\n") == 1 and "Traceback" not in err + out
    assert list(tmp_path.iterdir()) == []  # nothing was written


def test_names_that_are_no_text_and_a_closed_output_are_no_end(tmp_path):
    def ends(*arguments, **how):
        return subprocess.run([*COMMAND, *arguments], cwd=tmp_path, capture_output=True, **how)

    odd = os.fsencode("odd\udcff")
    done = ends("run", "quadratic", "simfbo", "--rounds", "2", "--out", odd)
    assert done.returncode == 0 and b"runs: odd\\udcff" in done.stdout and (tmp_path / os.fsdecode(odd)).is_dir()
    ascii_only = ends("show", "simfbo", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert ascii_only.returncode == 0 and b"\\u03c4" in ascii_only.stdout
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *COMMAND, "list"], capture_output=True)
    assert closed.returncode == 0 and closed.stderr == b""


def test_a_device_that_is_not_there_is_one_line(tmp_path):
    asked = [*COMMAND, "run", "quadratic", "simfbo"]
    done = subprocess.run(asked, cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "nonsense"}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("fedbilevel: JAX cannot use a device here: Unable to initialize backend 'nonsense'")


@pytest.mark.parametrize("group", [[], ["data"], ["federation"]])
def test_a_group_of_commands_alone_shows_its_help(run, group):
    code, out, err = run(*group)
    assert code == 0 and err == "" and "Usage:" in out and "Commands:" in out


def test_run_writes_a_folder_per_algorithm_a_table_and_a_picture(run, tmp_path):
    code, out, err = run("run", "quadratic", "fedbio", "fedavg", *SMALL, "--set", "fedbio.local_steps=2", "--out", "here")
    assert code == 0, err
    assert re.search(r"fedbio +\S+ +\S+ +60 ", out) and "MB up" in out
    assert (tmp_path / "here" / "curves.png").stat().st_size > 10_000 and (tmp_path / "here" / "curves.svg").exists()
    config = json.loads((tmp_path / "here" / "fedbio" / "config.json").read_text())["configuration"]
    assert config["hyperparameters"]["local_steps"] == 2 and config["knobs"]["clients"] == 4
    rows = [json.loads(line) for line in (tmp_path / "here" / "fedbio" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rounds"] for row in rows] == [0, 10, 20, 30, 40, 50, 60]
    assert rows[-1]["floats_up"] == 60 * 4 * 21 and rows[-1]["floats_down"] == 60 * 4 * 21

    before = {p: p.read_bytes() for p in (tmp_path / "here").rglob("*") if p.is_file()}
    code, _, err = run("run", "quadratic", "fedbio", *SMALL, "--out", "here")
    assert code == 2 and ": resume it, or choose another folder with --out, or replace it with --force" in err
    assert {p: p.read_bytes() for p in (tmp_path / "here").rglob("*") if p.is_file()} == before
    code, out, _ = run("run", "quadratic", "fedbio", *SMALL, "--out", "here", "--force", "--seed", "1")
    assert code == 0 and json.loads((tmp_path / "here" / "fedbio" / "config.json").read_text())["configuration"]["seed"] == 1

    code, out, _ = run("compare", "here", "--out", "both.png")
    assert code == 0 and "fedavg" in out and (tmp_path / "both.png").exists() and (tmp_path / "both.svg").exists()
    code, out, _ = run("report", "here")
    assert code == 0 and out == "page: report.html\n" and (tmp_path / "report.html").stat().st_size > 1_000_000


@pytest.mark.parametrize(("lower_level", "algorithm"), [("global", "fedpace"), ("local", "fedpace-local")])
def test_without_the_name_of_an_algorithm_the_lower_level_chooses_it(run, tmp_path, lower_level, algorithm):
    code, _, err = run("run", "quadratic", "--knob", f"lower_level={lower_level}", *SMALL, "--out", "here")
    assert code == 0, err
    assert [path.parent.name for path in tmp_path.glob("here/*/config.json")] == [algorithm]


def test_a_method_outside_its_assumptions_is_named_once_in_the_output_and_in_its_result(run, tmp_path):
    code, out, err = run("run", "valley", "simfbo", "mefbo", "fedavg", "--rounds", "20", "--out", "here")
    assert code == 0, err
    (note,) = [line for line in out.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: SimFBO assumes a lower level that is strongly convex in y")
    caveats = {
        n: json.loads((tmp_path / "here" / n / "result.json").read_text())["caveats"] for n in ("simfbo", "mefbo", "fedavg")
    }
    assert caveats == {"simfbo": [note.removeprefix("note: ")], "mefbo": [], "fedavg": []}


def test_diverged_runs_do_not_stop_the_others_and_give_exit_code_1(run):
    code, out, err = run("run", "quadratic", "simfbo", "fedavg", *SMALL, "--set", "gamma_y=1e30", "--out", "here")
    assert code == 1 and "SimFBO diverged at round" in err and "Traceback" not in err
    assert "simfbo (diverged)" in out and re.search(r"fedavg +\S+ +\S+ +60 ", out)


def test_a_run_whose_loss_is_above_the_bound_at_its_start_says_so_in_one_line(run):
    for command in (["run", "quadratic", "fedavg", *SMALL, "--loss-bound", "1e-9", "--out", "[/red]"], ["resume", "[/red]"]):
        code, _, err = run(*command)
        assert code == 1 and re.fullmatch(r"fedbilevel: upper_loss is .*, above the bound of 1e-09, before the first .*\n", err)


@pytest.mark.parametrize("arguments", [["--out", "9" * 5000], ["--seed", "9" * 5000]])
def test_a_message_that_quotes_a_long_value_is_cut_to_one_line(run, arguments):
    code, _, err = run("run", "quadratic", "fedavg", *SMALL, *arguments)
    assert code in (1, 2) and err.startswith("fedbilevel: ") and len(err) <= 2000 and err.count("\n") == 1


def test_data_without_corruption_can_be_cleaned_too(run):
    code, out, err = run("run", "data-cleaning", "fedavg", "--knob", "rho=0", "--rounds", "10", "--out", "[a]")
    assert code == 0 and re.search(r"fedavg +\S+ +0.5 +\S+ +10 ", out) and "runs: [a]" in out, err


def test_data_show_draws_who_holds_what(run, tmp_path):
    code, out, _ = run("data", "show", "regularisation", "--knob", "clients=5", "--knob", "partition=one-class")
    assert code == 0 and "training: 5 clients with" in out and "samples of 1 class\n" in out
    assert (tmp_path / "regularisation-holdings.png").read_bytes()[:4] == b"\x89PNG"
    assert run("data", "show", "regularisation", "--out", "who.svg")[0] == 0 and (tmp_path / "who.svg").exists()


def test_list_is_a_line_each_and_show_explains_every_setting(run):
    _, out, _ = run("list")
    for name, entry in {**ALGORITHMS, **TASKS}.items():
        assert any(name in line and entry.summary in line and entry.paper in line for line in out.splitlines())
    for name, source in SETS.items():
        assert any(name in line and source.summary in line and (source.get or "bundled") in line for line in out.splitlines())
    for name in {**ALGORITHMS, **TASKS}:
        code, out, _ = run("show", name)
        assert code == 0 and "default" in out
    _, out, _ = run("show", "fednest")
    assert re.search(r"estimator +ihgp ", out) and re.search(r"lower_solver +fedsvrg ", out) and "fixed for fednest" in out


def test_a_value_set_for_one_algorithm_goes_before_that_for_all(run, tmp_path):
    given = ["--set", "fedbio.eta=0.1", "--set", "eta=0.2"]
    assert run("run", "quadratic", "fedbio", "fedbioacc", *SMALL, *given, "--out", "here")[0] == 0
    read = {n: json.loads((tmp_path / "here" / n / "config.json").read_text()) for n in ("fedbio", "fedbioacc")}
    assert [read[n]["configuration"]["hyperparameters"]["eta"] for n in read] == [0.1, 0.2]


def test_runs_and_sweeps_do_not_share_a_folder(run, tmp_path):
    sweep = ["sweep", "quadratic", "simfbo", "--grid", "gamma_x=0.01", "--seeds", "1", *SMALL]
    assert run("run", "quadratic", "simfbo", *SMALL, "--out", "runs")[0] == run(*sweep, "--out", "sweep")[0] == 0
    before = sorted(tmp_path.rglob("*"))
    for arguments in (
        [*sweep, "--out", "runs", "--force"],
        [*sweep, "--out", "runs/simfbo"],
        ["run", "quadratic", "fedbio", *SMALL, "--out", "sweep", "--force"],
        ["run", "quadratic", "fedbio", *SMALL, "--out", "runs/simfbo", "--force"],
    ):
        code, _, err = run(*arguments)
        assert code == 2 and "already holds something else" in err and err.endswith(": choose another folder with --out\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[hyperparameters.simfob]\ngamma_x = 1.0", "there is no algorithm 'simfob'; did you mean simfbo"),
        ("[hyperparameters.simfbo]\ngama_x = 1.0", "simfbo has no setting 'gama_x'; did you mean gamma_x"),
        ("[hyperparameters.simfbo]\ngamma_x = true", "gamma_x must be a number above 0; given: True"),
        ("[hyperparameters]\ngamma_x = 1.0", "hyperparameters.gamma_x: Expected `object`, got `float`"),
        ("[knobs]\nnoise = 0.1\nclients = [3]", "knobs.clients: Expected `bool | int | float | str | null`, got `array`"),
        ("hyperparameters.simfbo.gamma_x = 2026-01-01", "hyperparameters.simfbo.gamma_x: Expected"),
        ("[knobs]\nclient = 3", "quadratic has no setting 'client'; did you mean clients"),
        ("[knob]\nclients = 3", "unknown entry 'knob'; did you mean knobs"),
        ('task = "valley"', "it is for valley, not for quadratic"),
    ],
)
def test_what_is_wrong_in_a_settings_file_is_one_line_that_names_it(run, tmp_path, content, message):
    (tmp_path / "s.toml").write_text(content)
    for arguments in (["run", "quadratic", "simfbo"], ["sweep", "quadratic", "simfbo", "--grid", "eta_x=1,2"]):
        code, _, err = run(*arguments, "--settings", "s.toml")
        assert code == 2 and err.startswith("fedbilevel: s.toml: ") and message in err and err.count("\n") == 1


def test_settings_for_other_algorithms_alone_are_noted(run, tmp_path):
    (tmp_path / "s.toml").write_text("[hyperparameters.fedbio]\neta = 0.1")
    said = "note: s.toml has hyperparameters for fedbio, and none for simfbo\n"
    code, out, _ = run("run", "quadratic", "simfbo", *SMALL, "--settings", "s.toml", "--out", "a")
    assert code == 0 and said in out
    code, out, _ = run("run", "quadratic", "fedbio", *SMALL, "--settings", "s.toml", "--out", "b")
    assert code == 0 and "note: s.toml" not in out


def test_an_end_of_file_is_not_called_a_stop(run, monkeypatch):
    def broken(*arguments):
        raise EOFError("no more")

    monkeypatch.setattr("fedbilevel.command.run.chosen", broken)
    with pytest.raises(EOFError, match="no more"):
        run("run", "quadratic", "simfbo")


def test_ctrl_c_is_a_stop_with_its_own_exit_code(run, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedbilevel.command.run.chosen", interrupted)
    assert run("run", "quadratic", "simfbo") == (130, "", "fedbilevel: stopped\n")


def test_a_run_and_a_sweep_that_go_on_under_other_versions_say_so_in_a_line(run, tmp_path):
    assert run("run", "quadratic", "simfbo", *SMALL, "--out", "runs")[0] == 0
    assert run("sweep", "quadratic", "simfbo", "--grid", "gamma_x=0.01,0.02", "--seeds", "1", *SMALL, "--out", "sweep")[0] == 0
    (tmp_path / "runs/simfbo/result.json").unlink()
    for file in (tmp_path / "runs/simfbo/config.json", tmp_path / "sweep/sweep.json"):
        where = file.parent.relative_to(tmp_path)
        assert "note:" not in run("resume", where)[1]
        content = json.loads(file.read_text())
        content["versions"] |= {"jax": "0.1.0", "device": "gpu H200"}
        file.write_text(json.dumps(content))
        (tmp_path / "runs/simfbo/result.json").unlink()
        code, out, _ = run("resume", where)
        (note,) = [line for line in out.splitlines() if line.startswith("note:")]
        assert code == 0 and f"{where} began with jax 0.1.0 (now {jax.__version__}), device gpu H200 (now cpu" in note


@pytest.mark.parametrize("asked", [["list"], ["--help"], ["run", "--help"]])
def test_list_and_help_do_not_wait_for_jax(asked):
    script = (
        "import atexit, os, sys; atexit.register(lambda: os._exit(not sys.modules.keys().isdisjoint({'jax', 'msgspec'}))); "
        f"sys.argv = ['fedbilevel', *{asked}]; from fedbilevel.command import main; main.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr


def test_programs_are_kept_in_the_cache_folder_and_one_that_cannot_be_written_is_no_matter(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    (tmp_path / "file").touch()
    for place in ("cache", "file"):
        done = subprocess.run(
            [sys.executable, "-m", "fedbilevel", "run", "valley", "fedavg", "--rounds", "3", "--out", place + " run"],
            env={**environment, "XDG_CACHE_HOME": str(tmp_path / place), "MPLCONFIGDIR": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and not done.stderr
    assert any((tmp_path / "cache" / "fedbilevel" / "compiled").iterdir())


DOUBLE = {**os.environ, "JAX_ENABLE_X64": "1"}  # as in this process, which resumes what another one began
LONG = ["run", "quadratic", "simfbo", "fedavg", "--knob", "noise=0.1", "--rounds", "8000", "--every", "200", "--out", "here"]


def started(folder):
    """A long run in a process of its own that has begun to write metrics."""
    process = subprocess.Popen(
        [*COMMAND, *LONG], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=DOUBLE
    )
    metrics = folder / "here" / "simfbo" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    return process


def rows(folder, name):
    lines = (folder / "here" / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stopped_or_killed_run_goes_on_to_the_same_end(number, tmp_path, run):
    process = started(tmp_path)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number, err
        assert err == "fedbilevel: stopped; continue with: fedbilevel resume here\n"
        assert (tmp_path / "here" / "simfbo" / "checkpoint").exists()
    code, _, err = run("resume", "here")
    assert code == 0, err
    resumed = [rows(tmp_path, name) for name in ("simfbo", "fedavg")]  # the second one had not begun
    assert run(*LONG, "--force")[0] == 0  # this time to its end
    assert resumed == [rows(tmp_path, name) for name in ("simfbo", "fedavg")]


def test_a_disk_that_takes_no_more_is_said_in_one_line_and_the_run_can_go_on(tmp_path, run):
    # the kernel refuses writes beyond three blocks of 512 bytes, as it does on a full disk
    arguments = ["run", "quadratic", "fedavg", *SMALL, "--every", "1", "--out", "here"]
    script = ["sh", "-c", 'ulimit -f 3; exec "$@"', "sh", *COMMAND, *arguments]
    environment = {k: v for k, v in DOUBLE.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    failed = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1
    assert failed.stderr == "fedbilevel: here: File too large; fix that, then continue with: fedbilevel resume here\n"
    code, _, err = run("resume", "here")
    assert code == 0, err
    assert [row["rounds"] for row in rows(tmp_path, "fedavg")] == list(range(61))


def test_a_disk_that_takes_no_picture_is_said_in_one_line_and_resume_draws_it(tmp_path, run, monkeypatch):
    def draw(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("fedbilevel.report.curve_picture.draw", draw)
        code, _, err = run("run", "quadratic", "fedavg", *SMALL, "--out", "here")
    line = "fedbilevel: here: No space left on device; fix that, then continue with: fedbilevel resume here\n"
    assert code == 1 and err == line
    assert run("resume", "here")[0] == 0 and (tmp_path / "here" / "curves.png").exists()


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(tmp_path, run):
    arguments = ["run", "quadratic", "fedavg", *SMALL, "--out"]
    terminal, screen = pty.openpty()
    process = subprocess.Popen([*COMMAND, *arguments, "bar"], cwd=tmp_path, stdout=screen, env={**os.environ, "COLUMNS": "120"})
    os.close(screen)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal closes with the process
        while more := os.read(terminal, 4096):
            shown += more
    os.close(terminal)
    assert process.wait() == 0 and b"round 60/60" in shown and "━".encode() in shown
    _, piped, _ = run(*arguments, "lines")
    assert "\x1b" not in piped and "fedavg: round 60 of 60, x error " in piped


def test_the_demo_cleans_labels_beside_fedavg_on_the_same_data(run, monkeypatch, tmp_path):
    """What comes out: test_examples.py."""
    monkeypatch.setattr("fedbilevel.command.run._execute", lambda *arguments: None)
    assert run("demo", "--out", "demo")[0] == 0
    cleaned, trusted = (json.loads((tmp_path / "demo" / n / "config.json").read_text()) for n in ("fedbioacc", "fedavg"))
    assert cleaned["configuration"]["task"] == "data-cleaning"
    for same in ("task", "knobs", "rounds", "seed"):
        assert cleaned["configuration"][same] == trusted["configuration"][same]
