"""Clinics with CSV tables of their own, some of whose labels are wrong, learn how far to trust each training row.

The tables have numbers, categories and empty cells. What standardises, fills in and encodes them is fitted from sums over the
clinics: no row leaves its table. x has a number for each training row, whose weight is its sigmoid; y is the classifier.

    python examples/clinic_tables.py                  # makes four unequal tables in ./clinics, and solves
    fedbilevel run examples/clinic_tables.py fedpace fedavg --rounds 100 --data clinics --out runs
"""

import jax
import jax.numpy as jnp

import fedbilevel as fb

NUMBERS = ["radius", "perimeter", "area", "smoothness", "compactness", "concavity", "concave points", "fractal dimension"]
GRADES = {"texture": ["low", "medium", "high"], "symmetry": []}  # the clinics need not say which textures occur
COLUMNS = fb.Columns("diagnosis", [*NUMBERS, *GRADES], {**GRADES, "diagnosis": []}, weight="weight", split="role")


@fb.task(headline="accuracy", better={"accuracy": "higher"}, columns=COLUMNS)
def cleaning(data: fb.Tables, lam: float = fb.real(0.01, "weight decay", least=0)) -> fb.Task:
    """Weigh the training rows of clinics, some of whose labels are wrong; the validation rows were checked."""

    def score(y, rows):
        return rows["features"] @ y[:-1] + y[-1]

    def losses(y, rows):
        return rows["weight"] * (jax.nn.softplus(score(y, rows)) - rows["label"] * score(y, rows))

    def f(x, y, rows):  # upper: the loss on checked rows
        return losses(y, rows).mean()

    def g(x, y, rows):  # lower: the loss on training rows, each with its weight
        return (jax.nn.sigmoid(x[rows["place"]]) * losses(y, rows)).mean() + lam * (y**2).sum()

    def accuracy(x, y, rows):
        return ((score(y, rows) > 0) == rows["label"]).mean()

    start = jnp.zeros(data.places), jnp.zeros(data.width + 1)
    return fb.Task.of(f, g, *start, lower=data.lower, upper=data.upper, row_metrics={"accuracy": accuracy})


def make_tables(folder):
    """Write tables as clinics might have them, and return which training labels are right."""
    import csv
    import pathlib

    import numpy as np
    from sklearn.datasets import load_breast_cancer

    pathlib.Path(folder).mkdir()
    bunch, rng, right = load_breast_cancer(), np.random.default_rng(0), []
    names = [name.removeprefix("mean ") for name in bunch.feature_names[:10]]
    grades = {name: np.quantile(bunch.data[:, names.index(name)], [1 / 3, 2 / 3]) for name in ("texture", "symmetry")}
    for m, rows in enumerate(np.split(rng.permutation(len(bunch.data)), [45, 169, 300])):
        with open(f"{folder}/{m}.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow([*names, "diagnosis", "role", "weight"])
            for row in rows:
                role = rng.choice(["train", "validation"], p=[2 / 3, 1 / 3])
                wrong = role == "train" and rng.random() < 0.3
                cells = {name: f"{value:.6g}" for name, value in zip(names, bunch.data[row], strict=False)}
                for name, cuts in grades.items():
                    cells[name] = ["low", "medium", "high"][np.searchsorted(cuts, bunch.data[row, names.index(name)])]
                cells = {name: "" if rng.random() < 0.05 else cell for name, cell in cells.items()}
                diagnosis = ["malignant", "benign"][bunch.target[row] ^ wrong]
                table.writerow([*cells.values(), diagnosis, role, rng.integers(1, 3)])
                right += [not wrong] if role == "train" else []
    return right


if __name__ == "__main__":
    from sklearn.metrics import roc_auc_score

    right = make_tables("clinics")
    solution = fb.solve(cleaning().build("clinics"), rounds=100)
    solution.save("cleaned.npz")
    print(f"validation accuracy: {solution.history[0]['accuracy']:.3f} -> {solution.metrics['accuracy']:.3f}")
    print(f"right labels told from wrong ones: {roc_auc_score(right, solution.x):.3f} (area under the ROC curve)")
    preprocessing = fb.load("cleaned.npz").preprocessing
    new = {name: [""] for name in preprocessing.columns.features} | {"radius": [21.5], "texture": ["high"]}
    probability = jax.nn.sigmoid(preprocessing.apply(new) @ solution.y[:-1] + solution.y[-1])
    print(f"a new patient is {preprocessing.classes[1]} with probability {float(probability[0]):.2f}")
