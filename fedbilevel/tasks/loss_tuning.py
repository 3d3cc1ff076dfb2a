"""Loss tuning on imbalanced data: learn the loss by which a model is to be trained so that it is fair to rare classes.

MeFBO (ICLR 2025), section 4.2 and appendix B.2, after M. Li et al. (AutoBalance, NeurIPS 2021). y is a network h that is
trained with the vector-scaling loss (Eq. 19), whose three numbers for each class, x = (ω, δ, τ), are tuned:

    ℓ_x(y; image of class l) = -ω_l log( exp(δ_l h_l + τ_l) / Σ_c exp(δ_c h_c + τ_c) )
    min_x  Σ_m ℓ_up(y*(x); validation data of m)/M,    y*(x) = argmin_y  Σ_m ℓ_x(y; training data of m)/M + rc |y|²

Class c of C keeps ⌈most μ^c⌉ images, μ = ratio^(1/(C-1)). The upper loss has δ = 1, τ = 0 and fixed weights ω_c ∝ μ^-c,
by which each class counts about the same; they are scaled such that a sample's mean weight is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.data import datasets, partition
from fedbilevel.population import Population
from fedbilevel.problem import from_trees
from fedbilevel.settings import check_all, choice, count, real
from fedbilevel.tasks import classification
from fedbilevel.tasks.base import SuitedTable, Task, by_trial, from_paper
from fedbilevel.tasks.classification import CLASSES, Labelled, cross_entropy, squared_norm


class VectorScaling(NamedTuple):
    """The tuned parameters of the loss, an entry for each class."""

    omega: Array
    delta: Array
    tau: Array

    def loss(self, logits: Array, labels: Any) -> Array:
        """Eq. 19, for each row."""
        return self.omega[labels] * cross_entropy(self.delta * logits + self.tau, labels)


@dataclass(frozen=True)
class LossTuning:
    """Tune the loss of a classifier so that it treats rare classes fairly."""

    headline: ClassVar[str] = "balanced_accuracy"
    suited: ClassVar[SuitedTable] = {
        "loss-tuning": by_trial(),
        "loss-tuning-mnist": from_paper(
            "MeFBO, appendix B.2, τ = 1",
            mefbo=dict(
                eta_x=0.1,
                eta_y=0.06,
                eta_theta=0.01,
                lambda_x=0.1,
                lambda_y=0.06,
                lambda_theta=0.01,
                penalty=4,
                growth=0.1,
                proximal=0.015,
            ),
            simfbo=dict(eta_x=0.08, eta_y=0.05, eta_u=0.01, gamma_x=0.08, gamma_y=0.05, gamma_u=0.01),
            fednest=dict(alpha=0.03, beta=0.02),
            lfednest=dict(alpha=0.03, beta=0.02),
        ),
    }

    dataset: str = choice("digits", "the images", datasets.IMAGES)
    most: int = count(140, "images that class 0 keeps, at most; the paper's MNIST: 6000")
    ratio: float = real(0.1, "the last class's images to the first's; the paper's: 0.01", above=0, most=1)
    clients: int = count(10, "number of clients")
    partition: str = partition.way("iid", "how samples are dealt to clients; the paper's non-i.i.d.: shards:2")
    train_per_client: int = count(27, "training samples of a client; the paper's MNIST: 74, non-i.i.d. 118")
    validation_per_client: int = count(27, "validation samples of a client; the paper's MNIST: 74, non-i.i.d. 30")
    model: str = classification.model()
    layers: int = count(3, "fully connected layers of an mlp", least=1)
    hidden: int = count(32, "width of its hidden layers; the paper's: 200")
    scaling: str = classification.scaling()
    rc: float = real(0.0, "weight of |y|²", least=0, source="the paper")
    batch_size: int = count(16, "samples in a minibatch")
    data_seed: int = count(0, "of the split and the model's start", least=0)

    def __post_init__(self) -> None:
        check_all(self)

    def build(self, data: str = "") -> Task:
        """The task; `data` is the folder of data sets that are not bundled."""
        source: datasets.Images = datasets.load(self.dataset, data)
        kept = partition.long_tail(source.labels, self.most, self.ratio, self.data_seed)
        parts = [kept[p] for p in partition.deal(self.partition, source.labels[kept], self.clients, self.data_seed)]
        train, validation = classification.split(
            parts, self.train_per_client, self.validation_per_client, self.data_seed, "loss-tuning"
        )
        hidden = [self.hidden] * (self.layers - 1)
        net = classification.network(self.model, source, hidden, self.scaling, self.data_seed)
        weights = self.ratio ** (-np.arange(CLASSES) / (CLASSES - 1))
        fair = jnp.asarray(weights / weights[source.labels[kept]].mean())

        def f(x: VectorScaling, y: Any, rows: Labelled) -> Array:
            return (fair[rows.labels] * cross_entropy(net.apply(y, rows.images), rows.labels)).mean()

        def g(x: VectorScaling, y: Any, rows: Labelled) -> Array:
            return x.loss(net.apply(y, rows.images), rows.labels).mean() + self.rc * squared_norm(y)

        start = VectorScaling(jnp.ones(CLASSES), jnp.ones(CLASSES), jnp.zeros(CLASSES))
        problem, x0, y0, _, layers = from_trees(f, g, start, net.layers)
        upper, lower = ([Labelled(source.images[p], source.labels[p]) for p in parts] for parts in (validation, train))
        population = Population.build(problem, upper, lower, batch_size=self.batch_size)
        images, labels = (jnp.asarray(a) for a in (source.test_images, source.test_labels))

        def metrics(x: Array, y: Array) -> dict[str, Array]:
            right = classification.guesses(net, layers(y), images) == labels
            by_class = jax.ops.segment_sum(right.astype(float), labels, CLASSES) / jnp.bincount(labels, length=CLASSES)
            return {
                "balanced_accuracy": by_class.mean(),
                "worst_class_accuracy": by_class.min(),
                "test_accuracy": right.mean(),
            }

        held = classification.holdings(source.labels, training=train, validation=validation)
        return Task(population, x0, y0, metrics, strongly_convex=False, holdings=held)
