"""Every example runs, and so does the demo, and ends where its text says."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fedbilevel as fb

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def printed(capsys, monkeypatch, tmp_path):
    """What an example prints."""

    def printed(name):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return printed


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


def test_every_example_is_tested():
    tested = set(re.findall(r'printed\("(\w+\.py)"\)', Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.slow
def test_noisy_labels_are_cleaned(printed):
    trusting, cleaning, auc = numbers(printed("clean_noisy_labels.py"))
    assert cleaning > trusting + 0.015 and auc > 0.95


def test_regularisation_is_tuned(printed):
    before, after, accuracy, *_ = numbers(printed("tune_regularisation.py"))
    assert after < 0.2 * before and accuracy > 0.94


def test_tables_with_wrong_labels_are_cleaned(printed):
    before, after, auc, _ = numbers(printed("clinic_tables.py"))
    assert after > before + 0.3 and auc > 0.9


@pytest.mark.slow
def test_personal_heads_serve_clients_who_name_classes_differently(printed):
    *_, mean, worst = numbers(printed("personal_heads.py"))
    assert mean > 0.9 and worst > 0.8


def test_the_shares_of_useful_sources_are_found(printed):
    *shares, total, before, after = numbers(printed("constrained_problem.py"))
    assert shares[1] + shares[4] > 0.95 and total == 1 and after < 0.1 * before


@pytest.mark.slow
def test_equinox_modules_can_be_x_and_y(printed):
    assert numbers(printed("equinox_model.py"))[-1] > 0.9


@pytest.mark.slow
def test_labels_are_cleaned_for_a_torch_module(printed):
    pytest.importorskip("torch")
    trusting, cleaning = numbers(printed("torch_model.py"))
    assert cleaning > trusting + 0.05


def test_a_run_can_be_logged_to_tensorboard(printed, tmp_path):
    (error,) = numbers(printed("log_to_tensorboard.py"))
    (file,) = (tmp_path / "logs").iterdir()
    assert error < 1 and file.name.startswith("events.") and b"x_error" in file.read_bytes()


@pytest.mark.slow
def test_the_notebook_goes_from_two_losses_to_pictures(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "first_problem.ipynb").read_text(encoding="utf-8"))
    shown = []
    names = {"_show": shown.append}
    for cell in (cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        *body, last = ast.parse("".join(cell["source"])).body
        if isinstance(last, ast.Expr):  # which a notebook shows
            last = ast.copy_location(ast.Expr(ast.Call(ast.Name("_show", ast.Load()), [last.value], [])), last)
        module = ast.fix_missing_locations(ast.Module([*body, last], []))
        exec(compile(module, "first_problem.ipynb", "exec"), names)
        stored = "".join(text for output in cell["outputs"] if output["output_type"] == "stream" for text in output["text"])
        assert re.sub(r"[\d.]+", "", capsys.readouterr().out) == re.sub(r"[\d.]+", "", stored)
    assert roc_auc_score(~names["is_wrong"], names["weight"]) > 0.95
    assert names["solution"].history[-1]["accuracy"] > names["trusting"].history[-1]["accuracy"] + 0.1
    pages = [value._repr_html_() for value in shown if isinstance(value, fb.Solution | fb.SweepResult)]
    assert [page.count("<img") for page in pages] == [1, 1] and Path("cleaning.html").exists()


@pytest.mark.slow
def test_the_demo_cleans_better_than_chance_and_beats_training_on_everything(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "fedbilevel", "demo", "--out", "demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = {name: json.loads((tmp_path / "demo" / name / "result.json").read_text()) for name in ("fedbioacc", "fedavg")}
    assert result["fedbioacc"]["roc_auc"] > 0.95 and result["fedavg"]["roc_auc"] == 0.5
    assert result["fedbioacc"]["test_accuracy"] > result["fedavg"]["test_accuracy"] + 0.02
    assert np.isclose(result["fedbioacc"]["rounds"], result["fedavg"]["rounds"], atol=2)
    assert "roc auc" in done.stdout and (tmp_path / "demo" / "curves.png").exists()
