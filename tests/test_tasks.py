"""The tasks: their metrics against scikit-learn, their data, and progress by every algorithm that fits."""

import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.configuration import Configuration
from fedbilevel.data import datasets
from fedbilevel.errors import InputError
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


def test_mnist_like_files_are_read_and_checked(tmp_path):
    def idx(array):
        header = b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
        return header + array.astype(np.uint8).tobytes()

    folder = tmp_path / "mnist"
    folder.mkdir()
    for split, n in (("train", 60_000), ("t10k", 10_000)):
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(np.arange(n) % 10))
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros((n, 28, 28))), 1))
    loaded = datasets.load("mnist", tmp_path)
    assert loaded.images.shape == (60_000, 28, 28) and loaded.test_labels[13] == 3
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(np.arange(100)))
    with pytest.raises(InputError, match="t10k-labels-idx1-ubyte is not an IDX file of 10000"):
        datasets.load("mnist", tmp_path)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"not IDX")
    with pytest.raises(InputError, match="is not an IDX file"):
        datasets.load("mnist", tmp_path)


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
