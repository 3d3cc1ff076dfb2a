"""More problems as strangers would write them, for `fb.solve` on its defaults. `benchmarks/unseen.py` says how they are judged.

    JAX_ENABLE_X64=1 python benchmarks/strangers.py [--rounds 500] [CASE ...]

FedPace's limit on x's step was revised on the first eight (`DEVELOPED_ON`); the other eight were run once, afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from sklearn.datasets import load_breast_cancer, load_digits, load_linnerud
from unseen import (
    RIDGE,
    SOFTMAX,
    Case,
    cross_entropy,
    diabetes,
    linear,
    parted,
    report,
    ridge,
    small,
    squares,
    standardised,
    wine,
)

from fedbilevel.core.participation import Dropouts, Uniform
from fedbilevel.core.sets import Simplex


def counts() -> dict[str, np.ndarray]:
    """Diabetes' features, and counts that depend on three of them."""
    columns = diabetes()
    rate = np.exp(0.5 + columns["features"][:, [2, 3, 8]] @ [0.4, 0.3, 0.3])
    return {**columns, "label": np.random.default_rng(3).poisson(rate).astype(float)}


def poisson_loss(x: Any, y: Any, r: Any) -> Array:
    scores = linear(y, r)
    return jnp.mean(jnp.exp(scores) - r["label"] * scores)


def poisson() -> Case:
    """Poisson regression, a weight decay for each column."""
    lower, upper = parted(counts())

    def g(x: Any, y: Any, r: Any) -> Array:
        return poisson_loss(x, y, r) + jnp.sum(jnp.exp(x) * y["slope"] ** 2)

    return Case(poisson_loss, g, np.full(10, -2.0), RIDGE, lower, upper)


def huber() -> Case:
    """Huber's loss with labels in their hundreds, so that at the start nearly all rows are where it is linear."""
    columns = diabetes()
    columns["label"] = 150 + 77 * columns["label"]
    lower, upper = parted(columns)

    def f(x: Any, y: Any, r: Any) -> Array:
        away = linear(y, r) - r["label"]
        return jnp.mean(30 * (jnp.sqrt(900 + away**2) - 30))

    def g(x: Any, y: Any, r: Any) -> Array:
        return f(x, y, r) + jnp.sum(jnp.exp(x) * y["slope"] ** 2)

    return Case(f, g, np.zeros(10), RIDGE, lower, upper)


def two_clients() -> Case:
    """Two clients, one with ten times the other's rows and weight; x is a dictionary of two strengths."""
    lower, upper = parted(diabetes(), 11)
    joined = [[{k: np.concatenate([c[k] for c in some[1:]]) for k in some[0]}, some[0]] for some in (lower, upper)]

    def g(x: Any, y: Any, r: Any) -> Array:
        slope = y["slope"]
        return squares(x, y, r) + jnp.exp(x["flat"]) * jnp.sum(slope**2) + jnp.exp(x["rough"]) * jnp.sum(jnp.diff(slope) ** 2)

    x = {"flat": np.array(0.0), "rough": np.array(0.0)}
    return Case(squares, g, x, RIDGE, *joined, {"weights": [10.0, 1.0]})


def logistic(x: Any, y: Any, r: Any) -> Array:
    return jnp.mean(jax.nn.softplus((1 - 2 * r["label"]) * linear(y, r)))


def decayed_logistic(x: Any, y: Any, r: Any) -> Array:
    return logistic(x, y, r) + jnp.sum(jnp.exp(x) * y["slope"] ** 2) + 1e-3 * y["intercept"] ** 2


def tumours(by: str = "") -> dict[str, np.ndarray]:
    features, label = load_breast_cancer(return_X_y=True)
    return {"features": standardised(features), "label": label}


LOGISTIC = {"slope": np.zeros(30), "intercept": np.zeros(())}


def hundred_clients() -> Case:
    """A hundred clients with five or six rows, ten in a round, one in five of which drops out."""
    lower, upper = parted(tumours(), 100)
    options = {"participation": Dropouts(Uniform(10), 0.2)}
    return Case(logistic, decayed_logistic, np.full(30, -2.0), LOGISTIC, lower, upper, options)


def large_losses() -> Case:
    """Ridge with both losses times a million."""

    def scaled(loss: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, y, r: 1e6 * loss(x, y, r)

    plain = ridge()
    return plain._replace(f=scaled(plain.f), g=scaled(plain.g), options={"loss_bound": 1e12})


def minibatches() -> Case:
    """Ridge on minibatches of four rows, three clients in a round."""
    return ridge()._replace(options={"batch_size": 4, "clients_per_round": 3})


def smoothing() -> Case:
    """Label smoothing and weight decay where one label in five is wrong."""
    lower, upper = parted(wine())
    draw = np.random.default_rng(1)
    for rows in lower:
        rows["label"] = np.where(draw.random(len(rows["label"])) < 0.2, draw.integers(0, 3, len(rows["label"])), rows["label"])

    def f(x: Any, y: Any, r: Any) -> Array:
        return cross_entropy(linear(y, r), r["label"])

    def g(x: Any, y: Any, r: Any) -> Array:
        scores, share = jax.nn.log_softmax(linear(y, r)), jax.nn.sigmoid(x["smooth"])
        picked = jnp.take_along_axis(scores, r["label"][:, None], 1)[:, 0]
        return -jnp.mean((1 - share) * picked + share * jnp.mean(scores, 1)) + jnp.exp(x["decay"]) * small(y) * 100

    return Case(f, g, {"smooth": np.array(-3.0), "decay": np.array(-4.0)}, SOFTMAX, lower, upper)


def augmentation() -> Case:
    """How strong noise that is added to each column shall be in g, which has seen too few rows."""
    columns = tumours()
    columns["noise"] = np.random.default_rng(5).standard_normal(columns["features"].shape)
    lower, upper = parted(columns)
    lower = [{name: column[:12] for name, column in rows.items()} for rows in lower]

    def g(x: Any, y: Any, r: Any) -> Array:
        both = [{**r, "features": r["features"] + sign * jnp.exp(x) * r["noise"]} for sign in (1, -1)]
        return sum(logistic(x, y, rows) for rows in both) / 2 + small(y)

    return Case(logistic, g, np.full(30, -2.0), LOGISTIC, lower, upper)


def initialisation() -> Case:
    """Where a model should start that is then trained on few rows, and how close it should stay to that."""
    columns = diabetes()
    lower, upper = parted(columns)
    lower = [{name: column[:3] for name, column in rows.items()} for rows in lower]

    def g(x: Any, y: Any, r: Any) -> Array:
        return squares(x, y, r) + jnp.exp(x["stay"]) * sum(jnp.sum((y[k] - x[k]) ** 2) for k in y)

    return Case(squares, g, {**RIDGE, "stay": np.array(-1.0)}, RIDGE, lower, upper)


def matrix() -> Case:
    """Ten outputs at once from 64 pixels: one decay for each of the 64, and y a matrix."""
    digits = load_digits()
    columns = {"features": digits.data / 16 - 0.3, "label": np.eye(10)[digits.target] - 0.1}
    lower, upper = parted(columns, 8, by=digits.target)
    lower = [{name: column[:25] for name, column in rows.items()} for rows in lower]

    def f(x: Any, y: Any, r: Any) -> Array:
        return jnp.mean(jnp.sum((r["features"] @ y - r["label"]) ** 2, 1))

    def g(x: Any, y: Any, r: Any) -> Array:
        return f(x, y, r) + jnp.sum(jnp.exp(x)[:, None] * y**2)

    return Case(f, g, np.full(64, -3.0), np.zeros((64, 10)), lower, upper)


def barely_convex() -> Case:
    """Weights of five domains, on positive numbers, with a lower level that nothing regularises."""
    columns = diabetes()
    lower, upper = parted(columns)
    for m, rows in enumerate(lower):
        rows["domain"] = np.full(len(rows["label"]), m)
        rows["label"] = rows["label"] + (m == 3) * 3

    def g(x: Any, y: Any, r: Any) -> Array:
        return jnp.mean(5 * jax.nn.softmax(x)[r["domain"]] * (linear(y, r) - r["label"]) ** 2)

    return Case(squares, g, np.zeros(5), RIDGE, lower, upper)


def smooth_hinge() -> Case:
    """A support vector machine with a smoothed hinge: the margin's softness for each class, and a decay."""
    lower, upper = parted(tumours(), 6, by=tumours()["features"][:, 0])

    def hinge(y: Any, r: Any) -> Array:
        return 0.2 * jax.nn.softplus((1 - (2 * r["label"] - 1) * linear(y, r)) / 0.2)

    def f(x: Any, y: Any, r: Any) -> Array:
        return jnp.mean(hinge(y, r))

    def g(x: Any, y: Any, r: Any) -> Array:
        return jnp.mean(jnp.exp(x[:2])[r["label"]] * hinge(y, r)) + jnp.exp(x[2]) * jnp.sum(y["slope"] ** 2)

    return Case(f, g, np.array([0.0, 0.0, -1.0]), LOGISTIC, lower, upper)


def mixture() -> Case:
    """Shares on a simplex of five groups of features, whose decays are inverse to them."""
    lower, upper = parted(diabetes())
    group = np.arange(10) // 2

    def g(x: Any, y: Any, r: Any) -> Array:
        return squares(x, y, r) + 0.1 * jnp.sum(y["slope"] ** 2 / (5 * x[group] + 0.05))

    return Case(squares, g, np.full(5, 0.2), RIDGE, lower, upper, {"x_set": Simplex()}, reference=False)


def unequal_rows() -> Case:
    """Counts at eight clients with 6 to 160 rows, weighted by these, five in a round."""
    columns = counts()
    cuts = np.cumsum([6, 10, 16, 30, 50, 70, 100])
    parts = np.split(np.random.default_rng(0).permutation(442), cuts)
    lower, upper = ([{name: column[part][k::2] for name, column in columns.items()} for part in parts] for k in (0, 1))

    def g(x: Any, y: Any, r: Any) -> Array:
        return poisson_loss(x, y, r) + jnp.sum(jnp.exp(x) * y["slope"] ** 2)

    options = {"weights": [float(len(part)) for part in parts], "clients_per_round": 5}
    return Case(poisson_loss, g, np.full(10, -2.0), RIDGE, lower, upper, options)


def few_rows() -> Case:
    """Twenty rows in all of three outputs, at four clients."""
    data = load_linnerud()
    lower, upper = parted({"features": standardised(data.data), "label": standardised(data.target)}, 4)

    def f(x: Any, y: Any, r: Any) -> Array:
        return jnp.mean(jnp.sum((r["features"] @ y - r["label"]) ** 2, 1))

    def g(x: Any, y: Any, r: Any) -> Array:
        return f(x, y, r) + jnp.sum(jnp.exp(x) * y**2)

    return Case(f, g, np.full((3, 3), -3.0), np.zeros((3, 3)), lower, upper)


DEVELOPED_ON: dict[str, Callable[[], Case]] = {
    "poisson": poisson,
    "huber": huber,
    "two-clients": two_clients,
    "hundred-clients": hundred_clients,
    "large-losses": large_losses,
    "minibatches": minibatches,
    "smoothing": smoothing,
    "mixture": mixture,
}
CASES: dict[str, Callable[[], Case]] = {
    **DEVELOPED_ON,
    "augmentation": augmentation,
    "initialisation": initialisation,
    "matrix": matrix,
    "barely-convex": barely_convex,
    "smooth-hinge": smooth_hinge,
    "unequal-rows": unequal_rows,
    "few-rows": few_rows,
    "logistic, 20 a round": lambda: hundred_clients()._replace(options={"clients_per_round": 20}),
}


if __name__ == "__main__":
    report(CASES, __doc__)
