"""`fb.solve` on its defaults, on bilevel problems as a stranger would write them, against exact hypergradients on pooled data.

    JAX_ENABLE_X64=1 python benchmarks/unseen.py [--rounds 500] [CASE ...]

None of these was looked at while FedPace was developed. For each the start, h(x) = f(x, y*(x)) at the x of the solution, where
y*(x) is found anew by Newton's method, f as the run reports it, and the least h that L-BFGS finds from the same start. For
networks y*(x) is what Adam finds, and nothing says what the least h is.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize
from sklearn.datasets import load_diabetes, load_digits, load_wine

import fedbilevel as fb
from fedbilevel.core.participation import Dropouts, Uniform
from fedbilevel.core.sets import Box, Simplex

CLIENTS = 5
NEWTON_STEPS, ENOUGH = 60, 1e-9  # of the lower level's reference, and the gradient at which it has arrived


class Case(NamedTuple):
    """A problem, and how `solve` is called on it."""

    f: Callable[..., Array]
    g: Callable[..., Array]
    x: Any
    y: Any
    lower: Sequence[Any]
    upper: Sequence[Any]
    options: dict[str, Any] = {}  # noqa: RUF012 (never modified)
    inside: tuple[float, float] | None = None  # the bounds of x, for the reference
    reference: bool = True  # whether the lower level is convex and has one


def parted(columns: dict[str, np.ndarray], clients: int = CLIENTS, by: np.ndarray | None = None) -> tuple[list[Any], list[Any]]:
    """Rows for g and for f of clients that have equal shares, sorted by a column if one is given."""
    order = np.random.default_rng(0).permutation(len(columns["label"])) if by is None else np.argsort(by, kind="stable")
    shares = [{name: column[part] for name, column in columns.items()} for part in np.array_split(order, clients)]
    first, second = ([{name: column[k::2] for name, column in share.items()} for share in shares] for k in (0, 1))
    return first, second


def squares(x: Any, y: Any, rows: Any) -> Array:
    return jnp.mean((rows["features"] @ y["slope"] + y["intercept"] - rows["label"]) ** 2)


def cross_entropy(scores: Array, labels: Array) -> Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1))


def decayed(x: Any, y: Any, rows: Any) -> Array:
    return squares(x, y, rows) + jnp.sum(jnp.exp(x) * y["slope"] ** 2)


def small(y: Any) -> Array:
    """A little weight decay, so that y*(x) is one."""
    return 1e-2 * (jnp.sum(y["slope"] ** 2) + jnp.sum(y["intercept"] ** 2))


def linear(y: Any, rows: Any) -> Array:
    return rows["features"] @ y["slope"] + y["intercept"]


def standardised(features: np.ndarray) -> np.ndarray:
    return (features - features.mean(0)) / np.maximum(features.std(0), 1e-9)


def diabetes() -> dict[str, np.ndarray]:
    features, label = load_diabetes(return_X_y=True)
    return {"features": standardised(features), "label": (label - label.mean()) / label.std()}


def wine() -> dict[str, np.ndarray]:
    features, label = load_wine(return_X_y=True)
    return {"features": standardised(features), "label": label}


RIDGE = {"slope": np.zeros(10), "intercept": np.zeros(())}
SOFTMAX = {"slope": np.zeros((13, 3)), "intercept": np.zeros(3)}


def wine_loss(x: Any, y: Any, rows: Any) -> Array:
    return cross_entropy(linear(y, rows), rows["label"])


def ridge() -> Case:
    """One ridge strength for each column."""
    lower, upper = parted(diabetes())
    return Case(squares, decayed, np.zeros(10), RIDGE, lower, upper)


def raw_columns() -> Case:
    """The same on columns as they were measured, with deviations between 0.5 and 35, and labels in their hundreds."""
    features, label = load_diabetes(return_X_y=True, scaled=False)
    lower, upper = parted({"features": features, "label": label})
    return Case(squares, decayed, np.zeros(10), RIDGE, lower, upper)


def softmax_decay() -> Case:
    """One weight decay for a softmax regression, at clients with one or two classes each."""
    columns = wine()
    lower, upper = parted(columns, by=columns["label"])

    def g(x: Any, y: Any, r: Any) -> Array:
        return wine_loss(x, y, r) + jnp.exp(x) * jnp.sum(y["slope"] ** 2) + 1e-3 * jnp.sum(y["intercept"] ** 2)

    return Case(wine_loss, g, np.array(1.0), SOFTMAX, lower, upper)


def class_weights() -> Case:
    """Weights of the classes in g, where one class is rare, for a balanced f."""
    columns = wine()
    rare = np.flatnonzero(columns["label"] == 2)[6:]
    few = {name: np.delete(column, rare, 0) for name, column in columns.items()}
    lower, upper = parted(few)[0], parted(columns)[1]

    def g(x: Any, y: Any, r: Any) -> Array:
        each = -jnp.take_along_axis(jax.nn.log_softmax(linear(y, r)), r["label"][:, None], 1)[:, 0]
        return jnp.mean(3 * jax.nn.softmax(x)[r["label"]] * each) + small(y)

    return Case(wine_loss, g, np.zeros(3), SOFTMAX, lower, upper)


def kernel_scale() -> Case:
    """Width and ridge of a radial kernel on 20 centres."""
    columns = diabetes()
    lower, upper = parted(columns)
    centres = columns["features"][:20]

    def fit(x: Any, y: Any, r: Any) -> Array:
        distances = jnp.sum((r["features"][:, None] - centres) ** 2, -1)
        return jnp.mean((jnp.exp(-distances * jnp.exp(x[0])) @ y - r["label"]) ** 2)

    def g(x: Any, y: Any, r: Any) -> Array:
        return fit(x, y, r) + jnp.exp(x[1]) * jnp.sum(y**2)

    return Case(fit, g, np.array([-3.0, -3.0]), np.zeros(20), lower, upper)


def domain_weights() -> Case:
    """A weight on a simplex for each of five domains, two of which have labels of the opposite sign."""
    columns = diabetes()
    lower, upper = parted(columns)
    for m, rows in enumerate(lower):
        rows["domain"] = np.full(len(rows["label"]), m)
        if m < 2:
            rows["label"] = -rows["label"]

    def g(x: Any, y: Any, r: Any) -> Array:
        each = (r["features"] @ y["slope"] + y["intercept"] - r["label"]) ** 2
        return jnp.mean(CLIENTS * x[r["domain"]] * each) + small(y)

    return Case(squares, g, np.full(5, 0.2), RIDGE, lower, upper, {"x_set": Simplex()}, reference=False)


def row_weights() -> Case:
    """A weight for each of 178 rows, σ(x), of which a third have a wrong label; clients are drawn and drop out."""
    columns = wine()
    columns["row"] = np.arange(len(columns["label"]))
    lower, upper = parted(columns)
    draw = np.random.default_rng(1)
    for rows in lower:
        wrong = draw.random(len(rows["label"])) < 1 / 3
        rows["label"] = np.where(wrong, (rows["label"] + 1) % 3, rows["label"])

    def g(x: Any, y: Any, r: Any) -> Array:
        each = -jnp.take_along_axis(jax.nn.log_softmax(linear(y, r)), r["label"][:, None], 1)[:, 0]
        return jnp.mean(jax.nn.sigmoid(x[r["row"]]) * each) + small(y)

    dropping = Dropouts(Uniform(3), 0.3)
    return Case(wine_loss, g, np.zeros(len(columns["label"])), SOFTMAX, lower, upper, {"participation": dropping})


def box() -> Case:
    """Ridge strengths that must stay between e⁻¹ and e."""
    return ridge()._replace(options={"x_set": Box(-1.0, 1.0)}, inside=(-1.0, 1.0))


def unlike_clients() -> Case:
    """Ridge at clients sorted by their labels, whose noise and scale differ tenfold."""
    columns = diabetes()
    lower, upper = parted(columns, by=columns["label"])
    for m in range(CLIENTS):
        for rows in (lower[m], upper[m]):
            rows["features"], rows["label"] = rows["features"] * 10 ** (m / 4 - 0.5), rows["label"] * 10 ** (0.5 - m / 4)
    return ridge()._replace(lower=lower, upper=upper)


def tiny_clients() -> Case:
    """Thirty clients with three rows for each loss."""
    some = {name: column[:180] for name, column in diabetes().items()}
    lower, upper = parted(some, 30)
    return ridge()._replace(lower=lower, upper=upper, options={"clients_per_round": 10})


def network() -> Case:
    """The weight decays of a two-layer network's layers, on digits, with minibatches."""
    digits = load_digits()
    lower, upper = parted({"features": digits.data / 16, "label": digits.target})
    lower = [{name: column[:60] for name, column in rows.items()} for rows in lower]
    draw = np.random.default_rng(0)
    y = {"a": draw.normal(0, 0.2, (64, 16)), "b": np.zeros(16), "c": draw.normal(0, 0.3, (16, 10)), "d": np.zeros(10)}

    def f(x: Any, y: Any, r: Any) -> Array:
        return cross_entropy(jnp.tanh(r["features"] @ y["a"] + y["b"]) @ y["c"] + y["d"], r["label"])

    def g(x: Any, y: Any, r: Any) -> Array:
        return f(x, y, r) + jnp.exp(x[0]) * jnp.sum(y["a"] ** 2) + jnp.exp(x[1]) * jnp.sum(y["c"] ** 2)

    return Case(f, g, np.array([-2.0, -2.0]), y, lower, upper, {"batch_size": 32}, reference=False)


def network_full_batch() -> Case:
    """The same without minibatches."""
    return network()._replace(options={})


def network_wrong_labels() -> Case:
    """The same from decays of e⁻⁸, where four in ten labels of g are random."""
    case, draw = network()._replace(x=np.array([-8.0, -8.0])), np.random.default_rng(1)
    for rows in case.lower:
        wrong = draw.random(len(rows["label"])) < 0.4
        rows["label"] = np.where(wrong, draw.integers(0, 10, len(wrong)), rows["label"])
    return case


CASES: dict[str, Callable[[], Case]] = {
    "ridge": ridge,
    "raw-columns": raw_columns,
    "softmax-decay": softmax_decay,
    "class-weights": class_weights,
    "kernel-scale": kernel_scale,
    "domain-weights": domain_weights,
    "row-weights": row_weights,
    "box": box,
    "unlike-clients": unlike_clients,
    "tiny-clients": tiny_clients,
    "network": network,
    "network, full batch": network_full_batch,
    "network, wrong labels": network_wrong_labels,
}


class Pooled:
    """h and its gradient on the average over clients, by Newton's method and implicit differentiation."""

    def __init__(self, case: Case) -> None:
        flat_y, self.y_tree = ravel_pytree(jax.tree.map(jnp.asarray, case.y))
        flat_x, self.x_tree = ravel_pytree(jax.tree.map(jnp.asarray, case.x))
        self.start, self.y = np.asarray(flat_x), flat_y

        given = np.asarray(case.options.get("weights", np.ones(len(case.lower))))

        def mean(loss: Callable[..., Array], clients: Sequence[Any]) -> Callable[[Array, Array], Array]:
            pairs = list(zip(given / given.sum(), clients, strict=True))
            return lambda x, y: sum(weight * loss(self.x_tree(x), self.y_tree(y), rows) for weight, rows in pairs)

        f, g = mean(case.f, case.upper), mean(case.g, case.lower)
        self.g, self.gy, self.gyy = jax.jit(g), jax.jit(jax.grad(g, 1)), jax.jit(jax.hessian(g, 1))
        self.f = jax.jit(jax.value_and_grad(f, (0, 1)))
        self.through_y = jax.jit(lambda x, y, u: jax.grad(lambda x: jnp.vdot(jax.grad(g, 1)(x, y), u))(x))

    def solution(self, x: np.ndarray) -> np.ndarray:
        """y*(x)"""
        y = np.asarray(self.y)
        for _ in range(NEWTON_STEPS):
            gradient = np.asarray(self.gy(x, y))
            if np.linalg.norm(gradient) < ENOUGH:
                break
            step, a = np.linalg.solve(self.gyy(x, y), gradient), 1.0
            while self.g(x, y - a * step) > self.g(x, y) - 1e-4 * a * gradient @ step and a > 1e-8:
                a /= 2
            y = y - a * step
        return y

    def h(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """h(x) and its gradient."""
        y = self.solution(x)
        value, (fx, fy) = self.f(x, y)
        u = np.linalg.solve(self.gyy(x, y), fy)
        return float(value), np.asarray(fx - self.through_y(x, y, u))


def trained_anew(case: Case, x: Any, steps: int = 4000) -> float:
    """f at a y that is trained on g with this x from where it starts, by Adam on all rows."""
    start, y_tree = ravel_pytree(jax.tree.map(jnp.asarray, case.y))
    adam = optax.adam(1e-2)

    def mean(loss: Callable[..., Array], clients: Sequence[Any], y: Array) -> Array:
        return jnp.mean(jnp.stack([loss(x, y_tree(y), rows) for rows in clients]))

    def one(_: Any, carry: Any) -> Any:
        y, state = carry
        change, state = adam.update(jax.grad(lambda y: mean(case.g, case.lower, y))(y), state)
        return optax.apply_updates(y, change), state

    y, _ = jax.jit(lambda: jax.lax.fori_loop(0, steps, one, (start, adam.init(start))))()
    return float(mean(case.f, case.upper, y))


def report(cases: Mapping[str, Callable[[], Case]], description: str) -> None:
    """Read the command line, and print a line for each case."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases))
    given = parser.parse_args()
    print(f"{'case':22} {'h at start':>10} {'h found':>10} {'f reported':>10} {'least h':>10}  warned")
    for name in given.cases or cases:
        case = cases[name]()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = fb.solve(
                    case.f, case.g, case.x, case.y, lower=case.lower, upper=case.upper, rounds=given.rounds, **case.options
                )
            except fb.Diverged as error:
                print(f"{name:22} {error}")
                continue
        said = " ".join(str(w.message).split(".")[0] for w in warned)
        reported = [found.history[0]["upper_loss"], found.history[-1]["upper_loss"]]
        if not case.reference:
            values = (trained_anew(case, x) for x in (case.x, found.x))
            print(
                f"{name:22} {' '.join(f'{value:10.4g}' for value in values)} {reported[1]:10.4g} {'':>10}  {said}", flush=True
            )
            continue
        pooled = Pooled(case)
        x = np.asarray(ravel_pytree(found.x)[0])
        bounds = case.inside and [case.inside] * x.size
        least = minimize(pooled.h, pooled.start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 200})
        values = pooled.h(pooled.start)[0], pooled.h(x)[0], reported[1], least.fun
        print(f"{name:22} " + " ".join(f"{value:10.4g}" for value in values) + f"  {said}", flush=True)


if __name__ == "__main__":
    report(CASES, __doc__)
