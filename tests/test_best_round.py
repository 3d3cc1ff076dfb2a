"""`keep_best`: a run that ends with the recorded round that is best on held-out rows."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from killing import kill_after_rows
from test_reproductions import table_plan

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.core.aggregation import Mean
from fedbilevel.registry import chosen
from fedbilevel.report.curves import curves
from fedbilevel.report.table import compared
from fedbilevel.runs.best_round import keeps_best
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.stopping import Interrupted, StopRequest
from fedbilevel.tasks import TASKS

# y goes from 0 to 1, and the headline is best half way
HALFWAY = """
import jax.numpy as jnp
import numpy as np
import fedbilevel as fb

@fb.task(headline="{headline}", better={{"test_closeness": "higher"}})
def halfway() -> fb.Task:
    def f(x, y, rows):
        return jnp.mean((y["a"] - rows) ** 2)

    def g(x, y, rows):
        return jnp.mean((y["a"] - x) ** 2 + 0 * rows)

    def distance(x, y, rows):
        return jnp.mean((y["a"] - rows / 2) ** 2)

    def closeness(x, y, rows):
        return -distance(x, y, rows)

    return fb.Task.of(
        f, g, jnp.zeros(()), {{"a": jnp.zeros(())}}, lower=[np.ones(20)] * 3, test=[np.ones(20)] * 3,
        row_metrics=dict(distance=distance, closeness=closeness),
    )
"""
SLOWLY = {"eta_x": 0.05, "gamma_x": 0.05, "eta_y": 0.3, "gamma_y": 0.3, "eta_u": 0.3, "gamma_u": 0.3}


@pytest.fixture(params=["distance", "test_closeness"])
def file(tmp_path, request):
    path = tmp_path / "halfway.py"
    path.write_text(HALFWAY.format(headline=request.param))
    return path


def described(file, **options):
    values = dict(rounds=60, every=5) | options
    return Configuration.resolve(chosen(TASKS, f"{file}:halfway"), {}, "simfbo", SLOWLY, RunOptions(**values))


def created(path, configuration):
    (folder,) = RunFolder.create({path: configuration})
    return folder


def executed(path, configuration):
    folder = created(path, configuration)
    folder.execute(StopRequest(), lambda moment: None)
    return folder


def stopped(folder, at):
    """The run, stopped by a signal at this step."""
    stop = StopRequest()

    def observe(moment):
        stop.signum = 2 if moment.step >= at else None

    with pytest.raises(Interrupted):
        folder.execute(stop, observe)


def killed(folder, at):
    """The run, ended at this step without a word, and without a checkpoint since it began."""

    def observe(moment):
        if moment.step >= at:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        folder.execute(StopRequest(), observe, checkpoint_seconds=1e9)


def without_seconds(values):
    return {name: value for name, value in values.items() if name != "seconds"}


def assert_same_end(ours, theirs):
    np.testing.assert_array_equal(ours.x(), theirs.x())
    jax.tree.map(np.testing.assert_array_equal, ours.point(), theirs.point())
    assert ours.best_round() == theirs.best_round() and without_seconds(ours.result) == without_seconds(theirs.result)
    assert list(map(without_seconds, ours.rows())) == list(map(without_seconds, theirs.rows()))


def test_the_end_is_the_best_recorded_round_to_the_bit(file, tmp_path):
    best = executed(tmp_path / "best", described(file, keep_best=True))
    rows, result = best.rows(), json.loads((best.path / "result.json").read_text())
    (metric,) = {"validation_distance", "validation_closeness"} & rows[0].keys()
    averages = [np.mean([row[metric] for row in rows[max(0, k - 2) : k + 1]]) for k in range(len(rows))]
    expected = rows[np.argmin(averages) if metric == "validation_distance" else np.argmax(averages)]["rounds"]
    assert 0 < expected < 60 == rows[-1]["rounds"] == result["rounds"] and result["best_round"] == expected
    until = executed(tmp_path / "until", described(file, validation=True, rounds=expected))
    np.testing.assert_array_equal(best.x(), until.x())
    jax.tree.map(np.testing.assert_array_equal, best.point(), until.point())
    assert {name: result[name] for name in (metric, "upper_loss", "u_norm")} == {
        name: until.rows()[-1][name] for name in (metric, "upper_loss", "u_norm")
    }
    whole = executed(tmp_path / "whole", described(file, validation=True))
    assert list(map(without_seconds, rows)) == list(map(without_seconds, whole.rows())) and whole.best_round() is None
    (line,), (curve,) = compared(shown := curves([best])).lines, shown
    assert {f"{result[metric]:.4g}", "60"} <= {cell.text for cell in line.cells}  # the best round's metrics, and all it took
    assert curve.better[metric] == ("lower" if metric == "validation_distance" else "higher")
    assert f"are those of round {expected}, the best on held-out rows" in " ".join(result["caveats"])


def test_a_run_that_is_stopped_and_killed_ends_with_the_same_best_round(file, tmp_path):
    whole = executed(tmp_path / "whole", described(file, keep_best=True))
    best = whole.best_round()
    assert best > 6
    for name, breaks in (
        ("before", [(stopped, 5), (killed, best + 6)]),  # the best round is newer than the checkpoint
        ("after", [(killed, 3), (stopped, best + 6), (killed, best + 12)]),
    ):
        broken = created(tmp_path / name, described(file, keep_best=True))
        for how, at in breaks:
            how(broken, at)
        if name == "after":
            assert broken.best_round() == best and broken.result is None
            np.testing.assert_array_equal(broken.x(), whole.x())
        RunFolder(broken.path).execute(StopRequest(), lambda moment: None)
        assert_same_end(broken, whole)


@pytest.mark.slow
def test_a_run_killed_by_the_system_is_resumed_to_the_same_best_round(tmp_path):
    command, environment = [sys.executable, "-m", "fedbilevel"], {**os.environ, "PYTHONPATH": os.getcwd()}
    words = [*command, "run", "data-cleaning", "fedpace", "--rounds", "400", "--every", "20", "--keep-best", "--out"]
    assert subprocess.run([*words, tmp_path / "whole"], env=environment, capture_output=True).returncode == 0
    kill_after_rows([*words, tmp_path / "killed"], tmp_path / "killed/fedpace/metrics.jsonl", env=environment)
    assert subprocess.run([*command, "resume", tmp_path / "killed"], env=environment, capture_output=True).returncode == 0
    whole = RunFolder(tmp_path / "whole/fedpace")
    assert_same_end(RunFolder(tmp_path / "killed/fedpace"), whole)
    said = subprocess.run([*command, "compare", whole.path, "--json"], env=environment, capture_output=True, text=True).stdout
    (one,) = json.loads(said)["runs"]
    assert (one["best"]["rounds"], one["last"]["rounds"]) == (whole.best_round(), 400)


def f(x, y, rows):
    return jnp.mean((y - rows) ** 2) + x**2


def g(x, y, rows):
    return jnp.mean((y - x - rows) ** 2)


def solved(**given):
    rows = [np.random.default_rng(m).standard_normal(20) for m in range(3)]
    return fb.solve(f, g, jnp.ones(()), jnp.zeros(()), lower=rows, every=2, **{"algorithm": "simfbo", "rounds": 40} | given)


def test_solve_ends_with_the_best_round_with_and_without_a_folder(tmp_path):
    best = solved(keep_best=True, algorithm="fedbio-local")  # each client has its own y
    values = [row["validation_loss"] for row in best.history]
    averages = [np.mean(values[max(0, k - 2) : k + 1]) for k in range(len(values))]
    assert best.history[-1]["rounds"] >= 40 and best.best_round == best.history[np.argmin(averages)]["rounds"]
    recorded = solved(keep_best=True, algorithm="fedbio-local", out=tmp_path / "run")
    best.save(tmp_path / "best.npz")
    for again in (recorded, fb.load(tmp_path / "run"), fb.load(tmp_path / "best.npz")):
        jax.tree.map(np.testing.assert_array_equal, (again.x, again.y), (best.x, best.y))
        assert again.best_round == best.best_round
    assert f"after {best.best_round} rounds, the best on held-out rows: upper_loss" in repr(best)
    assert best.metrics["rounds"] == best.best_round


def weighted_rows(see_x=0.0, clean=60, **given):
    """Logistic regression with a weight for each of 120 training rows, half of them mislabelled, and clean rows for f."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((120 + clean, 5))
    labels = np.sign(features[:, 0])

    def f(x, y, rows):
        return jnp.mean(jax.nn.softplus(-rows["label"] * (rows["features"] @ y))) + see_x * jnp.mean(x**2)

    def g(x, y, rows):
        losses = jax.nn.softplus(-rows["label"] * (rows["features"] @ y))
        return jnp.mean(jax.nn.sigmoid(x[rows["place"]]) * losses) + 1e-3 * jnp.sum(y**2)

    noisy = np.where(rng.random(120 + clean) < 0.5, -labels, labels)
    lower = [dict(features=features[p], label=noisy[p], place=p) for p in np.split(np.arange(120), 3)]
    upper = [dict(features=features[p], label=labels[p]) for p in np.split(np.arange(120, 120 + clean), 3)]
    return fb.solve(f, g, jnp.zeros(120), jnp.zeros(5), lower=lower, upper=upper, **{"rounds": 20} | given)


def test_many_hyperparameters_for_the_rows_of_f_keep_the_best_round_where_no_algorithm_is_named():
    assert weighted_rows().best_round is not None
    assert weighted_rows(clean=5 * 120 - 3).best_round is not None
    for given in (
        dict(clean=5 * 120),
        dict(keep_best=False),
        dict(algorithm="fedpace"),
        dict(see_x=1e-3),  # x is more than hyperparameters
    ):
        assert weighted_rows(**given).best_round is None, given


def test_the_command_says_that_rows_are_held_out_unasked(run, tmp_path):
    words = "run", "data-cleaning", "--rounds", "4", "--every", "1", "--out"
    _, *said = run(*words, tmp_path / "unasked")
    assert "one row in five is held out to choose the round (--no-keep-best)" in " ".join("".join(said).split())
    _, *said = run(*words, tmp_path / "refused", "--no-keep-best")
    assert "held out" not in "".join(said)
    kept = [RunFolder(tmp_path / name / "fedpace").configuration.options.keep_best for name in ("unasked", "refused")]
    assert kept == [True, False]


@pytest.mark.parametrize(
    ("task", "kept"), [("data-cleaning", True), ("hyper-representation", False), ("few-shot", False), ("regularisation", False)]
)
def test_which_tasks_keep_their_best_round_unasked(task, kept):
    configuration = Configuration.resolve(
        task, {}, "fedpace-local" if task == "few-shot" else "fedpace", {}, RunOptions(rounds=3)
    )
    built, judged = configuration.built_task(), configuration.task_class()
    assert keeps_best(built, judged, Mean(), private=False) == kept
    assert not keeps_best(built, judged, Mean(), private=True)
    assert not keeps_best(built, judged, configured("private-mean(epsilon=8)"), private=False)
    assert not keeps_best(built, judged, configured("buffered"), private=False)


def test_a_metric_that_never_changes_keeps_the_earliest_round():
    def flat(x, y, rows):
        return jnp.mean(0 * rows) + 0 * y + 0 * x

    rows = [np.arange(20.0)] * 3
    found = fb.solve(flat, g, jnp.ones(()), jnp.zeros(()), lower=rows, algorithm="simfbo", rounds=10, every=2, keep_best=True)
    assert found.best_round == 0 and (found.x, found.y) == (1, 0)


def own_x():
    return fb.Task.of(f, g, jnp.ones(()), jnp.zeros(()), lower=[np.arange(20.0)] * 3, own_x=True)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: RunOptions(rounds=3, keep_best="yes"), "keep_best must be true or false; given: 'yes'"),
        (lambda: solved(keep_best=True, aggregation="buffered"), "leave it out with buffered"),
        (lambda: solved(keep_best=True, privacy=fb.RowPrivacy(epsilon=8)), "chooses by rows without noise"),
        (lambda: solved(keep_best=True, aggregation="private-mean(epsilon=8)"), "chooses by rows without noise"),
        (lambda: fb.solve(own_x(), rounds=3, keep_best=True), "for an x that all clients share, and here each has its own"),
        (
            lambda: fb.solve(f, g, jnp.ones(()), jnp.zeros(()), lower=[np.ones(4)], rounds=3, keep_best=True),
            "this task can have no validation rows",
        ),
        (lambda: dataclasses.replace(table_plan(), run=dict(keep_best=True)), "run: keep_best is for one run"),
        (
            lambda: Configuration("data-cleaning", {}, "fedpace", {}, RunOptions(rounds=3, keep_best=True), federation="study"),
            "keep_best needs rows that only simulated clients hold out: leave it out with a federation",
        ),
    ],
)
def test_what_cannot_keep_its_best_round_is_refused_in_one_line(attempt, message):
    with pytest.raises(fb.InputError, match=message) as caught:
        attempt()
    assert "\n" not in str(caught.value)


def test_only_runs_that_keep_their_best_round_say_so_in_their_configuration():
    def plain(**options):
        return Configuration.resolve("data-cleaning", {}, "fedpace", {}, RunOptions(rounds=3, **options)).plain()

    assert "keep_best" not in plain() and not Configuration.read(plain()).options.keep_best
    assert plain(keep_best=True)["keep_best"] and Configuration.read(plain(keep_best=True)).options.validation
