"""Equinox modules as x and y: a representation that all clients share, and a head trained on top.

x and y may be any pytrees of arrays. An Equinox module also holds functions and settings: `eqx.partition` takes out the
arrays, `eqx.combine` puts them back.

    pip install 'fedbilevel[examples]'
    python examples/equinox_model.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import fedbilevel as fb

CLIENTS = 6
digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target
parts = np.array_split(np.random.default_rng(0).permutation(len(labels)), CLIENTS + 1)
test, clients = parts[0], [{"image": images[p], "label": labels[p]} for p in parts[1:]]
training, validation = ([jax.tree.map(lambda a, k=k: a[k::2], c) for c in clients] for k in (0, 1))

first, second = jax.random.split(jax.random.key(0))
representation = eqx.nn.MLP(64, 24, width_size=32, depth=1, final_activation=jax.nn.tanh, key=first)
head = eqx.nn.Linear(24, 10, key=second)
x, x_rest = eqx.partition(representation, eqx.is_inexact_array)
y, y_rest = eqx.partition(head, eqx.is_inexact_array)


def scores(x, y, images):
    model, head = eqx.combine(x, x_rest), eqx.combine(y, y_rest)
    return jax.vmap(lambda image: head(model(image)))(images)


def f(x, y, rows):
    chances = jax.nn.log_softmax(scores(x, y, rows["image"]))
    return -jnp.take_along_axis(chances, rows["label"][:, None], 1).mean()


def g(x, y, rows):
    return f(x, y, rows) + 1e-2 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))


def accuracy(x, y):
    return {"test_accuracy": jnp.mean(scores(x, y, images[test]).argmax(1) == labels[test])}


solution = fb.solve(
    f,
    g,
    x,
    y,
    lower=training,
    upper=validation,
    batch_size=64,
    metrics=accuracy,
    rounds=400,
    every=100,
    algorithm=fb.SimFBO(eta_x=0.3, gamma_x=0.3, eta_y=0.5, gamma_y=0.5, eta_u=0.1, gamma_u=0.1, radius=10.0),
)
for row in solution.history:
    print(f"round {row['rounds']:4d}: test accuracy {row['test_accuracy']:.3f}")
trained = eqx.combine(solution.x, x_rest), eqx.combine(solution.y, y_rest)  # modules again
print("a digit:", int(trained[1](trained[0](images[test[0]])).argmax()), "truly", labels[test[0]])
