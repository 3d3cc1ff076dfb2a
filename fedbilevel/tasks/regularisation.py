"""Regularisation tuning: hospitals fit one logistic regression and learn how strongly to shrink each of its coefficients.

    min_x  Σ_m ℓ(y*(x); held-out patients of m)/M,    y*(x) = argmin_y  Σ_m ℓ(y; other patients of m)/M + ½ Σ_j d_j(x) y_j²

on scikit-learn's breast-cancer data: 569 patients with 30 features each. d_j is exp(x_j), or x_j itself confined to a box.
Hospitals differ in their mix of cases; features are standardised by the mean and deviation of all hospitals together.
The lower level is strongly convex, as most methods assume.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.population import Population
from fedbilevel.core.problem import Problem
from fedbilevel.core.sets import UNCONSTRAINED, Box, Sets
from fedbilevel.settings import choice, count
from fedbilevel.tasks.base import STORM, THREE_ROUNDS, Better, SuitedTable, Task, mefbo_steps, simfbo_steps, suit
from fedbilevel.tasks.classification import holdings, split
from fedbilevel.tasks.data import partition
from fedbilevel.tasks.declare import task

WEAKEST, STRONGEST = 1e-3, 10.0  # decay, where it is confined to a box


class Patients(NamedTuple):
    """Standardised features and a last one that is always 1, and 1 for a benign or 0 for a malignant tumour."""

    features: Array
    benign: Array


def logistic_loss(y: Array, patients: Patients) -> Array:
    """-log of the probability given to the true outcome, for each patient."""
    score = patients.features @ y
    return jax.nn.softplus(score) - patients.benign * score


def f(x: Array, y: Array, patients: Patients) -> Array:
    """The loss on held-out patients."""
    return logistic_loss(y, patients).mean()


def g_log(x: Array, y: Array, patients: Patients) -> Array:
    """The loss with weight decay exp(x)."""
    return logistic_loss(y, patients).mean() + 0.5 * jnp.exp(x) @ y**2


def g_box(x: Array, y: Array, patients: Patients) -> Array:
    """The loss with weight decay x."""
    return logistic_loss(y, patients).mean() + 0.5 * x @ y**2


def accuracy(x: Array, y: Array, patients: Patients) -> Array:
    """The share of patients whose outcome is the more probable one."""
    return jnp.mean(jnp.sign(patients.features @ y) == 2 * patients.benign - 1)


@task
class Regularisation:
    """Learn a weight decay for each feature of a logistic regression across hospitals."""

    headline: ClassVar[str] = "test_loss"
    better: ClassVar[Better] = {"test_loss": "lower", "test_accuracy": "higher"}
    suited: ClassVar[SuitedTable] = {
        "regularisation": suit(
            "by trial",
            fedbioacc=dict(eta=2, gamma=0.3, tau=0.15, c_u=0.2, **STORM),
            fedbio=dict(eta=2, gamma=0.3, tau=0.15),
            simfbo=simfbo_steps(2, 0.3, 0.15),
            shrofbo=simfbo_steps(2, 0.3, 0.15),
            mefbo=dict(mefbo_steps(6, 0.1, 0.1), penalty=3, growth=0.01),
            fedmbo=dict(alpha=2, beta=0.3, smoothness=5, **THREE_ROUNDS),
            fednest=dict(alpha=2, beta=0.3, smoothness=5, **THREE_ROUNDS),
            lfednest=dict(alpha=2, beta=0.3, smoothness=5, **THREE_ROUNDS),
            stocbio=dict(alpha=2, beta=0.1, smoothness=5, **THREE_ROUNDS),
            commfedbio=dict(alpha=2, beta=0.3, tau=0.15, lower_rounds=3, system_rounds=3),
            fbo_aggitd=dict(alpha=2, beta=0.3, neumann_step=0.15),
            local_bsgvr=dict(eta=2, gamma=0.3, tau=0.15, neumann_order=5),
            adafbio=dict(eta=0.2, gamma=0.03, tau=0.15, neumann_order=5),
            mrbo=dict(eta=2, gamma=0.3, tau=0.15, neumann_order=5),
        )
    }

    clients: int = count(8, "number of hospitals")
    partition: str = partition.way("dirichlet:1", "how patients are dealt to hospitals")
    decay: str = choice("log", "x: the logarithm of the decay, or the decay confined to a box", ("log", "box"))
    batch_size: int = count(16, "patients in a minibatch")
    data_seed: int = count(0, "random seed of the split", least=0)

    def build(self, data: str = "") -> Task:
        """The task; its data is bundled."""
        from sklearn.datasets import load_breast_cancer

        features, benign = load_breast_cancer(return_X_y=True)
        order = np.random.default_rng(self.data_seed).permutation(len(benign))
        test, rest = order[:149], order[149:]
        features = (features - features[rest].mean(0)) / features[rest].std(0)
        features = np.concatenate([features, np.ones((len(features), 1))], 1)

        def patients(part: np.ndarray) -> Patients:
            return Patients(jnp.asarray(features[part]), jnp.asarray(benign[part], float))

        parts = [rest[p] for p in partition.deal(self.partition, benign[rest], self.clients, self.data_seed)]
        largest = max(map(len, parts))
        train, validation = split(parts, (largest + 1) // 2, largest // 2, self.data_seed, "regularisation")
        g, sets = (g_log, UNCONSTRAINED) if self.decay == "log" else (g_box, Sets(x=Box(WEAKEST, STRONGEST)))
        problem = Problem(f, g, sets, tests=(("test_loss", f), ("test_accuracy", accuracy)))
        population = Population.build(
            problem, [patients(p) for p in validation], [patients(p) for p in train], batch_size=self.batch_size
        )
        unseen = patients(test)

        def metrics(x: Array, y: Array) -> dict[str, Array]:
            return {name: test(x, y, unseen) for name, test in problem.tests}

        held = holdings(benign, ("malignant", "benign"), training=train, validation=validation)
        dimension = features.shape[1]
        start = jnp.full(dimension, np.log(0.1) if self.decay == "log" else 0.1)
        return Task(population, start, jnp.zeros(dimension), metrics, holdings=held)
