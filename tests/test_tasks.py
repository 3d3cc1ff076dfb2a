"""The tasks: their metrics against scikit-learn, their data, and progress by every algorithm that fits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.configuration import Configuration
from fedbilevel.data import datasets
from fedbilevel.tasks.data_cleaning import CLASSES, DataCleaning, roc_auc


def test_roc_auc_is_scikit_learns_with_ties_too():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        scores, positive = np.round(rng.standard_normal(60), 1), rng.random(60) < 0.3
        np.testing.assert_allclose(roc_auc(jnp.asarray(scores), jnp.asarray(positive)), roc_auc_score(positive, scores))
    assert roc_auc(jnp.ones(3), jnp.ones(3, bool)) == 0.5


def test_data_cleaning_is_laid_out_as_described():
    population = DataCleaning().build().population
    assert population.size == 10
    for m in range(10):
        whole = population.client(m, jax.random.key(0)).whole()
        assert set(np.asarray(whole.upper.labels)) == {m}  # clean data of one class
        np.testing.assert_array_equal(whole.lower.place, 110 * m + np.arange(110))  # every sample has its own weight
    source = datasets.load("digits")
    true = {image.tobytes(): label for image, label in zip(source.images, source.labels, strict=True)}
    given, images = np.asarray(population.lower.rows.labels), np.asarray(population.lower.rows.images)
    wrong = np.mean([true[image.tobytes()] != label for image, label in zip(images, given, strict=True)])
    assert abs(wrong - 0.4 * (1 - 1 / CLASSES)) < 0.05
    held_out = {image.tobytes() for image in source.test_images}
    assert not held_out & {image.tobytes() for image in images}
    assert images.dtype == np.uint8


GLOBAL = [name for name, entry in ALGORITHMS.items() if entry.load().lower_level == "global" and name != "fedavg"]


@pytest.mark.parametrize(
    "name",
    [name if name == "mefbo" else pytest.param(name, marks=pytest.mark.slow) for name in GLOBAL],
)
def test_every_algorithm_makes_progress_on_digits_without_tuning(name):
    configuration = Configuration.resolve("data-cleaning", {}, name, {}, rounds=300, every=300)
    first, *_, last = configuration.experiment().run()
    assert last.metrics["upper_loss"] < 0.6 * first.metrics["upper_loss"]
    assert last.metrics["test_accuracy"] > 0.6 and last.metrics["roc_auc"] > 0.52
