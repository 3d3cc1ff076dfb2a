"""`sweep` and `resume` as calls: the numbers of `solve` and of the command, stopping, and what cannot be continued."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from test_recorded import MINE, STEPS, imported, small, stopping_at, without_time  # noqa: F401 (small is a fixture)

import fedbilevel as fb
from fedbilevel import own_code
from fedbilevel.runs.sweeps import folder as folder_module


def f(x, y, rows):
    return jnp.mean((y - rows) ** 2) + x**2


def g(x, y, rows):
    return jnp.mean((y - x - rows) ** 2)


def problem():
    return fb.Task.of(f, g, jnp.ones(()), jnp.zeros(()), lower=[jnp.arange(3.0), jnp.ones(2)])


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "results.jsonl").read_text().splitlines()]


def test_a_sweep_has_the_numbers_of_solve_and_is_shown_without_a_network(small, tmp_path):  # noqa: F811
    grid = {"eta_x+gamma_x": np.asarray([0.05, 0.2]), "weight": [2]}
    result = fb.sweep(small(weight=7.0).build(), STEPS, grid, seeds=1, rounds=20, every=10)
    assert not list(tmp_path.glob("*/sweep.json")) and len(result.cells) == 2
    task = small(weight=2.0).build()
    for cell in result.cells:
        step = cell.values["eta_x+gamma_x"]
        alone = fb.solve(task, algorithm=dataclasses.replace(STEPS, eta_x=step, gamma_x=step), rounds=20)
        for name in ("rounds", "upper_loss", "lower_loss"):
            np.testing.assert_allclose([row[name] for row in cell.outcomes[0].rows], [row[name] for row in alone.history])
    means = [cell.mean("upper_loss") for cell in result.cells]
    assert means == sorted(means) == [row["upper_loss mean"] for row in result.table]
    assert re.fullmatch(
        r"<SweepResult: simfbo on small, 1 seeds, 2 cells; upper_loss \S+ at eta_x=(\S+), gamma_x=\1, weight=2.0>", repr(result)
    )
    page = result._repr_html_()
    assert page.count("<tr>") == 3 and "data:image/svg+xml;base64," in page and "http" not in page
    assert len(result.plot().axes) == 2  # the grid and its scale


def test_the_folder_is_that_of_the_command_and_is_not_repeated(run, small, tmp_path):  # noqa: F811
    options = ["--rounds", 10, "--seeds", 2, "--knob", "weight=2", "--grid", "gamma_x=0.05,0.2"]
    assert run("sweep", tmp_path / "mine.py", "simfbo", *options, "--out", "theirs")[0] == 0
    result = fb.sweep(small, "simfbo", {"gamma_x": [0.05, 0.2]}, rounds=10, seeds=2, knobs={"weight": 2.0}, out="ours")
    for file in ("cells.csv", "best.toml", "sweep.svg"):
        assert Path("ours", file).read_bytes() == Path("theirs", file).read_bytes()
    ours, theirs = (json.loads(Path(where, "sweep.json").read_text()) for where in ("ours", "theirs"))
    assert ours == theirs | {"knobs": {"weight": 2.0}, "started": ours["started"]}  # the command has knobs as text
    written = Path("ours/results.jsonl").read_bytes()
    assert fb.resume("ours").cells == result.cells and fb.resume("theirs").best == result.best
    assert Path("ours/results.jsonl").read_bytes() == written
    assert fb.write_report("ours").exists()
    (tmp_path / "mine.py").write_text(MINE.replace("weight * x**2", "weight * x**4"))
    for said in (run("sweep", tmp_path / "mine.py", "simfbo", *options, "--out", "theirs")[2], refused("ours")):
        assert "mine.py has changed since the run began" in said


def refused(folder):
    with pytest.raises(fb.InputError) as error:
        fb.resume(folder)
    return str(error.value)


def test_ctrl_c_keeps_the_runs_that_are_done_and_resume_makes_the_others(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    together, swept = folder_module.run_together, tmp_path / "swept"

    def interrupted(experiments, observe):
        if lines(swept):
            os.kill(os.getpid(), signal.SIGINT)
        return together(experiments, observe)

    monkeypatch.setattr(folder_module, "run_together", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fb.sweep(small, STEPS, {"weight": [1, 2]}, seeds=1, rounds=10, out=swept)
    assert capsys.readouterr().err.endswith(f"stopped; continue with: fedbilevel resume {swept}\n")
    monkeypatch.undo()
    done = lines(swept)
    assert len(done) == 1 and len(fb.resume(swept).cells) == 2 and lines(swept)[:1] == done


def test_x_and_y_keep_their_precision_in_a_sweep():
    start = jnp.ones((), jnp.float32), jnp.zeros((), jnp.bfloat16)
    task = fb.Task.of(f, g, *start, lower=[jnp.arange(3.0), jnp.ones(2)])
    (cell,) = fb.sweep(task, STEPS, {"gamma_x": [0.05]}, seeds=2, rounds=10, every=10).cells
    alone = [fb.solve(task, algorithm=dataclasses.replace(STEPS, gamma_x=0.05), rounds=10, seed=seed) for seed in range(2)]
    assert [outcome.rows[-1]["upper_loss"] for outcome in cell.outcomes] == [s.history[-1]["upper_loss"] for s in alone]


def test_a_problem_that_no_file_describes_is_swept_and_not_continued(tmp_path):
    grid = {"gamma_x": [0.05, 1e9]}
    result = fb.sweep(problem(), STEPS, grid, seeds=1, rounds=10, out=tmp_path / "swept")
    assert result.cells[1].diverged and result.best == {"gamma_x": 0.05}
    assert "its task was made in Python, and no file describes it" in refused(tmp_path / "swept")
    with pytest.raises(fb.InputError, match="no file describes what this one runs: choose another folder"):
        fb.sweep(problem(), STEPS, grid, seeds=1, rounds=10, out=tmp_path / "swept")
    hopeless = dataclasses.replace(result, cells=result.cells[1:])
    assert hopeless.best == {} and "a run of every cell diverged" in repr(hopeless)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(grid=["gamma_x"]), "grid must be a dictionary of values to try by name; given: ['gamma_x']"),
        (dict(grid={"gamma_x": "1,2"}), "grid: gamma_x must be a list of values to try; given: '1,2'"),
        (dict(grid={"gama_x": [1]}), "simfbo has no hyperparameter 'gama_x'; did you mean gamma_x"),
        (dict(task=3), "task must be a name, a Task, or what @fedbilevel.task declares; given: 3"),
        (dict(task="quadratik"), "there is no task 'quadratik'; did you mean quadratic"),
        (dict(task=problem, knobs={"weight": 1}), "a Task has its own knobs: leave it out"),
        (dict(algorithm=None), "algorithm must be"),
        (dict(seeds=True), "seeds must be a whole number of at least 1; given: True"),
        (dict(rounds=None), "give either a budget of rounds or a number of steps"),
        (dict(data="nowhere"), "the data folder nowhere does not exist"),
        (dict(by="acuracy"), "there is no metric 'acuracy' to rank by"),
    ],
)
def test_what_cannot_be_swept_is_one_line(change, said):
    given = dict(task="quadratic", algorithm="simfbo", grid={"gamma_x": [0.1]}, rounds=5) | change
    if given["task"] is problem:
        given["task"] = problem()
    with pytest.raises(fb.InputError) as refused:
        fb.sweep(**given)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_resume_says_that_a_run_has_diverged_and_that_there_is_none(tmp_path):
    with pytest.raises(fb.Diverged, match="SimFBO diverged at round"):
        fb.solve(problem(), algorithm=fb.SimFBO(gamma_y=1e9, eta_y=1e9), rounds=10, out=tmp_path / "a")
    with pytest.raises(fb.Diverged, match="SimFBO diverged at round"):
        fb.resume(tmp_path / "a")
    assert "nothing holds no run" in refused("nothing")


DATA = """
import jax.numpy as jnp
import numpy as np
import fedbilevel as fb

def losses(lower):
    f = lambda x, y, rows: jnp.mean((y - rows) ** 2) + x**2
    g = lambda x, y, rows: jnp.mean((y - x - rows) ** 2)
    return fb.Task.of(f, g, jnp.ones(()), jnp.zeros(()), lower=lower)

@fb.task
def by_client(data: fb.ClientData = fb.ClientData("rows")) -> fb.Task:
    return losses(data.each("*.npy", np.load, row=0.0))

@fb.task
def by_path(data: str = "rows") -> fb.Task:
    return losses([np.load(f"{data}/{m}.npy") for m in range(2)])
"""


@pytest.mark.parametrize(("name", "given"), [("by_client", ""), ("by_client", "rows"), ("by_path", ""), ("by_path", "rows")])
def test_the_data_folder_is_known_in_full(name, given, place):
    assert getattr(place, name)().build(given).declared.data == str(Path("rows").resolve())


def test_a_run_and_a_sweep_go_on_from_another_folder_to_the_same_bits(place, tmp_path, monkeypatch, capsys):
    task = place.by_client().build()
    whole = fb.solve(task, algorithm=STEPS, rounds=40)
    with pytest.raises(KeyboardInterrupt):
        fb.solve(task, algorithm=STEPS, rounds=40, out="run", observe=stopping_at(8))
    fb.sweep(task, STEPS, {"gamma_x": [0.1]}, seeds=1, rounds=5, out="swept")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = fb.resume(tmp_path / "run")
    assert "simfbo: round 40 of 40" in capsys.readouterr().err
    assert without_time(resumed.history) == without_time(whole.history)
    np.testing.assert_array_equal(resumed.x, whole.x)
    (tmp_path / "swept/results.jsonl").unlink()
    assert len(fb.resume(tmp_path / "swept").cells) == 1


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with rows, and the module of a file there."""
    (tmp_path / "rows").mkdir()
    for m in range(2):
        np.save(tmp_path / f"rows/{m}.npy", np.arange(2.0) + m)
    (tmp_path / "own_data.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    with imported(tmp_path / "own_data.py") as module:
        yield module


def test_a_file_that_was_edited_after_its_import_is_neither_recorded_nor_allowed(small, tmp_path):  # noqa: F811
    """What would be recorded has not been executed, and what has been executed is gone."""
    file, edited = tmp_path / "mine.py", MINE + "# edited\n"
    file.write_text(edited)
    said = pytest.raises(fb.InputError, match=r"mine\.py has changed since Python imported it: start Python again, or restore")
    with said:
        fb.solve(small().build(), algorithm=STEPS, rounds=10, out=tmp_path / "run")
    with said:
        fb.sweep(small, STEPS, {"weight": [1.0]}, rounds=10, seeds=1, out=tmp_path / "sweep")
    assert not own_code.is_allowed(file, own_code.sha256_of(edited.encode()))
    assert not (tmp_path / "run").exists() and not (tmp_path / "sweep").exists()
    file.write_text(MINE)
    fb.solve(small().build(), algorithm=STEPS, rounds=10, out=tmp_path / "run")
    stored = json.loads((tmp_path / "run/config.json").read_text())["code"]
    assert stored == {str(file): [own_code.sha256_of(MINE.encode())]}
