"""Loss tuning on imbalanced data: learn the training loss that makes a model fair to rare classes.

MeFBO (ICLR 2025), section 4.2 and appendix B.2, after M. Li et al. (AutoBalance, NeurIPS 2021). y is a network h that is
trained with the vector-scaling loss (Eq. 19), whose three numbers for each class, x = (ω, δ, τ), are tuned:

    ℓ_x(y; image of class l) = -ω_l log( exp(δ_l h_l + τ_l) / Σ_c exp(δ_c h_c + τ_c) )
    min_x  Σ_m ℓ_up(y*(x); validation data of m)/M,    y*(x) = argmin_y  Σ_m ℓ_x(y; training data of m)/M + rc |y|²

Class c of C keeps ⌈most μ^c⌉ images, μ = ratio^(1/(C-1)). The upper loss has δ = 1, τ = 0 and fixed weights ω_c ∝ μ^-c,
so that each class counts about the same; they are scaled such that a sample's mean weight is 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.population import Population
from fedbilevel.core.problem import from_trees
from fedbilevel.settings import choice, count, real
from fedbilevel.tasks import classification
from fedbilevel.tasks.base import STORM, THREE_ROUNDS, Better, SuitedTable, Task, mefbo_steps, recipe, simfbo_steps, suit
from fedbilevel.tasks.classification import Labelled, cross_entropy, squared_norm
from fedbilevel.tasks.data import datasets, partition
from fedbilevel.tasks.declare import task
from fedbilevel.tasks.shown import Bars, Shown


class VectorScaling(NamedTuple):
    """The tuned parameters of the loss, one entry per class."""

    omega: Array
    delta: Array
    tau: Array

    def loss(self, logits: Array, labels: Any) -> Array:
        """Eq. 19, for each row."""
        return self.omega[labels] * cross_entropy(self.delta * logits + self.tau, labels)


@task
class LossTuning:
    """Tune the loss of a classifier so that it treats rare classes fairly."""

    headline: ClassVar[str] = "balanced_accuracy"
    better: ClassVar[Better] = {"balanced_accuracy": "higher", "worst_class_accuracy": "higher", "test_accuracy": "higher"}
    suited: ClassVar[SuitedTable] = {
        "loss-tuning": suit(
            "by trial on the digits",
            fedbioacc=dict(eta=0.01, gamma=0.1, tau=0.05, c_u=0.2, **STORM),
            fedbio=dict(eta=0.01, gamma=0.1, tau=0.05),
            simfbo=simfbo_steps(0.03, 0.1, 0.05),
            shrofbo=simfbo_steps(0.03, 0.1, 0.05),
            mefbo=dict(mefbo_steps(0.3, 0.1, 0.1), penalty=30, growth=0.01),
            fedmbo=dict(alpha=0.1, beta=0.1, smoothness=20, **THREE_ROUNDS),
            fednest=dict(alpha=0.1, beta=0.1, smoothness=20, **THREE_ROUNDS),
            lfednest=dict(alpha=0.1, beta=0.1, smoothness=20, **THREE_ROUNDS),
            stocbio=dict(alpha=0.1, beta=0.1, smoothness=20, **THREE_ROUNDS),
            commfedbio=dict(alpha=0.1, beta=0.1, tau=0.05, lower_rounds=3, system_rounds=3),
            fbo_aggitd=dict(alpha=0.1, beta=0.1, neumann_step=0.05),
            local_bsgvr=dict(eta=0.03, gamma=0.1, tau=0.05, neumann_order=5, **STORM),
            adafbio=dict(eta=0.01, gamma=0.01, tau=0.05, neumann_order=5, **STORM),
            mrbo=dict(eta=0.1, gamma=0.1, tau=0.05, neumann_order=5, **STORM),
            fedavg=dict(gamma=0.1),
        ),
        "loss-tuning-mnist": {
            **recipe("by trial", x=0.01, y=0.05, smoothness=50),
            **suit(
                "by trial; the paper's own (B.2) diverge here",
                mefbo=dict(mefbo_steps(0.3, 0.05, 0.05), penalty=30, growth=0.01, proximal=66.7),
            ),
            **suit("MeFBO, B.2 with τ = 1", simfbo=simfbo_steps(0.08, 0.05, 0.01)),
            **suit(
                "MeFBO, B.2 with τ = 1 and our Neumann series",
                fednest=dict(alpha=0.03, beta=0.02, smoothness=50, neumann_terms=5),
                lfednest=dict(alpha=0.03, beta=0.02, smoothness=50, neumann_terms=5),
            ),
        },
    }

    dataset: str = choice("digits", "the images", datasets.IMAGES)
    most: int = count(140, "images that class 0 keeps, at most; the paper's MNIST: 6000")
    ratio: float = real(0.1, "ratio of the last class's images to the first's; the paper's: 0.01", above=0, most=1)
    clients: int = count(10, "number of clients")
    partition: str = partition.way("iid", "how samples are dealt to clients; the paper's non-i.i.d.: shards:2")
    train_per_client: int = count(27, "training samples per client; the paper's MNIST: 74, non-i.i.d. 118")
    validation_per_client: int = count(27, "validation samples per client; the paper's MNIST: 74, non-i.i.d. 30")
    model: str = classification.model()
    layers: int = count(3, "fully connected layers of an mlp", bits=7)
    hidden: int = count(32, "width of its hidden layers; the paper's: 200")
    scaling: str = classification.scaling()
    rc: float = real(0.0, "weight of |y|²", least=0, source="the paper")
    batch_size: int = count(16, "samples in a minibatch")
    data_seed: int = count(0, "random seed of the split and the initial model", least=0)

    def build(self, data: str = "") -> Task:
        """The task; `data` is the folder of data sets that are not bundled."""
        source: datasets.Images = datasets.load(self.dataset, data)
        kept = partition.long_tail(source.labels, self.most, self.ratio, self.data_seed)
        parts = [kept[p] for p in partition.deal(self.partition, source.labels[kept], self.clients, self.data_seed)]
        train, validation = classification.split(
            parts, self.train_per_client, self.validation_per_client, self.data_seed, "loss-tuning"
        )
        net = classification.network(self.model, source, self.layers, self.hidden, self.scaling, self.data_seed)
        names = source.classes
        classes = len(names)
        weights = self.ratio ** (-np.arange(classes) / (classes - 1))
        fair = jnp.asarray(weights / weights[source.labels[kept]].mean())

        def f(x: VectorScaling, y: Any, rows: Labelled) -> Array:
            return (fair[rows.labels] * cross_entropy(net.apply(y, rows.images), rows.labels)).mean()

        def g(x: VectorScaling, y: Any, rows: Labelled) -> Array:
            return x.loss(net.apply(y, rows.images), rows.labels).mean() + self.rc * squared_norm(y)

        start = VectorScaling(jnp.ones(classes), jnp.ones(classes), jnp.zeros(classes))
        problem, x0, y0, tuned, layers = from_trees(f, g, start, net.layers)
        problem = replace(problem, tests=classification.tests(net, lambda x, y: layers(y)))
        upper, lower = ([Labelled(source.images[p], source.labels[p]) for p in parts] for parts in (validation, train))
        population = Population.build(problem, upper, lower, batch_size=self.batch_size)
        images, labels = (jnp.asarray(a) for a in (source.test_images, source.test_labels))

        def metrics(x: Array, y: Array) -> dict[str, Array]:
            right = classification.guesses(net, layers(y), images) == labels
            by_class = jax.ops.segment_sum(right.astype(float), labels, classes) / jnp.bincount(labels, length=classes)
            return {
                "balanced_accuracy": by_class.mean(),
                "worst_class_accuracy": by_class.min(),
                "test_accuracy": right.mean(),
            }

        held = classification.holdings(source.labels, names, training=train, validation=validation)

        def shown(x: np.ndarray) -> tuple[Shown]:
            numbers = dict(zip(("weight ω", "scale δ", "shift τ"), tuned(x), strict=True))
            text = f"The tuned loss of class l is -ω_l log softmax(δ h + τ)_l; class {names[0]} is the most frequent."
            return (Shown("How classes are weighted", text, [Bars(title, "class", names, n) for title, n in numbers.items()]),)

        return Task(population, x0, y0, metrics, strongly_convex=False, holdings=held, shown=shown)
