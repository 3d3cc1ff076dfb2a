"""A run says what looks wrong about it, and says nothing where nothing does."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.report.page_data import contents
from fedbilevel.runs.advice import advice_on_data, advice_on_run, is_tuned, loss_risen, unscaled, x_unmoved
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.tasks.base import Task

X, LOSS, U, LOWER, ROWS, PAST, Y_SEES_F = (
    "x hardly moved",
    "The upper loss ends above its start",
    "u ends at its bound, radius = ",
    "The lower level is not followed",
    "Standardise its columns",
    "test_accuracy was better earlier in the run",
    "y also descends f",
)


def lines(task, algorithm, values, rounds=200, keep_best=False, **knobs):
    options = RunOptions(rounds=rounds, keep_best=keep_best)
    configuration = Configuration.resolve(task, knobs, algorithm, values, options)
    experiment = configuration.experiment()
    moments = list(experiment.run())
    rows = [moment.row() for moment in moments if moment.metrics is not None]
    return [*advice_on_run(experiment, rows, moments[-1].state, configuration.task_class()), *advice_on_data(experiment)]


@pytest.mark.parametrize(
    ("task", "algorithm", "values", "said"),
    [
        ("regularisation", "simfbo", dict(eta_x=0.02, gamma_x=0.02), [X]),  # SimFBO's own defaults, and a start away from 0
        ("data-cleaning", "simfbo", dict(eta_x=0.02, gamma_x=0.02), [X]),  # and one at 0
        ("regularisation", "simfbo", dict(gamma_x=1e-30), [X]),
        ("data-cleaning", "simfbo", dict(gamma_y=1e-7, eta_y=1e-7), [U, LOWER]),
        ("regularisation", "simfbo", dict(radius=0.1), [U]),
    ],
)
def test_what_looks_wrong_is_said(task, algorithm, values, said):
    found = lines(task, algorithm, values)
    assert len(found) == len(said) and all(start in line for start, line in zip(said, found, strict=True)), found


@pytest.mark.parametrize("algorithm", ["fedpace", "simfbo", "mefbo", "fedavg"])
@pytest.mark.parametrize("task", ["regularisation", "quadratic", "valley", "data-cleaning"])
def test_suited_settings_give_no_warning(task, algorithm):
    assert lines(task, algorithm, {}) == []


def test_a_local_lower_level_with_suited_settings_gives_no_warning():
    assert lines("quadratic", "fedbio-local", {}, lower_level="local") == []


def test_an_x_that_is_fitted_to_few_rows_is_said_unless_a_best_round_is_kept():
    (line,) = lines("data-cleaning", "fedpace", {}, 600, rho=0.8)
    assert line.startswith(PAST)
    assert lines("data-cleaning", "fedpace", {}, 600, keep_best=True, rho=0.8) == []


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedbioacc", "fedavg"])
def test_the_demo_gives_no_warning(algorithm):
    assert lines("data-cleaning", algorithm, {}, 1000) == []


@pytest.mark.parametrize("algorithm", ["fedpace", "s-tfbo", "simfbo", "fedbioacc"])
def test_steps_are_to_be_changed_only_where_they_can_be(algorithm):
    tuned = is_tuned(ALGORITHMS.get(algorithm).load()())
    rows = [dict(upper_loss=loss, lower_loss=0.0, hypergradient_norm=1e-9) for loss in (1.0, 2.0)]
    lines = [loss_risen(rows, tuned), x_unmoved(rows, np.ones(2), np.ones(2), tuned)]
    assert tuned == (algorithm in ("simfbo", "fedbioacc"))
    assert all(("the step on x" in line) == tuned for line in lines), lines


def test_a_few_steps_say_nothing():
    assert lines("regularisation", "simfbo", dict(gamma_x=1e-30), rounds=10) == []


# --- solve -----------------------------------------------------------------------------------------------------------------


def f(x, y, rows):
    return jnp.mean(jax.nn.softplus((1 - 2 * rows["label"]) * (rows["features"] @ y)))


def g(x, y, rows):
    return f(x, y, rows) + jnp.sum(jnp.exp(x) * y**2)


def hospitals(scaled):
    features, labels = load_breast_cancer(return_X_y=True)
    if scaled:
        features = (features - features.mean(0)) / features.std(0)
    parts = np.split(np.arange(len(labels)), [60, 180, 260, 420])
    return [{"features": features[part], "label": labels[part]} for part in parts]


def solve(scaled=True, **options):
    return fb.solve(f, g, jnp.zeros(30), jnp.zeros(30), lower=hospitals(scaled), **options)


def test_solve_warns_at_the_line_that_called_it_and_once_for_a_loop():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for step in (1e-6, 1e-5, 1e-4):
            solve(algorithm=fb.SimFBO(gamma_x=step), rounds=50)
    (warning,) = caught
    assert X in str(warning.message) and warning.filename == __file__


def test_raw_columns_are_named():
    with pytest.warns(UserWarning, match=r"The rows' lower\['features'\] has columns of 10³ or more") as caught:
        solve(scaled=False, algorithm=fb.SimFBO(), rounds=10)
    assert len(caught) == 1


def test_a_loss_that_ends_above_its_start():
    """x is pushed up by f, and y cannot follow a step on x that is far too large."""
    with pytest.warns(UserWarning) as caught:
        fb.solve(
            lambda x, y, rows: jnp.mean((y - 1) ** 2) - 0.01 * jnp.sum(x),
            lambda x, y, rows: jnp.mean(rows) * jnp.mean((y - x) ** 2),
            jnp.zeros(2),
            jnp.zeros(2),
            lower=[np.ones(3)] * 2,
            algorithm=fb.SimFBO(gamma_x=0.5, gamma_y=0.5, gamma_u=1e-9),
            rounds=2000,
        )
    assert any(LOSS in str(warning.message) for warning in caught)


# --- rows ------------------------------------------------------------------------------------------------------------------


def found_in(rows):
    return unscaled(Task.of(f, g, jnp.zeros(1), jnp.zeros(1), lower=[rows]).population)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.random.default_rng(0).normal(2000, 1, (50, 3)), "has columns of 10³ or more"),
        (np.random.default_rng(0).normal(0, [1, 1e-4], (50, 2)), "has columns whose deviations differ by 10³ or more"),
    ],
)
def test_rows_that_are_not_scaled(values, said):
    assert found_in({"a": values}) == [
        f"The rows' lower['a'] {said}. Standardise its columns: subtract means, divide by deviations."
    ]


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=(50, 3)),
        np.concatenate([np.zeros((4000, 2)), [[1.0, 4 / 255]]]),  # pixels that are hardly ever lit
        np.stack([np.ones(50), np.linspace(-1, 1, 50)], 1),  # a column of ones
        np.full((5, 2), 3000),  # whole numbers may be labels
        np.linspace(0, 1e4, 50),  # not a table
    ],
)
def test_rows_that_may_stay_as_they_are(values):
    assert found_in({"a": values}) == []


# --- where it is shown -------------------------------------------------------------------------------------------------------


def test_run_prints_the_lines_and_the_page_has_them(run, tmp_path):
    code, out, err = run("run", "regularisation", "simfbo", "fedavg", "--set", "radius=0.1", "--rounds", "60", "--out", "here")
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert line.startswith(f"warning: simfbo: {U}")
    stored = json.loads((tmp_path / "here/simfbo/result.json").read_text())["warnings"]
    assert line == f"warning: simfbo: {stored[0]}"
    shown = {run["label"]: run["warnings"] for run in contents(RunFolder.find(tmp_path / "here"))["runs"]}
    assert sorted(shown.values()) == [[], stored]


@pytest.mark.parametrize("algorithm", [fb.FedPace(), fb.MeFBO(penalty=1.0, proximal=50.0)])
@pytest.mark.parametrize("random_labels", [False, True])
def test_a_y_that_is_good_only_since_it_descends_f_is_said(algorithm, random_labels):
    draw = np.random.default_rng(0)
    features = draw.normal(size=(3, 80, 5))
    rows = [{"features": a, "label": (a.sum(1) > 0).astype(float)} for a in features]
    lower, upper = ([{name: a[k::2] for name, a in r.items()} for r in rows] for k in (0, 1))
    if random_labels:
        lower = [{**r, "label": draw.permutation(r["label"])} for r in lower]

    def f(x, y, rows):
        score = jnp.tanh(rows["features"] @ y["hidden"]) @ y["out"]
        return jnp.mean(jax.nn.softplus((1 - 2 * rows["label"]) * score))

    def g(x, y, rows):
        return f(x, y, rows) + jnp.exp(x) * (jnp.sum(y["hidden"] ** 2) + jnp.sum(y["out"] ** 2))

    y = {"hidden": draw.normal(0, 0.5, (5, 8)), "out": draw.normal(0, 0.5, 8)}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fb.solve(f, g, np.array(-5.0), y, lower=lower, upper=upper, algorithm=algorithm, rounds=100, batch_size=8)
    assert any(str(w.message).startswith(Y_SEES_F) for w in warned) == random_labels, [str(w.message) for w in warned]
