"""Tune the regularisation of each feature across hospitals that may not share their patients.

Five hospitals of unequal size train one logistic regression. They choose which features to trust, and how far, by how the
model does on patients it was not trained on: x is the logarithm of each feature's weight decay, y is the model.

    python examples/tune_regularisation.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer

import fedbilevel as fb

bunch = load_breast_cancer()
features = ((bunch.data - bunch.data.mean(0)) / bunch.data.std(0)).astype(np.float32)
rows = np.random.default_rng(0).permutation(len(features))
test, rest = rows[:150], rows[150:]
hospitals = np.split(rest, [40, 130, 190, 310])


def f(x, y, patients):
    return jnp.mean(jax.nn.softplus((1 - 2 * patients["ill"]) * (patients["features"] @ y)))


def g(x, y, patients):
    return f(x, y, patients) + jnp.sum(jnp.exp(x) * y**2)


def own_metrics(x, y):
    return {"test_accuracy": jnp.mean((features[test] @ y > 0) == bunch.target[test])}


clients = [{"features": features[h], "ill": bunch.target[h]} for h in hospitals]
training, validation = ([jax.tree.map(lambda a, k=k: a[k::2], c) for c in clients] for k in (0, 1))
sizes = [len(h) for h in hospitals]
solution = fb.solve(
    f,
    g,
    jnp.zeros(30),
    jnp.zeros(30),
    lower=training,
    upper=validation,
    weights=sizes,
    algorithm=fb.SimFBO(gamma_x=5),
    rounds=600,
    metrics=own_metrics,
)
first, last = solution.history[0], solution.metrics
print(f"validation loss {first['upper_loss']:.3f} -> {last['upper_loss']:.3f}, test accuracy {last['test_accuracy']:.3f}")
decay = np.exp(np.asarray(solution.x))
for name, of in (("least", np.argsort(decay)[:3]), ("most", np.argsort(decay)[-3:])):
    print(f"{name} regularised: " + ", ".join(f"{bunch.feature_names[k]} ({decay[k]:.3f})" for k in of))
