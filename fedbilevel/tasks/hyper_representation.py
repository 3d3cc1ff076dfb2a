"""Hyper-representation: learn features on validation data such that a head trained on top of them does well.

FedMBO (ICML 2023, section 5), FBO-AggITD (ICML 2023, section 5), MeFBO (ICLR 2025, Eq. 15), after FedNest. x holds the first
layers of a network, y the last, and all clients share both:

    min_x  Σ_m ℓ(x, y*(x); validation data of m)/M,    y*(x) = argmin_y  Σ_m ℓ(x, y; training data of m)/M + rc |y|²

ℓ is the cross-entropy: convex in a head of one layer, strongly so with rc > 0. Of LeNet-5 the last two layers are
the head (FBO-AggITD, A.2), which is not convex.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from fedbilevel.core.population import Population
from fedbilevel.core.problem import from_trees
from fedbilevel.settings import choice, count, real
from fedbilevel.tasks import classification
from fedbilevel.tasks.base import STORM, THREE_ROUNDS, Better, SuitedTable, Task, mefbo_steps, recipe, simfbo_steps, suit
from fedbilevel.tasks.classification import Labelled, cross_entropy, squared_norm
from fedbilevel.tasks.data import datasets, partition
from fedbilevel.tasks.declare import task


@task
class HyperRepresentation:
    """Learn features on validation data, and one head for all clients on training data."""

    headline: ClassVar[str] = "test_accuracy"
    better: ClassVar[Better] = {"test_accuracy": "higher"}
    suited: ClassVar[SuitedTable] = {
        "hyper-representation": suit(
            "by trial on the digits",
            fedbioacc=dict(eta=1, gamma=0.3, tau=0.15, c_u=0.2, **STORM),
            fedbio=dict(eta=1, gamma=0.3, tau=0.15),
            simfbo=simfbo_steps(1, 0.1, 0.05),
            shrofbo=simfbo_steps(1, 0.1, 0.05),
            mefbo=dict(mefbo_steps(3, 0.1, 0.1), penalty=3, growth=0.01),
            fedmbo=dict(alpha=1, beta=0.3, smoothness=20, **THREE_ROUNDS),
            fednest=dict(alpha=1, beta=0.3, smoothness=20, **THREE_ROUNDS),
            lfednest=dict(alpha=1, beta=0.1, smoothness=20, **THREE_ROUNDS),
            stocbio=dict(alpha=0.3, beta=0.3, smoothness=20, **THREE_ROUNDS),
            commfedbio=dict(alpha=1, beta=0.3, tau=0.15, lower_rounds=3, system_rounds=3),
            fbo_aggitd=dict(alpha=1, beta=0.1, neumann_step=0.05),
            local_bsgvr=dict(eta=0.1, gamma=0.1, tau=0.05, neumann_order=5, **STORM),
            adafbio=dict(eta=0.03, gamma=0.01, tau=0.05, neumann_order=5, **STORM),
            mrbo=dict(eta=0.3, gamma=0.1, tau=0.05, neumann_order=5, **STORM),
            fedavg=dict(gamma=0.3),
        ),
        "hyper-representation-mnist": {
            **recipe("by trial", x=0.1, y=0.05, smoothness=50),
            **suit(
                "by trial",
                local_bsgvr=dict(eta=0.03, gamma=0.02, tau=0.02, neumann_order=5, **STORM),
                adafbio=dict(eta=0.005, gamma=0.002, tau=0.02, neumann_order=5, **STORM),
                mrbo=dict(eta=0.03, gamma=0.02, tau=0.02, neumann_order=5, **STORM),
            ),
            **suit(
                "MeFBO, B.1; its γ = 0.015 is stable only as the inverse, 1/0.015",
                mefbo=dict(mefbo_steps(0.1, 0.1, 0.07), penalty=2.7, growth=0.001, proximal=66.7),
            ),
            **suit("MeFBO, B.1", simfbo=simfbo_steps(0.2, 0.1, 0.05)),
            **suit(
                "MeFBO, B.1, with FedNest's Neumann step",
                fednest=dict(alpha=0.02, beta=0.01, smoothness=50, neumann_terms=5),
                lfednest=dict(alpha=0.02, beta=0.01, smoothness=50, neumann_terms=5),
            ),
            **suit("FBO-AggITD, A.3", fbo_aggitd=dict(alpha=0.01, beta=0.003, neumann_step=0.01, lower_rounds=5)),
        },
    }

    dataset: str = choice("digits", "the images", datasets.IMAGES)
    clients: int = count(10, "number of clients")
    partition: str = partition.way("iid", "how samples are dealt to clients; the papers' non-i.i.d.: shards:2")
    train_per_client: int = count(70, "training samples per client; the papers' MNIST: 300, non-i.i.d. 480")
    validation_per_client: int = count(69, "validation samples per client; the papers' MNIST: 300, non-i.i.d. 120")
    model: str = classification.model()
    hidden: int = count(32, "width of an mlp's hidden layer; the papers': 200")
    scaling: str = classification.scaling()
    rc: float = real(0.05, "weight of |y|²", least=0, source="MeFBO, table 2")
    batch_size: int = count(32, "samples in a minibatch; the papers': 64")
    data_seed: int = count(0, "random seed of the split and the initial model", least=0)

    def build(self, data: str = "") -> Task:
        """The task; `data` is the folder of data sets that are not bundled."""
        source: datasets.Images = datasets.load(self.dataset, data)
        parts = partition.deal(self.partition, source.labels, self.clients, self.data_seed)
        train, validation = classification.split(
            parts, self.train_per_client, self.validation_per_client, self.data_seed, "hyper-representation"
        )
        net = classification.network(self.model, source, 2, self.hidden, self.scaling, self.data_seed)
        features, head = net.layers[: -net.head], net.layers[-net.head :]

        def f(x: Any, y: Any, rows: Labelled) -> Array:
            return cross_entropy(net.apply([*x, *y], rows.images), rows.labels).mean()

        def g(x: Any, y: Any, rows: Labelled) -> Array:
            return f(x, y, rows) + self.rc * squared_norm(y)

        problem, x0, y0, x_layers, y_layers = from_trees(f, g, features, head)
        problem = replace(problem, tests=classification.tests(net, lambda x, y: [*x_layers(x), *y_layers(y)]))
        upper, lower = ([Labelled(source.images[p], source.labels[p]) for p in parts] for parts in (validation, train))
        population = Population.build(problem, upper, lower, batch_size=self.batch_size)
        test = [jnp.asarray(a) for a in (source.test_images, source.test_labels)]

        def metrics(x: Array, y: Array) -> dict[str, Array]:
            accuracy = classification.accuracy(net, [*x_layers(x), *y_layers(y)], *test)
            return {"test_accuracy": accuracy}

        held = classification.holdings(source.labels, source.classes, training=train, validation=validation)
        convex = self.model == "mlp" and self.rc > 0
        return Task(population, x0, y0, metrics, strongly_convex=convex, holdings=held)
