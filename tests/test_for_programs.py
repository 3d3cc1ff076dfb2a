"""What other programs read: the version, the types, the names that a shell completes, and JSON in place of text."""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.federation.provision import found
from fedbilevel.federation.session import Session
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.data.datasets import SETS

ROOT = Path(__file__).parent.parent


def test_the_version_is_the_one_that_is_installed(run):
    assert fb.__version__ == importlib.metadata.version("fedbilevel")
    assert run("--version") == (0, f"fedbilevel {fb.__version__}\n", "")


@pytest.mark.slow
def test_a_type_checker_sees_the_types(tmp_path):
    (tmp_path / "user.py").write_text("import fedbilevel as fb\n\nreveal_type(fb.SimFBO().gamma_x)\nfb.Uniform(3, 4)\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "--no-incremental", "user.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert 'Revealed type is "float"' in done.stdout.replace("builtins.", "")
    assert 'user.py:4: error: Too many arguments for "Uniform"' in done.stdout and "py.typed" not in done.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("fedbilevel re", ["resume", "reproduce", "report"]),
        ("fedbilevel run qua", ["quadratic"]),
        ("fedbilevel run quadratic sim", ["simfbo"]),
        ("fedbilevel show fedbioacc-", ["fedbioacc-local"]),
    ],
)
def test_a_shell_completes_verbs_and_names(words, completed, tmp_path):
    script = "import sys; sys.argv = ['fedbilevel']; from fedbilevel.command.main import main; main()"
    asked = {"_FEDBILEVEL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == completed and not done.stderr


def test_list_as_json(run):
    code, out, err = run("list", "--json")
    listed = json.loads(out)
    assert code == 0 and not err and list(listed) == ["algorithms", "tasks", "aggregations", "data_sets"]
    assert [entry["name"] for entry in listed["algorithms"]] == list(ALGORITHMS)
    assert [entry["name"] for entry in listed["tasks"]] == list(TASKS)
    assert [entry["name"] for entry in listed["data_sets"]] == list(SETS)
    assert set(listed["tasks"][0]) == {"name", "summary", "paper", "package"}
    assert {"name": "digits", "summary": SETS["digits"].summary, "get": None} in listed["data_sets"]


def test_show_as_json(run):
    shown = json.loads(run("show", "fedbioacc", "--json")[1])
    assert list(shown) == [
        "name",
        "kind",
        "explanation",
        "settings",
        "run_options",
        "reports",
        "suited",
        "single_answers",
        "late_answers",
    ]
    assert shown["name"] == "fedbioacc" and shown["kind"] == "algorithm" and "STORM" in shown["explanation"]
    steps = {setting["setting"]: setting for setting in shown["settings"]}["local_steps"]
    assert steps["default"] == fb.FedBiOAcc().local_steps and "whole number" in steps["must_be"]
    assert set(shown["suited"]["data-cleaning"]) == {"values", "source"} and "hypergradient_norm" in shown["reports"]
    assert json.loads(run("show", "quadratic", "--json")[1])["kind"] == "task"


def test_compare_as_json(run, tmp_path):
    run("run", "quadratic", "simfbo", "fedavg", "--knob", "clients=3", "--rounds", "20", "--out", "here")
    code, out, _ = run("compare", "here", "--json")
    compared = json.loads(out)
    assert code == 0 and compared["pictures"] == ["comparison.png", "comparison.svg"]
    first, second = compared["runs"]
    assert list(first) == ["folder", "label", "status", "headline", "last", "megabytes_up", "megabytes_down"]
    assert (first["folder"], first["label"], first["status"]) == ("here/fedavg", "fedavg", "finished")
    row = json.loads((tmp_path / "here/simfbo/metrics.jsonl").read_text().splitlines()[-1])
    assert second["last"] == row and second["headline"] in row


def test_the_status_of_a_federation_as_json(run, tmp_path, monkeypatch):
    class Open(Session):
        def connected(self):
            return ["b"]

        def running(self):
            return {"job"}

    found(tmp_path / "study", ["a", "b"], "localhost", 9001)
    opened = contextlib.contextmanager(lambda federation, say: iter([Open(federation, None)]))
    monkeypatch.setattr(Session, "open", opened)
    assert json.loads(run("federation", "status", "study", "--json")[1]) == {
        "host": "localhost",
        "port": 9001,
        "running_jobs": 1,
        "sites": [{"name": "a", "connected": False}, {"name": "b", "connected": True}],
    }
