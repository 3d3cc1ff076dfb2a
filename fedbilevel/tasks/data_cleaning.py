"""Federated data cleaning: weigh training samples so that a model trained on them does well on clean data.

J. Li, F. Huang and H. Huang, NeurIPS 2023, section 5.1 and appendix B.1. x holds a weight for every training
sample of every client, y the model:

    min_x  Σ_m ℓ(y*(x); clean data of client m)/M,    y*(x) = argmin_y  Σ_m mean_n s(x_mn) ℓ(y; sample n of m)/M + λ |y|²

A share of the training labels is replaced by uniformly random ones, and each client's clean data is of one
class, so that no client can clean its data alone. s is the sigmoid, as in MeFBO's experiments (ICLR 2025), or the
identity, as here: then weights can turn negative, the lower level loses its minimum, and long runs diverge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedbilevel.data import datasets
from fedbilevel.errors import InputError
from fedbilevel.models import mlp
from fedbilevel.population import Population
from fedbilevel.problem import from_trees
from fedbilevel.settings import check_all, choice, count, real
from fedbilevel.tasks.base import Task

CLASSES = 10

ALPHA = dict(delta=30, offset=10_000)
SINGLE_LOOP = dict(eta_x=100, eta_y=0.5, eta_u=0.05, gamma_x=100, gamma_y=0.5, gamma_u=0.05, radius=10)
DOUBLE_LOOP = dict(beta=0.5, lower_rounds=3)
NEUMANN = dict(smoothness=5, neumann_terms=5)
OWN_HYPERGRADIENT = dict(tau=0.1, neumann_order=5, c_nu=0.2, c_omega=0.2)


class CleanRows(NamedTuple):
    """Samples with right labels."""

    images: ArrayLike
    labels: ArrayLike


class NoisyRows(NamedTuple):
    """Samples with labels of which some are wrong, and each sample's place in x."""

    images: ArrayLike
    labels: ArrayLike
    place: ArrayLike


def roc_auc(scores: Array, positive: Array) -> Array:
    """The chance that a positive's score is above a negative's, ties counted half; ½ where one of them is missing."""
    negatives = jnp.sort(jnp.where(positive, jnp.inf, scores))
    below = jnp.searchsorted(negatives, scores, side="left") + jnp.searchsorted(negatives, scores, side="right")
    pairs = positive.sum() * (~positive).sum()
    return jnp.where(pairs > 0, jnp.sum(jnp.where(positive, below / 2, 0)) / jnp.maximum(pairs, 1), 0.5)


@dataclass(frozen=True)
class DataCleaning:
    """Weigh training samples with noisy labels by their use for clean validation data."""

    headline: ClassVar[str] = "test_accuracy"
    suited: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # found by trial on the digits; α_t and c are the paper's
        "fedbioacc": dict(eta=30, gamma=0.3, tau=0.01, c_nu=0.2, c_omega=0.2, c_u=0.2, radius=10, **ALPHA),
        "fedbio": dict(eta=50, gamma=0.5, tau=0.03, radius=10),
        "simfbo": SINGLE_LOOP,
        "shrofbo": SINGLE_LOOP,
        "mefbo": dict(
            eta_x=3000, eta_y=0.05, eta_theta=0.05, lambda_x=3000, lambda_y=0.05, lambda_theta=0.05, penalty=100, growth=0.01
        ),
        "fedmbo": dict(alpha=300, **DOUBLE_LOOP, **NEUMANN),
        "fednest": dict(alpha=100, **DOUBLE_LOOP, **NEUMANN),
        "lfednest": dict(alpha=100, **DOUBLE_LOOP, **NEUMANN),
        "stocbio": dict(alpha=100, **DOUBLE_LOOP, **NEUMANN),
        "commfedbio": dict(alpha=100, tau=0.05, system_rounds=3, **DOUBLE_LOOP),
        "fbo-aggitd": dict(alpha=100, beta=0.5, neumann_step=0.1),
        "local-bsgvr": dict(eta=30, gamma=0.3, **OWN_HYPERGRADIENT, **ALPHA),
        "adafbio": dict(eta=0.1, gamma=0.03, **OWN_HYPERGRADIENT, **ALPHA),
        "mrbo": dict(eta=30, gamma=0.3, **OWN_HYPERGRADIENT, **ALPHA),
        "fedavg": dict(gamma=0.3),
    }

    dataset: str = choice("digits", "the images", datasets.LOADERS)
    clients: int = count(10, "number of clients")
    corruption: float = real(0.4, "ρ, share of the training labels replaced by random ones", least=0, most=1)
    train_per_client: int = count(110, "training samples of a client; the paper's MNIST: 4500")
    validation_per_client: int = count(20, "clean samples of a client, of one class; the paper's MNIST: 50")
    weighting: str = choice("sigmoid", "a sample's weight: the sigmoid of x, or x itself (raw)", ("sigmoid", "raw"))
    hidden: int = count(32, "width of the two hidden layers")
    l2: float = real(1e-3, "λ, weight of |y|²", least=0, source="the paper")
    batch_size: int = count(32, "samples in a minibatch")
    data_seed: int = count(0, "of the split, the corruption and the model's start", least=0)

    def __post_init__(self) -> None:
        check_all(self)

    def build(self, data: str = "") -> Task:
        """The task; `data` is the folder of data sets that are not bundled."""
        source = datasets.load(self.dataset, data)
        rng = np.random.default_rng(self.data_seed)
        validation, train = self._split(source, rng)
        given = source.labels[train].copy()
        replaced = rng.random(len(train)) < self.corruption
        given[replaced] = rng.integers(0, CLASSES, replaced.sum())
        corrupted = jnp.asarray(given != source.labels[train])

        raw = self.weighting == "raw"

        def f(x: Array, y: Any, rows: CleanRows) -> Array:
            return mlp.cross_entropy(mlp.apply(y, mlp.pixels(rows.images)), rows.labels).mean()

        def g(x: Array, y: Any, rows: NoisyRows) -> Array:
            weights = x[rows.place] if raw else jax.nn.sigmoid(x[rows.place])
            fit = mlp.cross_entropy(mlp.apply(y, mlp.pixels(rows.images)), rows.labels)
            return (weights * fit).mean() + self.l2 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))

        width = int(np.prod(source.images.shape[1:]))
        layers = mlp.init(jax.random.key(self.data_seed), [width, self.hidden, self.hidden, CLASSES])
        weights = jnp.ones(len(train)) if raw else jnp.zeros(len(train))
        problem, x0, y0, _, model = from_trees(f, g, weights, layers)

        def part(index: np.ndarray, m: int) -> np.ndarray:
            return index.reshape(self.clients, -1)[m]

        population = Population.build(
            problem,
            upper=[CleanRows(source.images[v], source.labels[v]) for v in (part(validation, m) for m in range(self.clients))],
            lower=[
                NoisyRows(source.images[train[n]], given[n], n.astype(np.int32))
                for n in (part(np.arange(len(train)), m) for m in range(self.clients))
            ],
            batch_size=self.batch_size,
        )
        images, labels = jnp.asarray(source.test_images), jnp.asarray(source.test_labels)

        def metrics(x: Array, y: Array) -> dict[str, Array]:
            guesses = mlp.apply(model(y), mlp.pixels(images)).argmax(1)
            return {
                "test_accuracy": jnp.mean(guesses == labels),
                "roc_auc": roc_auc(x, ~corrupted),
            }

        return Task(population, x0, y0, metrics, strongly_convex=False, truths=("roc_auc",))

    def _split(self, source: datasets.Images, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the clean samples, client by client, and of the training samples."""
        order = rng.permutation(len(source.labels))
        clean: list[np.ndarray] = []
        for m in range(self.clients):
            free = np.setdiff1d(order[source.labels[order] == m % CLASSES], np.concatenate([[], *clean]), assume_unique=False)
            clean.append(rng.permutation(free)[: self.validation_per_client])
        validation = np.concatenate(clean)
        rest = rng.permutation(np.setdiff1d(order, validation))
        if len(validation) < self.clients * self.validation_per_client or len(rest) < self.clients * self.train_per_client:
            raise InputError(
                f"data-cleaning: {self.dataset} has {len(order)} training samples, too few for {self.clients} clients with "
                f"{self.train_per_client} training and {self.validation_per_client} clean samples: lower one of the three"
            )
        return validation, rest[: self.clients * self.train_per_client]
