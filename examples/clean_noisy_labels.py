"""Clean noisy labels across clients: learn how far to trust each training sample.

Ten clients hold handwritten digits; 40 % of their training labels are random. Each also has a few samples whose labels
it has checked. x has a number for each training sample, whose weight is its sigmoid; y is the classifier.

    python examples/clean_noisy_labels.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import fedbilevel as fb

CLIENTS, CHECKED = 10, 20
rng = np.random.default_rng(0)
digits = load_digits()
order = rng.permutation(len(digits.target))
images, labels = digits.data[order].astype(np.float32) / 16, digits.target[order]
images, test_images, labels, test_labels = images[:-400], images[-400:], labels[:-400], labels[-400:]

parts = np.array_split(np.arange(len(labels)), CLIENTS)
noisy = np.where(rng.random(len(labels)) < 0.4, rng.integers(0, 10, len(labels)), labels)
checked = [{"image": images[p[:CHECKED]], "label": labels[p[:CHECKED]]} for p in parts]
training = [{"image": images[p[CHECKED:]], "label": noisy[p[CHECKED:]], "place": p[CHECKED:]} for p in parts]


def fit(y, rows):
    """The cross entropy of each row, for a linear classifier with ten outputs."""
    scores = jax.nn.log_softmax(rows["image"] @ y["weights"] + y["bias"])
    return -jnp.take_along_axis(scores, rows["label"][:, None], 1)[:, 0]


def f(x, y, rows):
    return fit(y, rows).mean()


def g(x, y, rows):
    return (jax.nn.sigmoid(x[rows["place"]]) * fit(y, rows)).mean() + 1e-3 * jnp.sum(y["weights"] ** 2)


def accuracy(x, y):
    return {"test_accuracy": jnp.mean((test_images @ y["weights"] + y["bias"]).argmax(1) == test_labels)}


start = jnp.zeros(len(labels)), {"weights": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}
common = dict(lower=training, upper=checked, rounds=400, batch_size=32, metrics=accuracy, every=40)
trusting = fb.solve(f, g, *start, algorithm=fb.FedAvg(gamma=0.5), **common)
cleaning = fb.solve(f, g, *start, algorithm=fb.SimFBO(gamma_x=200, eta_x=200, gamma_u=0.3, eta_u=0.3), **common)

used = np.concatenate([c["place"] for c in training])
auc = roc_auc_score((noisy == labels)[used], np.asarray(cleaning.x)[used])
print(f"test accuracy, all samples trusted: {trusting.metrics['test_accuracy']:.3f}")
print(f"test accuracy, weights learned:     {cleaning.metrics['test_accuracy']:.3f}")
print(f"right labels told from wrong ones:  {auc:.3f} (area under the ROC curve)")
