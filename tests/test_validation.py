"""Validation rows: what they are, what is computed on them, and that sweeps are ranked by them and never by test data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.errors import InputError
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps.ranking import criterion_of
from fedbilevel.tasks.validation import criterion, with_validation

SIZES = (12, 30, 3, 25)  # the third client has too few rows to give any


def f(x, y, rows):
    return jnp.mean((y - rows) ** 2) + x**2


def g(x, y, rows):
    return jnp.mean((y - x - rows) ** 2)


def far(x, y, rows):
    return jnp.mean(jnp.abs(rows - y) > 1)


def rows(seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size) for size in SIZES]


def own(**given):
    values = dict(lower=rows(0), upper=rows(1), row_metrics={"far": far}) | given
    return fb.Task.of(f, g, jnp.asarray(0.3), jnp.zeros(()), **values)


def parts(shards):
    starts, sizes = np.asarray(shards.start), np.asarray(shards.size)
    return [np.asarray(shards.rows)[s : s + n] for s, n in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("lower_level", ["global", "local"])
def test_one_row_in_five_is_held_out_and_the_metric_is_its_mean(lower_level):
    split = with_validation(own(lower_level=lower_level), "far", {})
    kept, held = parts(split.population.upper), parts(split.validation.rows)
    assert split.validation.owners.tolist() == [0, 1, 3] and [len(part) for part in held] == [2, 6, 5]
    by_client = dict(zip([0, 1, 3], held, strict=True))
    for m, before in enumerate(rows(1)):
        np.testing.assert_array_equal(np.sort([*kept[m], *by_client.get(m, [])]), np.sort(before))
    np.testing.assert_array_equal(np.concatenate(parts(split.population.lower)), np.concatenate(rows(0)))
    y = np.asarray([0.1, -0.4, 2.0, 0.7]) if lower_level == "local" else np.full(4, 0.2)
    found = split.evaluate(jnp.asarray([0.3]), jnp.asarray(y[:, None] if lower_level == "local" else y[:1]))
    misses = np.concatenate([np.abs(by_client[m] - y[m]) > 1 for m in by_client])
    np.testing.assert_allclose(found["validation_far"], misses.mean(), rtol=1e-6)
    upper = np.mean([np.mean((y[m] - kept[m]) ** 2) + 0.09 for m in range(4)])
    np.testing.assert_allclose(found["upper_loss"], upper, rtol=1e-6)


def test_rows_that_both_losses_have_are_held_out_of_both():
    split = with_validation(own(upper=None), "upper_loss", {})
    for ours, theirs in zip(*map(parts, (split.population.upper, split.population.lower)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert split.validation.name == "validation_loss" and sum(split.population.lower.size) == sum(SIZES) - 13


@pytest.mark.parametrize(
    ("task", "headline", "metric", "said"),
    [
        (own, "upper_loss", "validation_loss", "on one in 5 of each client's upper rows"),
        (lambda: own(metrics=lambda x, y: {"error": x}), "error", "validation_loss", "on one in 5"),
        (lambda: own(metrics=lambda x, y: {"validation_far": x}), "far", "validation_validation_far", "on one in 5"),
        (lambda: own(upper=[np.zeros(4)] * 4), "far", "upper_loss", "too few upper rows to hold any out"),
    ],
)
def test_what_a_users_task_is_ranked_by(task, headline, metric, said):
    how = criterion(task(), headline, {})
    assert how.metric == metric and said in how.why and not how.higher


@pytest.mark.parametrize(
    ("task", "metric", "higher"),
    [
        ("hyper-representation", "validation_accuracy", True),
        ("regularisation", "validation_loss", False),
        ("loss-tuning", "validation_loss", False),  # the balanced accuracy is no mean over rows
        ("quadratic", "upper_loss", False),
    ],
)
def test_what_bundled_tasks_are_ranked_by(task, metric, higher):
    described = Configuration.resolve(task, {"clients": 3}, "simfbo", {}, RunOptions(rounds=5))
    how = criterion_of(described)
    assert (how.metric, how.higher) == (metric, higher)
    assert criterion_of(described, "lower_loss").metric == "lower_loss"
    with pytest.raises(InputError, match="no metric 'test_accuraci' to rank by"):
        criterion_of(described, "test_accuraci")


def test_a_sweep_is_ranked_by_validation_rows_unless_another_metric_is_named():
    grid = {"eta_x+gamma_x": [0.01, 0.1]}
    swept = fb.sweep(own(), "simfbo", grid, seeds=1, rounds=10, every=10)
    assert swept.metric == "validation_loss" and swept.swept.options.validation
    named = fb.sweep(own(), "simfbo", grid, seeds=1, rounds=10, every=10, by="upper_loss")
    alone = fb.solve(own(), algorithm=fb.SimFBO(eta_x=0.01, gamma_x=0.01), rounds=10)
    (cell,) = [cell for cell in named.cells if cell.values == {"eta_x+gamma_x": 0.01}]
    np.testing.assert_allclose(cell.mean("upper_loss"), alone.history[-1]["upper_loss"], rtol=1e-6)
    assert not named.swept.options.validation and "validation_loss" not in cell.outcomes[0].rows[-1]


def test_validation_rows_leave_the_other_rows_in_their_places():
    task = own()
    split = with_validation(task, "far", {})
    for before, after in zip(*map(parts, (task.population.upper, split.population.upper)), strict=True):
        assert np.isin(before, after).sum() == len(after)
        np.testing.assert_array_equal(before[np.isin(before, after)], after)
    assert jax.tree.structure(split.population.upper.rows) == jax.tree.structure(task.population.upper.rows)
