"""Makes byzfl-0.0.11.json: what byzfl (Byzantine federated learning in PyTorch) makes of vectors and labels.

    pip install byzfl==0.0.11                   in an environment of its own: fedbilevel is not needed
    python tests/byzfl_values.py

Its mimic and infinite attacks and those that try strengths on the rule have no counterpart here.
"""

import importlib.metadata
import json
from pathlib import Path

import byzfl
import numpy as np
import torch
from byzfl.fed_framework.client import Client

FILE = Path(__file__).with_name("byzfl-0.0.11.json")
DECIMALS = 10
DRAWS = 500  # of the groups of bucketing, so that all that there can be are seen
CLASSES = 10
RULES = {  # as fedbilevel names them
    "median": lambda f: byzfl.Median(),
    "trimmed-mean": lambda f: byzfl.TrMean(f=f),
    "geometric-median(smoothing=0.1, iterations=3)": lambda f: byzfl.GeometricMedian(nu=0.1, T=3),
    "krum": lambda f: byzfl.Krum(f=f),
    "multi-krum": lambda f: byzfl.MultiKrum(f=f),
    "centred-clipping(radius=1.5, iterations=2)": lambda f: byzfl.CenteredClipping(L=2, tau=1.5),
}
ATTACKS = {
    "sign-flip": byzfl.SignFlipping(),
    "ipm:3:0.7": byzfl.InnerProductManipulation(tau=0.7),
    "alie:3:1.5": byzfl.ALittleIsEnough(tau=1.5),
}


def vectors(random, n, f):
    """Honest vectors of unlike lengths, after f that lie together far away."""
    drawn = random.standard_normal((n, 5)) * np.exp(random.standard_normal((n, 1)))
    drawn[:f] = 8 * random.standard_normal(5) + 0.3 * random.standard_normal((f, 5))
    return drawn.round(4)


def numbers(found):
    return np.round(np.asarray(found), DECIMALS).tolist()


def rules(random, f):
    v = vectors(random, 9, f)
    mixed = {"none": v, "nnm": byzfl.NNM(f=f)(v)}
    made = {before: {name: numbers(rule(f)(w)) for name, rule in RULES.items()} for before, w in mixed.items()}
    return {"vectors": v.tolist(), "byzantine": f, **made}


def bucketing(random, n, size, f):
    """All that each rule makes of vectors in random groups."""
    v, reached = vectors(random, n, f), {}
    for name, rule in RULES.items():
        drawn = [numbers(rule(f)(byzfl.Bucketing(s=size)(v))) for _ in range(DRAWS)]
        reached[name] = np.unique(np.round(drawn, DECIMALS - 2), axis=0).tolist()
    return {"vectors": v.tolist(), "byzantine": f, "bucket": size, "reached": reached}


def attacks(random):
    honest = vectors(random, 6, 0)
    return {"honest": honest.tolist(), **{name: numbers(attack(honest)) for name, attack in ATTACKS.items()}}


def noise(deviation):
    drawn = byzfl.Gaussian(sigma=deviation)(np.zeros((1, 100_000)))
    return {"strength": deviation, "mean": float(drawn.mean()), "deviation": float(drawn.std())}


class Liar(Client):
    """A client of byzfl's that keeps the labels it would learn instead of learning them."""

    def __init__(self, labels):
        self.labels, self.learned = labels, []
        self.labelflipping, self.nb_labels, self.device, self.store_per_client_metrics = True, CLASSES, "cpu", False
        self.model = torch.nn.Identity()

    def _sample_train_batch(self):
        return torch.zeros(len(self.labels), 1), torch.as_tensor(self.labels)

    def _backward_pass(self, inputs, targets, train_acc=False):
        self.learned.append(targets.tolist())

    def get_dict_gradients(self):
        return {}


def label_flip(random):
    """What a lying client learns in place of its labels, which it learns after that."""
    liar = Liar(random.integers(CLASSES, size=30))
    liar.compute_gradients()
    return {"classes": CLASSES, "labels": liar.labels.tolist(), "false": liar.learned[0]}


def main():
    random = np.random.default_rng(0)
    np.random.seed(0)  # which byzfl draws from
    made = {
        "byzfl": importlib.metadata.version("byzfl"),
        "rules": [rules(random, f) for f in (1, 2, 3) * 3],
        "bucketing": [bucketing(random, *case) for case in ((5, 2, 1), (6, 2, 1), (5, 3, 0))],
        "attacks": [attacks(random) for _ in range(2)],
        "noise": noise(2.0),
        "label-flip": label_flip(random),
    }
    FILE.write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
