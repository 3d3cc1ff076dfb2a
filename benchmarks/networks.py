"""Hyperparameters of small networks, for `fb.solve` on its defaults. `benchmarks/unseen.py` says how they are judged.

    JAX_ENABLE_X64=1 python benchmarks/networks.py [--rounds 500] [CASE ...]

FedPace's rules for x of few entries were developed on the first four (`DEVELOPED_ON`) and three of `unseen.py`. The next three
had been looked at with earlier forms of these rules, and the last two were run once, afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from sklearn.datasets import load_digits
from strangers import tumours
from unseen import Case, cross_entropy, diabetes, parted, report, wine


def digits() -> dict[str, np.ndarray]:
    data = load_digits()
    return {"features": data.data / 16, "label": data.target}


def layers(*sizes: int, seed: int) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [{"w": draw.normal(0, 1 / np.sqrt(a), (a, b)), "b": np.zeros(b)} for a, b in itertools.pairwise(sizes)]


def scores(y: Any, r: Any, bend: Callable[[Array], Array] = jnp.tanh) -> Array:
    z = r["features"]
    for layer in y[:-1]:
        z = bend(z @ layer["w"] + layer["b"])
    return z @ y[-1]["w"] + y[-1]["b"]


def fit(x: Any, y: Any, r: Any) -> Array:
    return cross_entropy(scores(y, r), r["label"])


def decays(x: Any, y: Any) -> Array:
    return sum(jnp.exp(own) * jnp.sum(layer["w"] ** 2) for own, layer in zip(x, y, strict=True))


def few(clients: list[Any], rows: int) -> list[Any]:
    return [{name: column[:rows] for name, column in client.items()} for client in clients]


def mislabelled(clients: list[Any], share: float, classes: int, seed: int) -> list[Any]:
    draw, out = np.random.default_rng(seed), []
    for rows in clients:
        size = len(rows["label"])
        wrong = draw.random(size) < share
        out.append({**rows, "label": np.where(wrong, draw.integers(0, classes, size), rows["label"])})
    return out


def decayed(f: Callable[..., Array], start: float, y: Any, lower: Any, upper: Any, **options: Any) -> Case:
    """A weight decay for each layer."""
    x = np.full(len(y), start)
    return Case(f, lambda x, y, r: f(x, y, r) + decays(x, y), x, y, lower, upper, options, reference=False)


def wine_decays() -> Case:
    """Three clients with wrong labels."""
    lower, upper = parted(wine(), 3)
    return decayed(fit, -5.0, layers(13, 12, 3, seed=31), mislabelled(lower, 0.3, 3, 21), upper, batch_size=8)


def temperature() -> Case:
    """Temperature of g's softmax and a decay, 4 of 10 clients a round."""
    lower, upper = parted(digits(), 10)

    def g(x: Any, y: Any, r: Any) -> Array:
        return cross_entropy(jnp.exp(x[0]) * scores(y, r), r["label"]) + decays([x[1]] * 2, y)

    options = {"batch_size": 24, "clients_per_round": 4}
    lower = mislabelled(few(lower, 40), 0.2, 10, 23)
    return Case(fit, g, np.array([1.0, -6.0]), layers(64, 20, 10, seed=35), lower, upper, options, reference=False)


def label_smoothing() -> Case:
    """Label smoothing and a decay."""
    lower, upper = parted(digits(), 8)

    def f(x: Any, y: Any, r: Any) -> Array:
        return cross_entropy(scores(y, r, jax.nn.softplus), r["label"])

    def g(x: Any, y: Any, r: Any) -> Array:
        logs, share = jax.nn.log_softmax(scores(y, r, jax.nn.softplus)), jax.nn.sigmoid(x[0])
        picked = jnp.take_along_axis(logs, r["label"][:, None], 1)[:, 0]
        return -jnp.mean((1 - share) * picked + share * jnp.mean(logs, 1)) + decays([x[1]] * 2, y)

    lower = mislabelled(few(lower, 50), 0.3, 10, 11)
    return Case(f, g, np.array([-3.0, -7.0]), layers(64, 32, 10, seed=9), lower, upper, {"batch_size": 10}, reference=False)


def three_layers() -> Case:
    """Four clients sorted by class."""
    columns = digits()
    lower, upper = parted(columns, 4, by=columns["label"])
    return decayed(fit, -6.0, layers(64, 24, 16, 10, seed=3), mislabelled(few(lower, 100), 0.25, 10, 7), upper, batch_size=16)


def rare_classes() -> Case:
    """Weights of ten classes, five of them rare in g, 3 of 6 clients a round."""
    lower, upper = parted(digits(), 6)
    kept = [np.flatnonzero((rows["label"] < 5) | (np.arange(len(rows["label"])) % 10 == 0)) for rows in lower]
    lower = [{k: v[own] for k, v in rows.items()} for rows, own in zip(lower, kept, strict=True)]

    def g(x: Any, y: Any, r: Any) -> Array:
        each = -jnp.take_along_axis(jax.nn.log_softmax(scores(y, r)), r["label"][:, None], 1)[:, 0]
        return jnp.mean(10 * jax.nn.softmax(x)[r["label"]] * each) + 2e-3 * sum(jnp.sum(layer["w"] ** 2) for layer in y)

    options = {"batch_size": 20, "clients_per_round": 3}
    lower = few(lower, min(map(len, kept)))
    return Case(fit, g, np.zeros(10), layers(64, 20, 10, seed=5), lower, upper, options, reference=False)


def domains() -> Case:
    """Weights of six domains, two of them mislabelled."""
    lower, upper = parted(digits(), 6)
    lower = [{**rows, "domain": np.full(80, m)} for m, rows in enumerate(few(lower, 80))]
    lower = [{**rows, "label": (rows["label"] + 3) % 10} if m in (1, 4) else rows for m, rows in enumerate(lower)]

    def g(x: Any, y: Any, r: Any) -> Array:
        return 6 * jax.nn.softmax(x)[r["domain"][0]] * fit(x, y, r) + 1e-3 * sum(jnp.sum(layer["w"] ** 2) for layer in y)

    return Case(fit, g, np.zeros(6), layers(64, 16, 10, seed=13), lower, upper, {"batch_size": 32}, reference=False)


def regression() -> Case:
    """Full batches."""

    def f(x: Any, y: Any, r: Any) -> Array:
        return jnp.mean((scores(y, r)[:, 0] - r["label"]) ** 2)

    return decayed(f, -9.0, layers(10, 16, 1, seed=33), *parted(diabetes(), 4))


def tumour_decays() -> Case:
    """Six clients with twenty rows for g, a quarter of which have the wrong label."""
    lower, upper = parted(tumours(), 6)
    draw = np.random.default_rng(41)
    lower = [{**rows, "label": np.where(draw.random(20) < 0.25, 1 - rows["label"], rows["label"])} for rows in few(lower, 20)]

    def f(x: Any, y: Any, r: Any) -> Array:
        return jnp.mean(jax.nn.softplus((1 - 2 * r["label"]) * scores(y, r, jax.nn.softplus)[:, 0]))

    return decayed(f, -7.0, layers(30, 10, 1, seed=43), lower, upper, batch_size=10)


def offsets() -> Case:
    """An offset of g's scores for each class, the later ones of which are rarer."""
    lower, upper = parted(digits(), 5)
    kept = [np.random.default_rng(47).random(len(rows["label"])) < 0.8 ** rows["label"] for rows in lower]
    lower = [{k: v[own] for k, v in rows.items()} for rows, own in zip(lower, kept, strict=True)]

    def g(x: Any, y: Any, r: Any) -> Array:
        return cross_entropy(scores(y, r) + x, r["label"]) + 1e-3 * sum(jnp.sum(layer["w"] ** 2) for layer in y)

    lower = few(lower, min(int(own.sum()) for own in kept))
    return Case(fit, g, np.zeros(10), layers(64, 16, 10, seed=49), lower, upper, {"batch_size": 32}, reference=False)


DEVELOPED_ON: dict[str, Callable[[], Case]] = {
    "wine": wine_decays,
    "temperature": temperature,
    "label-smoothing": label_smoothing,
    "three-layers": three_layers,
}
CASES: dict[str, Callable[[], Case]] = {
    **DEVELOPED_ON,
    "rare-classes": rare_classes,
    "domains": domains,
    "regression": regression,
    "tumours": tumour_decays,
    "offsets": offsets,
}


if __name__ == "__main__":
    report(CASES, __doc__)
