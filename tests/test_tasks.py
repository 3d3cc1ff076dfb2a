"""The tasks: laid out as the papers say, their losses and metrics against scikit-learn, and progress by every algorithm."""

import gzip
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import SHARED_X
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core import ground_truth
from fedbilevel.core.mean_check import check_means
from fedbilevel.core.problem import LOSSES
from fedbilevel.errors import InputError
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.simulation import simulation
from fedbilevel.settings import settings
from fedbilevel.tasks import TASKS, few_shot
from fedbilevel.tasks.data import datasets
from fedbilevel.tasks.data_cleaning import DataCleaning, roc_auc
from fedbilevel.tasks.few_shot import FewShot, trained_classifier
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.loss_tuning import LossTuning, VectorScaling
from fedbilevel.tasks.regularisation import Regularisation

SMALL = ("data-cleaning", "hyper-representation", "few-shot", "loss-tuning", "regularisation")
MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # its images of each digit


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """A folder with MNIST's files, its labels' numbers and black images."""
    folder = tmp_path_factory.mktemp("data") / "mnist"
    folder.mkdir()
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), MNIST))
    for split, digits in (("train", labels), ("t10k", np.arange(10_000) % 10)):
        for kind, array in (("labels-idx1", digits), ("images-idx3", np.zeros((len(digits), 28, 28)))):
            header = b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            data = gzip.compress(header + array.astype(np.uint8).tobytes(), 1)
            (folder / f"{split}-{kind}-ubyte.gz").write_bytes(data)
    return str(folder.parent)


def built(name, data="", **knobs):
    return TASKS[name].configure(name, knobs).build(data)


def sizes(task):
    """How many training and validation samples clients have."""
    return set(np.asarray(task.population.lower.size)), set(np.asarray(task.population.upper.size))


GENERATED = {"quadratic": dict(noise=0.3), "valley": dict(noise=0.3)}
LIGHT = {"few-shot": dict(tasks=3, filters=4)}


@pytest.mark.parametrize("name", [*SMALL, *GENERATED])
def test_losses_are_means_over_rows(name):
    """What a client of unequal size and minibatches both rely on."""
    task = built(name, **(GENERATED | LIGHT).get(name, {}))
    check_means(replace(task.population, batch_size=1), task.x, task.y)


@pytest.mark.parametrize("name", [*SMALL, *GENERATED])
def test_no_knob_is_large_enough_to_hang_or_to_exhaust_memory(name):
    for knob, setting in settings(TASKS[name].load()).items():
        if setting.kind is int and knob not in ("data_seed", "most"):  # a seed, and what may be more than there are
            with pytest.raises(InputError) as caught:
                built(name, **GENERATED.get(name, {}), **{knob: 2_000_000_000})
            assert "2000000000" in str(caught.value) or re.search(r"about [\d,]{5,}\.\d GB of memory", str(caught.value)), knob


# --- data cleaning ---


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
    assert abs(wrong - 0.4 * (1 - 1 / 10)) < 0.05
    clean = {image.tobytes() for image in np.asarray(population.upper.rows.images)}
    held_out = {image.tobytes() for image in source.test_images}
    assert not held_out & {image.tobytes() for image in images} and not clean & {image.tobytes() for image in images}
    assert images.dtype == np.uint8


def test_data_cleaning_of_the_first_paper_has_its_sizes(mnist):
    task = built("data-cleaning-mnist", mnist, rho=0.8)
    assert task.population.size == 10 and sizes(task) == ({4500}, {50})
    assert task.x.shape == (45_000,) and set(np.asarray(task.x)) == {1.0}
    assert task.y.shape == (784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10,)
    np.testing.assert_array_equal(task.holdings.counts["clean"], 50 * np.eye(10))
    assert task.population.lower.rows.images.dtype == np.uint8


@pytest.mark.parametrize(("partition", "train", "validation"), [("iid", 300, 300), ("shards:2", 480, 120)])
def test_data_cleaning_of_the_fourth_paper_has_its_sizes(mnist, partition, train, validation):
    knobs = dict(partition=partition, train_per_client=train, validation_per_client=validation)
    task = built("data-cleaning-sigmoid", mnist, **knobs)
    assert task.population.size == 100 and sizes(task) == ({train}, {validation})
    assert task.y.shape == (784 * 200 + 200 + 200 * 10 + 10,)
    configuration = Configuration.resolve("data-cleaning-sigmoid", knobs, "mefbo", {}, RunOptions(rounds=10), data=mnist)
    assert configuration.options.clients_per_round == 10 and configuration.hyperparameters["proximal"] == 20
    again = Configuration.resolve(
        "data-cleaning-sigmoid", {}, "mefbo", {}, RunOptions(rounds=10, clients_per_round=7), data=mnist
    )
    assert again.options.clients_per_round == 7
    by_chance = Configuration.resolve(
        "data-cleaning-sigmoid", {}, "mefbo", {}, RunOptions(rounds=10, bernoulli=0.2), data=mnist
    )
    assert by_chance.options.clients_per_round is None


def test_weights_in_a_box_stay_there_and_need_an_algorithm_that_projects():
    knobs = dict(weighting="unit", train_per_client=20, hidden=4)
    settings = dict(eta_x=3000, lambda_x=3000, eta_y=0.1, lambda_y=0.1, eta_theta=0.1, lambda_theta=0.1)
    *_, last = Configuration.resolve("data-cleaning", knobs, "mefbo", settings, RunOptions(rounds=60)).experiment().run()
    x = np.asarray(last.state.x)
    assert x.min() == 0 and x.max() == 1 and np.mean((x > 0) & (x < 1)) > 0
    with pytest.raises(InputError, match="does not keep x and y in given sets"):
        Configuration.resolve("data-cleaning", knobs, "fedbio", {}, RunOptions(rounds=60)).experiment()


def test_too_few_samples_are_said():
    for task in (DataCleaning(train_per_client=2000), DataCleaning(validation_per_client=300)):
        with pytest.raises(InputError, match="data-cleaning: digits has 1397 training samples, too few for 10 clients"):
            task.build()
    with pytest.raises(InputError, match="10 clients get at most 140 samples each, fewer than 900 for training"):
        HyperRepresentation(train_per_client=900).build()


def test_data_cleaning_shows_the_most_and_the_least_trusted_samples():
    task = DataCleaning(weighting="raw", train_per_client=20, hidden=4).build()
    x = np.random.default_rng(0).random(200)
    (section,) = task.shown(x)
    histogram, most, least = section.parts
    source = datasets.load("digits")
    true = {image.tobytes(): str(label) for image, label in zip(source.images, source.labels, strict=True)}
    given = np.asarray(task.population.lower.rows.labels)
    for gallery, order in ((most, np.argsort(-x)), (least, np.argsort(x))):
        for picture, n in zip(gallery.pictures, order, strict=False):
            truth = true[np.asarray(task.population.lower.rows.images[n]).tobytes()]
            assert picture.caption == (str(given[n]) if truth == str(given[n]) else f"{given[n]} ({truth})")
            assert true[picture.image.tobytes()] == truth
    np.testing.assert_array_equal(np.sort(np.concatenate(list(histogram.groups.values()))), np.sort(x))
    assert HyperRepresentation(hidden=4).build().shown(x) == ()


def test_weights_of_rows_that_are_far_from_trusted_are_shown_as_zero():
    task = DataCleaning().build()
    (section,) = task.shown(np.full(task.x.size, -1e3))  # where exp(-x) overflows
    assert not np.concatenate(list(section.parts[0].groups.values())).any()


# --- hyper-representation ---


@pytest.mark.parametrize(("partition", "train", "validation"), [("iid", 300, 300), ("shards:2", 480, 120)])
def test_hyper_representation_has_the_papers_sizes(mnist, partition, train, validation):
    knobs = dict(partition=partition, train_per_client=train, validation_per_client=validation)
    task = built("hyper-representation-mnist", mnist, **knobs)
    assert (task.x.size, task.y.size) == (157_000, 2_010)
    assert task.population.size == 100 and sizes(task) == ({train}, {validation})
    held = task.holdings.counts["training"] + task.holdings.counts["validation"]
    classes = (held > 0).sum(1)
    assert classes.max() <= 4 if partition == "shards:2" else classes.min() == 10
    assert task.strongly_convex and not built("hyper-representation-mnist", mnist, rc=0).strongly_convex


@pytest.mark.parametrize(("digits", "clients"), [(1, 100), (2, 50), (2, 500), (10, 100)])
def test_hyper_representation_by_digits(mnist, digits, clients):
    share = 60_000 // clients // 2
    task = built(
        "hyper-representation-mnist",
        mnist,
        partition=f"classes:{digits}",
        clients=clients,
        train_per_client=share - 20,
        validation_per_client=share - 20,
    )
    held = task.holdings.counts["training"] + task.holdings.counts["validation"]
    assert set((held > 0).sum(1)) == {digits}


def test_hyper_representation_with_a_cnn_leaves_two_layers_to_the_lower_level():
    task = HyperRepresentation(model="cnn").build()
    assert task.y.size == 120 * 84 + 84 + 84 * 10 + 10
    assert task.x.size + task.y.size == 61_706 and not task.strongly_convex


def colours(folder):
    """A folder with a small CIFAR-10."""
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 10
    images = (25 * labels[:, None, None, None] + rng.integers(0, 6, (200, 32, 32, 3))).astype(np.uint8)
    np.savez(
        folder / "cifar10-subset.npz",
        train_images=images,
        train_labels=labels,
        test_images=images[:50],
        test_labels=labels[:50],
    )
    return str(folder)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("hyper-representation", "mlp"),
        pytest.param("data-cleaning", "cnn", marks=pytest.mark.slow),
        pytest.param("hyper-representation", "cnn", marks=pytest.mark.slow),
        pytest.param("data-cleaning", "mlp", marks=pytest.mark.slow),
    ],
)
def test_colour_images_in_both_networks(tmp_path, name, model):
    knobs = dict(
        dataset="cifar-10",
        model=model,
        clients=2,
        train_per_client=40,
        validation_per_client=10,
        scaling="standard",
        hidden=8,
        batch_size=8,
    )
    steps = dict(eta_x=0.02, eta_y=0.01, eta_theta=0.01, lambda_x=0.02, lambda_y=0.01, lambda_theta=0.01, penalty=3)
    if name == "data-cleaning":
        knobs["clean"] = "own"
    configuration = Configuration.resolve(name, knobs, "mefbo", steps, RunOptions(rounds=40, every=40), data=colours(tmp_path))
    first, *_, last = configuration.experiment().run()
    assert last.metrics["upper_loss"] < first.metrics["upper_loss"]


def made_set(classes):
    """Images of as many classes as one likes, each with a bright stripe of its own, under names that are not numbers."""
    rng = np.random.default_rng(0)

    def part(count):
        labels = np.tile(np.arange(classes, dtype=np.int32), count)
        images = rng.integers(0, 60, (len(labels), 17, 17)).astype(np.uint8)
        images[np.arange(len(labels)), labels] = 255
        return images, labels

    return datasets.Images(*part(60), *part(5), tuple(f"kind-{c}" for c in range(classes)))


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("data-cleaning", 3),
        ("hyper-representation", 17),
        ("loss-tuning", 17),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("data-cleaning", 17), ("hyper-representation", 3), ("loss-tuning", 3))
        ),
    ],
)
def test_a_data_set_may_have_any_number_of_classes(name, classes, monkeypatch):
    source = made_set(classes)
    monkeypatch.setattr(datasets, "load", lambda name, folder: source)
    knobs = dict(clients=2, train_per_client=30, validation_per_client=20, hidden=4)
    task = built(name, **knobs, **(dict(clean="own") if name == "data-cleaning" else {}))
    assert task.holdings.classes == source.classes
    assert [counts.shape for counts in task.holdings.counts.values()] == [(2, classes)] * 2
    if name == "loss-tuning":
        assert task.x.size == 3 * classes
    else:  # where every logit is 0, the cross-entropy is log C
        rows, zero = task.population.whole(0).upper, jnp.zeros_like(task.y)
        np.testing.assert_allclose(task.population.problem.f(task.x, zero, rows), np.log(classes), rtol=1e-6)
    if name == "hyper-representation":
        assert built(name, **knobs, model="cnn").y.size == 120 * 84 + 84 + 84 * classes + classes
    algorithm = ALGORITHMS["simfbo"].configure("simfbo", {})
    first, *_, last = simulation(task, algorithm, steps=1, every=1).run()
    assert last.step == 1 and not np.array_equal(first.state.y, last.state.y)
    assert all(np.isfinite(value) for value in last.metrics.values())


def test_corrupted_labels_are_of_all_classes_and_clean_ones_of_the_clients_own(monkeypatch):
    for classes in (3, 17):
        monkeypatch.setattr(datasets, "load", lambda name, folder, classes=classes: made_set(classes))
        task = built("data-cleaning", clients=5, train_per_client=25, validation_per_client=8, rho=1)
        np.testing.assert_array_equal(np.unique(task.population.lower.rows.labels), np.arange(classes))
        clean = task.holdings.counts["clean"]
        np.testing.assert_array_equal(clean.argmax(1), np.arange(5) % classes)
        assert (clean.max(1) == clean.sum(1)).all()


def test_a_network_learns_classes_beyond_the_tenth(monkeypatch):
    monkeypatch.setattr(datasets, "load", lambda name, folder: made_set(17))
    task = built("hyper-representation", clients=2, train_per_client=300, validation_per_client=100)
    algorithm = ALGORITHMS["simfbo"].configure("simfbo", dict(gamma_x=1, gamma_y=0.3))
    *_, last = simulation(task, algorithm, rounds=150, every=150).run()
    assert last.metrics["test_accuracy"] > 0.9


# --- loss tuning ---


def test_the_vector_scaling_loss_is_equation_19():
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((6, 10)), rng.integers(0, 10, 6)
    omega, delta, tau = rng.random(10), rng.random(10), rng.standard_normal(10)
    scaled = np.exp(delta * logits + tau)
    by_hand = [-omega[k] * np.log(row[k] / row.sum()) for row, k in zip(scaled, labels, strict=True)]
    np.testing.assert_allclose(VectorScaling(*map(jnp.asarray, (omega, delta, tau))).loss(jnp.asarray(logits), labels), by_hand)


@pytest.mark.parametrize(("partition", "train", "validation"), [("iid", 74, 74), ("shards:2", 118, 30)])
def test_loss_tuning_has_the_papers_sizes(mnist, partition, train, validation):
    knobs = dict(partition=partition, train_per_client=train, validation_per_client=validation)
    task = built("loss-tuning-mnist", mnist, **knobs)
    assert task.x.size == 30 and task.population.size == 100 and sizes(task) == ({train}, {validation})
    held = sum(task.holdings.counts.values()).sum(0)
    assert 5900 <= held[0] <= 5923 and 55 <= held[9] <= 61 and held.sum() == 14_800


def test_the_upper_loss_weighs_rare_classes_by_their_rarity():
    task = LossTuning(ratio=0.1, hidden=4).build()
    rows = task.population.upper.rows
    one = lambda c: np.flatnonzero(np.asarray(rows.labels) == c)[:1]  # noqa: E731
    zero = jnp.zeros_like(task.y)  # every logit is 0: the cross-entropy is log 10 everywhere
    loss = [task.population.problem.f(task.x, zero, jax.tree.map(lambda a, c=c: a[one(c)], rows)) for c in (0, 9)]
    np.testing.assert_allclose(loss[1] / loss[0], 10, rtol=1e-5)


def test_balanced_accuracy_is_scikit_learns():
    task = LossTuning(hidden=8).build()
    y = jax.random.normal(jax.random.key(0), task.y.shape)
    metrics = task.metrics(task.x, y)
    source = datasets.load("digits")
    layers = [(8 * 8, 8), (8,), (8, 8), (8,), (8, 10), (10,)]
    cuts = np.cumsum([np.prod(s) for s in layers])[:-1]
    a, b, c, d, e, f = (p.reshape(s) for p, s in zip(np.split(np.asarray(y), cuts), layers, strict=True))
    relu = lambda v: np.maximum(v, 0)  # noqa: E731
    logits = relu(relu(source.test_images.reshape(-1, 64) / 255 @ a + b) @ c + d) @ e + f
    np.testing.assert_allclose(metrics["balanced_accuracy"], balanced_accuracy_score(source.test_labels, logits.argmax(1)))


# --- regularisation ---


def test_the_exact_lower_solution_is_scikit_learns_logistic_regression():
    task = Regularisation(clients=4, partition="iid").build()
    decay = 0.3
    y = jax.jit(lambda x: ground_truth.solution(task.population, x, task.y, tolerance=1e-9).y)(np.full(31, np.log(decay)))
    rows = jax.tree.map(np.asarray, task.population.lower.rows)
    each = np.repeat(1 / (4 * np.asarray(task.population.lower.size)), np.asarray(task.population.lower.size))
    theirs = LogisticRegression(C=1 / decay, fit_intercept=False, tol=1e-10, max_iter=10_000)
    theirs.fit(rows.features, rows.benign, sample_weight=each)
    np.testing.assert_allclose(y, theirs.coef_[0], rtol=1e-4, atol=1e-6)


def test_regularisation_learns_to_shrink_less_than_it_starts_with_and_the_box_holds():
    *_, last = (
        Configuration.resolve("regularisation", dict(decay="box"), "mefbo", {}, RunOptions(rounds=200)).experiment().run()
    )
    x = np.asarray(last.state.x)
    assert x.min() >= 1e-3 and x.max() <= 10 and np.ptp(x) > 0
    assert x.mean() < 0.1  # where it starts


# --- few-shot ---


def test_few_shot_tasks_are_of_a_clients_own_classes_and_their_two_sides_share_no_image():
    settings = FewShot(ways=4, shots=2, validation_shots=3, tasks=6)
    task, source = settings.build(), datasets.load("glyphs")
    upright = {image.tobytes(): label for image, label in zip(source.images, source.labels, strict=True)}

    def classes(image):
        return next(upright[t.tobytes()] for t in (np.rot90(image, k) for k in range(4)) if t.tobytes() in upright)

    alphabets = []
    for m in range(2):
        whole = task.population.client(m, jax.random.key(0)).whole()
        assert whole.lower.images.shape == (6, 8, 28, 28) and whole.upper.images.shape == (6, 12, 28, 28)
        np.testing.assert_array_equal(whole.lower.place, np.arange(6))
        for n in range(6):
            of_label = {}
            train, validation = ((np.asarray(s.images[n]), np.asarray(s.labels[n])) for s in (whole.lower, whole.upper))
            for images, labels in (train, validation):
                assert sorted(set(labels)) == [0, 1, 2, 3]
                for image, label in zip(images, labels, strict=True):
                    of_label.setdefault(int(label), set()).add(classes(image))
            assert all(len(names) == 1 for names in of_label.values())
            assert not {i.tobytes() for i in train[0]} & {i.tobytes() for i in validation[0]}
            alphabets.append((m, {int(source.group[c]) for names in of_label.values() for c in names}))
    first, second = (set.union(*(names for m, names in alphabets if m == client)) for client in (0, 1))
    assert not first & second and len(first | second) <= 4
    assert (task.holdings.counts["training"].sum(1) == 6 * 4 * 2).all()
    assert set(np.flatnonzero(task.holdings.counts["validation"][0])) == first


def test_a_new_tasks_classifier_is_scikit_learns():
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((15, 6)), np.arange(15) % 3
    ours = trained_classifier(jnp.asarray(features), jnp.asarray(labels), 3, 0.01)
    theirs = LogisticRegression(C=1 / (2 * 0.01 * 15), fit_intercept=False, tol=1e-10, max_iter=10_000).fit(features, labels)
    np.testing.assert_allclose(ours, theirs.coef_.T, rtol=1e-3, atol=1e-4)


def test_few_shot_says_what_does_not_fit():
    with pytest.raises(InputError, match="glyphs has 6 alphabets available; 6 to train on and 0 spared leave none"):
        FewShot(train_groups=6).build()
    with pytest.raises(InputError, match="10 shots and 15 validation images per class, but one has 20"):
        FewShot(shots=10, validation_shots=15).build()
    with pytest.raises(InputError, match="30 ways, but a client has only 16 classes"):
        FewShot(ways=30, rotations=False).build()


def drawn_set(groups, of_each, per_class, side=28, names=None):
    """A set of blank images, `of_each` classes in each group."""
    group = np.repeat(np.arange(groups), of_each).astype(np.int32)
    labels = np.repeat(np.arange(len(group)), per_class).astype(np.int32)
    images = np.zeros((len(labels), side, side), np.uint8)
    return datasets.Classes(images, labels, group, tuple(names or (f"group-{k}" for k in range(groups))))


def test_few_shot_on_omniglot_is_split_as_in_the_paper(monkeypatch):
    monkeypatch.setattr(datasets, "load", lambda name, folder: drawn_set(50, 14, 20))
    settings = TASKS["few-shot-omniglot"].configure("few-shot-omniglot", dict(tasks=60))
    held, unseen = settings.dealt(datasets.load("omniglot", ""))
    assert len(held) == 11 and {len(classes) for classes in held} == {3 * 14} and len(unseen) == 12 * 14
    assert len(np.unique(np.concatenate([*held, unseen]))) == 45 * 14
    task = settings.build()
    assert sizes(task) == ({60}, {60}) and set((task.holdings.counts["training"] > 0).sum(1)) == {3}
    assert task.population.upper.rows.images.shape == (660, 75, 28, 28) and task.holdings.unit == "alphabet"


def test_few_shot_on_mini_imagenet_holds_training_classes_and_tests_on_validation_classes(monkeypatch):
    names = ("train", "validation", "test")
    source = drawn_set(100, 1, 20, names=names)._replace(group=np.repeat([0, 1, 2], [64, 16, 20]).astype(np.int32))
    settings = TASKS["few-shot-mini-imagenet"].configure("few-shot-mini-imagenet", {})
    held, unseen = settings.dealt(source)
    assert [len(classes) for classes in held] == [16] * 4 and set(np.concatenate(held)) == set(range(64))
    np.testing.assert_array_equal(unseen, np.arange(64, 80))
    monkeypatch.setattr(datasets, "load", lambda name, folder: source)
    with pytest.raises(InputError, match="mini-imagenet has 64 classes available; 70 to train on"):
        TASKS["few-shot-mini-imagenet"].configure("few-shot-mini-imagenet", dict(train_groups=70)).build()


@pytest.mark.slow
def test_few_shot_derivatives_are_the_same_with_one_task_at_once(monkeypatch):
    task = FewShot(tasks=3, filters=4, clients=1).build()
    whole, v = task.population.whole(0), jnp.ones_like(task.y)
    together = jax.jit(lambda: task.population.problem.gxy(task.x, task.y + 0.1, whole, v))()
    monkeypatch.setattr(few_shot, "AT_ONCE", 1)
    alone = FewShot(tasks=3, filters=4, clients=1).build().population.problem
    np.testing.assert_allclose(jax.jit(lambda: alone.gxy(task.x, task.y + 0.1, whole, v))(), together, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_few_shot_at_the_papers_size_fits_into_memory(monkeypatch):
    """What compiled derivatives of one client take: gigabytes without care for memory."""
    for name, side, least in (("few-shot-omniglot", 28, 14), ("few-shot-mini-imagenet", 84, 1)):
        names = ("train", "validation", "test")
        source = drawn_set(50, least, 20) if least > 1 else drawn_set(100, 1, 20, side, names)
        if least == 1:
            source = source._replace(group=np.repeat([0, 1, 2], [64, 16, 20]).astype(np.int32))
        monkeypatch.setattr(datasets, "load", lambda name, folder, source=source: source)
        task = TASKS[name].configure(name, dict(tasks=12, test_tasks=1)).build()
        problem, whole = task.population.problem, jax.eval_shape(task.population.whole, 0)
        compiled = jax.jit(problem.fx).lower(task.x, task.y, whole).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 6e9, name


# --- all of them ---


@pytest.mark.parametrize("name", [*SMALL, "quadratic", "valley"])
def test_a_task_says_for_each_of_its_metrics_which_values_are_better(name):
    kind, task = TASKS[name].load(), built(name)
    y = jax.ShapeDtypeStruct((task.population.size, *task.y.shape) if task.lower_level == "local" else task.y.shape, float)
    assert {*jax.eval_shape(task.evaluate, task.x, y)} == {*LOSSES, *kind.better}
    assert kind.headline in kind.better and set(kind.better.values()) <= {"higher", "lower"}


@pytest.mark.parametrize("name", SMALL)
def test_a_client_cannot_read_another_clients_rows(name):
    """Client m's derivatives are the same when every other client's rows are garbage, and when there are none."""
    task = built(name, **LIGHT.get(name, {}))
    population, m = task.population, 1

    def spoiled(shards):
        start, size = int(shards.start[m]), int(shards.size[m])

        def garbage(a):
            keep = np.zeros(len(a), bool)
            keep[start : start + size] = True
            keep = keep.reshape(-1, *[1] * (a.ndim - 1))
            worst = np.nan if jnp.issubdtype(a.dtype, jnp.floating) else np.iinfo(a.dtype).max
            return jnp.where(keep, a, jnp.asarray(worst, a.dtype))

        return jax.tree.map(garbage, shards.rows)

    others = replace(
        population,
        upper=replace(population.upper, rows=spoiled(population.upper)),
        lower=replace(population.lower, rows=spoiled(population.lower)),
    )

    @jax.jit
    def seen(population, number):
        client = population.client(number, key) if population.size > 1 else population.alone(key, jnp.ones(()), number)
        p, batch, whole = client.problem, client.batch(3), client.whole()
        v = jnp.ones_like(task.y)
        return [p.fy(task.x, task.y, batch), p.gxy(task.x, task.y, batch, v), p.gy(task.x, task.y, whole)]

    key = jax.random.key(0)
    expected = seen(population, m)
    for ours in (seen(others, m), seen(population.only(m), m)):
        for a, b in zip(expected, ours, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SMALL)
def test_images_stay_bytes_until_they_are_used(name):
    population = built(name, **LIGHT.get(name, {})).population
    for rows in (population.upper.rows, population.lower.rows):
        images = getattr(rows, "images", None)
        assert images is None or images.dtype == np.uint8


def matching():
    """Every algorithm with every task of its kind; some of each in the quick tests."""
    quick = {("hyper-representation", "simfbo"), ("loss-tuning", "fedbio"), ("regularisation", "fednest")}
    for task in SMALL:
        for name in SHARED_X:
            if (ALGORITHMS[name].load().lower_level == "local") == (task == "few-shot"):
                yield pytest.param(task, name, marks=() if (task, name) in quick else pytest.mark.slow)


@pytest.mark.parametrize(("task", "name"), list(matching()))
def test_every_algorithm_makes_progress_on_every_task_of_its_kind(task, name):
    small = dict(ways=3, validation_shots=2, tasks=2, test_tasks=2, filters=4)
    knobs, rounds = (small, 25) if task == "few-shot" else ({}, 300)
    configuration = Configuration.resolve(task, knobs, name, {}, RunOptions(rounds=rounds, every=rounds))
    first, *_, last = configuration.experiment().run()
    assert last.metrics["upper_loss"] < (0.95 if name == "fedavg" else 0.7) * first.metrics["upper_loss"]
    if task == "data-cleaning" and name != "fedavg":
        assert last.metrics["test_accuracy"] > 0.6 and last.metrics["roc_auc"] > 0.52
