"""Federated data cleaning: weigh training samples so that a model trained on them does well on clean data.

J. Li, F. Huang and H. Huang, NeurIPS 2023, section 5.1 and appendix B.1; MeFBO (ICLR 2025), appendices B.3 and F.
x holds a weight for every training sample of every client, y the model:

    min_x  Σ_m ℓ(y*(x); clean data of client m)/M,    y*(x) = argmin_y  Σ_m mean_n s(x_mn) ℓ(y; sample n of m)/M + λ |y|²

(The first paper has a sum over n instead of a mean: its x differs by that factor.) A share of the training labels is
replaced by uniformly random ones. In the first paper s is the identity, and each client's clean data is of one class, so
that no client can clean its data alone; in the other, s is the sigmoid, and clean data is of the same kind as the client's
training data. A raw weight can turn negative: then the lower level has no minimum, and runs diverge, the sooner the larger
x's steps are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedbilevel.core.population import Population
from fedbilevel.core.problem import from_trees
from fedbilevel.core.sets import EVERYWHERE, Box, Sets
from fedbilevel.errors import InputError
from fedbilevel.settings import choice, count, real
from fedbilevel.tasks import classification
from fedbilevel.tasks.base import STORM, THREE_ROUNDS, Better, SuitedTable, Task, mefbo_steps, recipe, simfbo_steps, suit
from fedbilevel.tasks.classification import Labelled, cross_entropy, squared_norm
from fedbilevel.tasks.data import datasets, partition
from fedbilevel.tasks.data.partition import Parts
from fedbilevel.tasks.declare import task
from fedbilevel.tasks.shown import Gallery, Histogram, Picture, Shown

PICTURES = 20  # of the most and of the least trusted samples, each


class NoisyRows(NamedTuple):
    """Samples with labels, some of them wrong, and each sample's place in x."""

    images: ArrayLike
    labels: ArrayLike
    place: ArrayLike


def roc_auc(scores: Array, positive: Array) -> Array:
    """The chance that a positive's score is above a negative's, ties counted half; ½ if either kind is missing."""
    negatives = jnp.sort(jnp.where(positive, jnp.inf, scores))
    below = jnp.searchsorted(negatives, scores, side="left") + jnp.searchsorted(negatives, scores, side="right")
    pairs = positive.sum() * (~positive).sum()
    return jnp.where(pairs > 0, jnp.sum(jnp.where(positive, below / 2, 0)) / jnp.maximum(pairs, 1), 0.5)


def trust(weights: np.ndarray, rows: NoisyRows, true: np.ndarray, classes: tuple[str, ...]) -> Shown:
    """The weights of samples with right and with corrupted labels, and the samples at both ends."""
    images, given, order = np.asarray(rows.images), np.asarray(rows.labels), np.argsort(weights)
    corrupted = given != true

    def picture(n: int) -> Picture:
        label, truth = classes[given[n]], classes[true[n]]
        caption = f"{label} ({truth})" if corrupted[n] else label
        return Picture(images[n], caption, f"labelled {label}, truly {truth}, weight {weights[n]:.3g}", bool(corrupted[n]))

    return Shown(
        "Which samples are trusted",
        "The learned weight of every training sample. Below each picture is its given label; a dashed frame means that it is "
        "wrong, with the true one in brackets.",
        (
            Histogram("learned weight", "samples", {"right label": weights[~corrupted], "corrupted label": weights[corrupted]}),
            Gallery("most trusted", [picture(n) for n in order[::-1][:PICTURES]]),
            Gallery("least trusted", [picture(n) for n in order[:PICTURES]]),
        ),
    )


@task
class DataCleaning:
    """Weigh training samples with noisy labels by their value for clean validation data."""

    headline: ClassVar[str] = "test_accuracy"
    better: ClassVar[Better] = {"test_accuracy": "higher", "roc_auc": "higher", "validation_error": "lower"}
    suited: ClassVar[SuitedTable] = {
        "data-cleaning": suit(
            "by trial on the digits, momenta of Li et al.",
            fedbioacc=dict(eta=30, gamma=0.3, tau=0.01, c_u=0.2, radius=10, **STORM),
            fedbio=dict(eta=50, gamma=0.5, tau=0.03, radius=10),
            simfbo=dict(simfbo_steps(100, 0.5, 0.05), radius=10),
            shrofbo=dict(simfbo_steps(100, 0.5, 0.05), radius=10),
            mefbo=dict(mefbo_steps(3000, 0.05, 0.05), penalty=100, growth=0.01),
            fedmbo=dict(alpha=300, beta=0.5, smoothness=5, **THREE_ROUNDS),
            fednest=dict(alpha=100, beta=0.5, smoothness=5, **THREE_ROUNDS),
            lfednest=dict(alpha=100, beta=0.5, smoothness=5, **THREE_ROUNDS),
            stocbio=dict(alpha=100, beta=0.5, smoothness=5, **THREE_ROUNDS),
            commfedbio=dict(alpha=100, tau=0.05, system_rounds=3, beta=0.5, lower_rounds=3),
            fbo_aggitd=dict(alpha=100, beta=0.5, neumann_step=0.1),
            local_bsgvr=dict(eta=30, gamma=0.3, tau=0.1, neumann_order=5, **STORM),
            adafbio=dict(eta=0.1, gamma=0.03, tau=0.1, neumann_order=5, **STORM),
            mrbo=dict(eta=30, gamma=0.3, tau=0.1, neumann_order=5, **STORM),
            fedavg=dict(gamma=0.3),
        ),
        "data-cleaning-mnist": suit(
            "by trial, momenta of Li et al.; their steps (FedBiOAcc: η 200, γ 1; FedBiO: η 1000, γ 0.5) diverge here",
            fedbioacc=dict(eta=3, gamma=0.1, tau=0.01, c_u=0.2, **STORM),
            fedbio=dict(eta=3, gamma=0.1, tau=0.01, radius=10),
            simfbo=dict(simfbo_steps(10, 0.1, 0.01), radius=10),
            shrofbo=dict(simfbo_steps(10, 0.1, 0.01), radius=10),
            mefbo=dict(mefbo_steps(300, 0.05, 0.05), penalty=100, growth=0.01),
            fedmbo=dict(alpha=30, beta=0.1, smoothness=50, **THREE_ROUNDS),
            fednest=dict(alpha=30, beta=0.1, smoothness=50, **THREE_ROUNDS),
            lfednest=dict(alpha=30, beta=0.1, smoothness=50, **THREE_ROUNDS),
            stocbio=dict(alpha=30, beta=0.1, smoothness=50, **THREE_ROUNDS),
            commfedbio=dict(alpha=30, beta=0.1, lower_rounds=3, tau=0.01, system_rounds=3),
            fbo_aggitd=dict(alpha=30, beta=0.1, neumann_step=0.02),
            local_bsgvr=dict(eta=3, gamma=0.1, tau=0.02, neumann_order=5, **STORM),
            adafbio=dict(eta=0.01, gamma=0.01, tau=0.02, neumann_order=5, **STORM),
            mrbo=dict(eta=3, gamma=0.1, tau=0.02, neumann_order=5, **STORM),
            fedavg=dict(gamma=0.1),
        ),
        "data-cleaning-sigmoid": {
            **recipe("by trial", x=1, y=0.05, smoothness=50),
            **suit(
                "MeFBO, appendix B.3; its γ = 0.05 is stable only as the inverse, 1/0.05",
                mefbo=dict(mefbo_steps(0.1, 0.05, 0.03), penalty=2, growth=0.01, proximal=20),
            ),
            **suit("MeFBO, appendix B.3", simfbo=simfbo_steps(0.08, 0.06, 0.03)),
            **suit(
                "MeFBO, appendix B.3, with our Neumann series",
                fednest=dict(alpha=0.2, beta=0.1, smoothness=20, neumann_terms=5),
                lfednest=dict(alpha=0.2, beta=0.1, smoothness=20, neumann_terms=5),
            ),
        },
        "data-cleaning-fashion-mnist": {
            **recipe("by trial", x=1, y=0.05, smoothness=50),
            **suit(
                "MeFBO, appendix F; its γ = 0.015 is stable only as the inverse, 1/0.015",
                mefbo=dict(mefbo_steps(0.2, 0.15, 0.1), penalty=3, growth=0.001, proximal=66.7),
            ),
            **suit("MeFBO, appendix F", simfbo=simfbo_steps(0.1, 0.05, 0.015)),
            **suit(
                "MeFBO, appendix F, with our Neumann series",
                fednest=dict(alpha=0.02, beta=0.01, smoothness=50, neumann_terms=5),
                lfednest=dict(alpha=0.02, beta=0.01, smoothness=50, neumann_terms=5),
            ),
        },
        "data-cleaning-cifar-10": recipe(
            "by trial; MeFBO's own steps (appendix F) learn nothing here", x=1, y=0.03, smoothness=100
        ),
    }

    dataset: str = choice("digits", "the images", datasets.IMAGES)
    clients: int = count(10, "number of clients")
    partition: str = partition.way("iid", "how training samples are dealt to clients")
    clean: str = choice(
        "one-class", "the clean samples: of one class per client, or of the client's own kind", ("one-class", "own")
    )
    rho: float = real(0.4, "ρ (Li et al.) or cr (MeFBO), share of the training labels replaced by random ones", least=0, most=1)
    train_per_client: int = count(110, "training samples per client")
    validation_per_client: int = count(20, "clean samples per client")
    weighting: str = choice(
        "sigmoid",
        "a sample's weight: the sigmoid of x, x itself (raw), or x itself confined to [0, 1] (unit)",
        ("sigmoid", "raw", "unit"),
    )
    model: str = classification.model()
    layers: int = count(3, "fully connected layers of an mlp", bits=7)
    hidden: int = count(32, "width of its hidden layers")
    scaling: str = classification.scaling()
    rc: float = real(1e-3, "λ or rc, weight of |y|²", least=0, source="Li et al.")
    batch_size: int = count(32, "samples in a minibatch")
    data_seed: int = count(0, "random seed of the split, the corruption and the initial model", least=0)

    def build(self, data: str = "") -> Task:
        """The task; `data` is the folder of data sets that are not bundled."""
        source: datasets.Images = datasets.load(self.dataset, data)
        train, validation = self._dealt(source.labels)
        place = np.split(np.arange(sum(map(len, train)), dtype=np.int32), np.cumsum([len(part) for part in train])[:-1])
        samples = np.concatenate(train)
        rng = np.random.default_rng(self.data_seed)
        true, classes = source.labels[samples], source.classes
        given = true.copy()
        replaced = rng.random(len(samples)) < self.rho
        given[replaced] = rng.integers(0, len(classes), replaced.sum())
        right = jnp.asarray(given == true)

        net = classification.network(self.model, source, self.layers, self.hidden, self.scaling, self.data_seed)
        sigmoid = self.weighting == "sigmoid"

        def f(x: Array, y: Any, rows: Labelled) -> Array:
            return cross_entropy(net.apply(y, rows.images), rows.labels).mean()

        def g(x: Array, y: Any, rows: NoisyRows) -> Array:
            weights = jax.nn.sigmoid(x[rows.place]) if sigmoid else x[rows.place]
            fit = cross_entropy(net.apply(y, rows.images), rows.labels)
            return (weights * fit).mean() + self.rc * squared_norm(y)

        start = jnp.zeros(len(samples)) if sigmoid else jnp.ones(len(samples))
        sets = Sets(x=Box(0, 1) if self.weighting == "unit" else EVERYWHERE)
        problem, x0, y0, _, model = from_trees(f, g, start, net.layers, sets)

        def validation_error(x: Array, y: Array, rows: Labelled) -> Array:
            return jnp.mean(net.apply(model(y), rows.images).argmax(1) != rows.labels)

        tests = classification.tests(net, lambda x, y: model(y))
        problem = replace(problem, metrics=(("validation_error", validation_error),), tests=tests)
        population = Population.build(
            problem,
            upper=[Labelled(source.images[v], source.labels[v]) for v in validation],
            lower=[NoisyRows(source.images[t], given[p], p) for t, p in zip(train, place, strict=True)],
            batch_size=self.batch_size,
        )
        test = [jnp.asarray(a) for a in (source.test_images, source.test_labels)]

        def metrics(x: Array, y: Array) -> dict[str, Array]:
            return {"test_accuracy": classification.accuracy(net, model(y), *test), "roc_auc": roc_auc(x, right)}

        held = classification.holdings(source.labels, classes, training=train, clean=validation)

        def shown(x: np.ndarray) -> tuple[Shown]:
            return (trust(np.exp(-np.logaddexp(0, -x)) if sigmoid else x, population.lower.rows, true, classes),)

        return Task(population, x0, y0, metrics, strongly_convex=False, holdings=held, shown=shown)

    def _dealt(self, labels: np.ndarray) -> tuple[Parts, Parts]:
        """The clients' training samples, and their clean ones."""
        if self.clean == "own":
            parts = partition.deal(self.partition, labels, self.clients, self.data_seed)
            return classification.split(
                parts, self.train_per_client, self.validation_per_client, self.data_seed, "data-cleaning"
            )
        order = np.random.default_rng(self.data_seed).permutation(len(labels))
        with_holder = order[labels[order] < self.clients]
        clean = [
            with_holder[part][: self.validation_per_client]
            for part in partition.one_class(labels[with_holder], self.clients, self.data_seed)
        ]
        rest = np.setdiff1d(order, np.concatenate(clean))
        enough = min(map(len, clean)) >= self.validation_per_client and len(rest) >= self.clients
        dealt = partition.deal(self.partition, labels[rest], self.clients, self.data_seed) if enough else []
        if max(map(len, dealt), default=0) < self.train_per_client:
            raise InputError(
                f"data-cleaning: {self.dataset} has {len(labels)} training samples, too few for {self.clients} clients with "
                f"{self.train_per_client} training and {self.validation_per_client} clean samples: lower one of the three"
            )
        shuffled = [np.random.default_rng((self.data_seed, m)).permutation(rest[part]) for m, part in enumerate(dealt)]
        return [part[: self.train_per_client] for part in shuffled], clean
