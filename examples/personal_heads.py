"""Personal heads on a shared representation: every client has its own lower level.

Eight clients recognise digits, but each numbers the ten classes in its own way, so no head could serve them all.
Together they learn a representation, x, and each learns its own head on top, y: a local lower level.

    python examples/personal_heads.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import fedbilevel as fb

CLIENTS, WIDTH = 8, 24
rng = np.random.default_rng(0)
digits = load_digits()
order = rng.permutation(len(digits.target))
parts = np.array_split(order, CLIENTS)
own_names = [rng.permutation(10) for _ in range(CLIENTS)]
clients = [
    {"image": (digits.data[p] / 16).astype(np.float32), "label": names[digits.target[p]]}
    for p, names in zip(parts, own_names, strict=True)
]
training, validation, test = (
    [jax.tree.map(lambda a, k=k: a[k::3], c) for c in clients] for k in range(3)
)  # each client's own samples


def scores(x, y, images):
    return jnp.tanh(images @ x["weights"] + x["bias"]) @ y["weights"] + y["bias"]


def f(x, y, rows):
    chances = jax.nn.log_softmax(scores(x, y, rows["image"]))
    return -jnp.take_along_axis(chances, rows["label"][:, None], 1).mean()


def g(x, y, rows):
    return f(x, y, rows) + 5e-3 * (jnp.sum(y["weights"] ** 2) + jnp.sum(y["bias"] ** 2))


def accuracies(x, heads):  # here `heads` has a row for every client
    each = [
        jnp.mean(scores(x, jax.tree.map(lambda h, m=m: h[m], heads), own["image"]).argmax(1) == own["label"])
        for m, own in enumerate(test)
    ]
    return {"mean_accuracy": jnp.stack(each).mean(), "worst_accuracy": jnp.stack(each).min()}


x = {"weights": jnp.asarray(rng.normal(0, 0.3, (64, WIDTH))), "bias": jnp.zeros(WIDTH)}
y = {"weights": jnp.zeros((WIDTH, 10)), "bias": jnp.zeros(10)}
solution = fb.solve(
    f,
    g,
    x,
    y,
    lower=training,
    upper=validation,
    metrics=accuracies,
    rounds=100,
    every=25,
    algorithm=fb.FedPaceLocal(),
)
for row in solution.history:
    print(f"round {row['rounds']:4d}: accuracy {row['mean_accuracy']:.3f}, of the worst client {row['worst_accuracy']:.3f}")
