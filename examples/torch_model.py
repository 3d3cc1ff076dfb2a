"""A convolutional network of PyTorch, trained on labels that its clients clean together.

Six clients hold images of digits; 40 % of their training labels are random, and each has checked a few. x has a number for
each training sample, whose weight is its sigmoid; y has the network's parameters, which end up in the module.

    pip install 'fedbilevel[torch]'
    python examples/torch_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedbilevel as fb

CLIENTS, CHECKED = 6, 40
rng = np.random.default_rng(0)
digits = load_digits()
images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target
test, *parts = np.array_split(rng.permutation(len(labels)), CLIENTS + 1)
noisy = np.where(rng.random(len(labels)) < 0.4, rng.integers(0, 10, len(labels)), labels)
checked = [{"image": images[p[:CHECKED]], "label": labels[p[:CHECKED]]} for p in parts]
training = [{"image": images[p[CHECKED:]], "label": noisy[p[CHECKED:]], "place": p[CHECKED:]} for p in parts]

torch.manual_seed(0)
module = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)
)
network = fb.from_torch(module, images[:1])


def fit(y, rows):
    """The cross entropy of each row."""
    chances = jax.nn.log_softmax(network.apply(y, rows["image"]))
    return -jnp.take_along_axis(chances, rows["label"][:, None], 1)[:, 0]


def f(x, y, rows):
    return fit(y, rows).mean()


def g(x, y, rows):
    return (jax.nn.sigmoid(x[rows["place"]]) * fit(y, rows)).mean() + 1e-3 * sum(jnp.sum(p**2) for p in y.values())


def accuracy():
    """Of the module, on images that no client holds."""
    with torch.no_grad():
        return np.mean(module(torch.as_tensor(images[test])).argmax(1).numpy() == labels[test])


start = jnp.zeros(len(labels)), network.parameters
common = dict(lower=training, upper=checked, rounds=400, batch_size=32, every=100)
for name, algorithm in {
    "all samples trusted": fb.FedAvg(gamma=0.3),
    "weights learned": fb.SimFBO(gamma_x=200, eta_x=200, gamma_y=0.3, eta_y=0.3, gamma_u=0.2, eta_u=0.2),
}.items():
    solution = fb.solve(f, g, *start, algorithm=algorithm, **common)
    network.into(module, solution.y)
    print(f"{name}: the module's test accuracy is {accuracy():.3f}")
