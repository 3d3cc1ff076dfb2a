"""How well `fedbilevel clean` finds planted label errors, beside confident learning on pooled data and at each site alone.

python benchmarks/cleaning.py wine digits              scikit-learn's bundled tables
python benchmarks/cleaning.py mnist --data FOLDER      2,000 images in folders, as a user has them; needs the data set

The peer is cleanlab (C. G. Northcutt, L. Jiang and I. Chuang, Confident Learning, 2021; pip install 'fedbilevel[cleanlab]')
with its defaults, on probabilities that a logistic regression predicts in five-fold cross-validation, on the same features,
standardised over all sites. Some labels are replaced by other ones, uniformly; one row in ten was checked and is right, which
the peer is given too, as right labels among the others. A third of all rows is kept apart for the accuracy of a logistic
regression that is trained on the rows of all sites but those suspected.

    p@k        precision among the k least trusted rows, where k rows are wrong
    precision  of those suspected, how many are wrong
    recall     of those wrong, how many are suspected
    accuracy   on the rows kept apart
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn import datasets as bundled
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

import fedbilevel as fb
from fedbilevel.tasks.data import datasets
from fedbilevel.tasks.data.image_tables import SIDE

SITES, CHECKED, LEAST = 4, 0.1, 12  # sites, the share of checked rows, and the fewest rows of a site
IMAGES, PER_SET = ("mnist", "fashion-mnist"), 3000
TABLES = {name: getattr(bundled, f"load_{name}") for name in ("breast_cancer", "digits", "iris", "wine")}


class Rows(NamedTuple):
    """A site's rows: the checked ones first."""

    features: np.ndarray
    true: np.ndarray
    given: np.ndarray
    checked: np.ndarray
    images: np.ndarray | None


class Found(NamedTuple):
    """For each unchecked row of a site how far it is trusted, and whether it is suspected."""

    trust: np.ndarray
    suspected: np.ndarray


def load(name: str, folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Features, labels and, for images, the images."""
    if name in TABLES:
        return *TABLES[name](return_X_y=True), None
    source = datasets.load(name, folder)
    images, labels = source.images[:PER_SET], source.labels[:PER_SET]
    return np.stack([_small(image) for image in images]), labels, images


def _small(image: np.ndarray) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.fromarray(image).convert("L").resize((SIDE, SIDE)), float).ravel() / 255


def dealt(labels: np.ndarray, differ: bool, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows of sites that are alike, or whose classes differ (each class dealt by Dirichlet's distribution with 0.3)."""
    order = rng.permutation(len(labels))
    if not differ:
        return np.array_split(order, SITES)
    parts: list[list[int]] = [[] for _ in range(SITES)]
    for c in np.unique(labels):
        of = order[labels[order] == c]
        cuts = (np.cumsum(rng.dirichlet([0.3] * SITES))[:-1] * len(of)).astype(int)
        for part, more in zip(parts, np.split(of, cuts), strict=True):
            part.extend(more)
    for part in parts:
        while len(part) < LEAST:
            part.append(max(parts, key=len).pop())
    return [rng.permutation(part) for part in parts]


def planted(features: Any, labels: Any, images: Any, wrong: float, differ: bool, rng: np.random.Generator) -> list[Rows]:
    """The sites' rows with wrong labels among those that are not checked."""
    sites, classes = [], labels.max() + 1
    for part in dealt(labels, differ, rng):
        checked = np.arange(len(part)) < max(2, round(CHECKED * len(part)))
        given = labels[part].copy()
        replaced = ~checked & (rng.random(len(part)) < wrong)
        given[replaced] = (given[replaced] + rng.integers(1, classes, replaced.sum())) % classes
        sites.append(Rows(features[part], labels[part], given, checked, None if images is None else images[part]))
    return sites


def ours(sites: Sequence[Rows]) -> list[Found]:
    """`fedbilevel.clean` on tables, or on folders of images."""
    with tempfile.TemporaryDirectory() as folder:
        sources = [
            _table(rows) if rows.images is None else _folder(Path(folder) / str(m), rows) for m, rows in enumerate(sites)
        ]
        found = fb.clean(sources)
    each = []
    for rows, columns in zip(sites, found, strict=True):
        order = np.argsort([int(Path(row).stem) for row in columns["row"]])
        assert [str(label) for label in rows.given[~rows.checked]] == list(columns["label"][order])
        each.append(Found(columns["trust"][order], columns["suspected"][order]))
    return each


def _table(rows: Rows) -> dict[str, Any]:
    columns = {f"f{k}": column for k, column in enumerate(rows.features.T)}
    return {**columns, "label": [str(label) for label in rows.given], "checked": _words(rows.checked)}


def _words(checked: np.ndarray) -> list[str]:
    return ["yes" if one else "no" for one in checked]


def _folder(folder: Path, rows: Rows) -> Path:
    from PIL import Image

    assert rows.images is not None
    for k, (image, label, checked) in enumerate(zip(rows.images, rows.given, rows.checked, strict=True)):
        place = folder / "checked" / str(label) if checked else folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{k:06}.png")
    return folder


def confident(parts: Sequence[Rows], center: np.ndarray, spread: np.ndarray) -> list[Found]:
    """Confident learning on each of these alone."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    each = []
    for rows in parts:
        _, labels, counts = np.unique(rows.given, return_inverse=True, return_counts=True)
        folds = min(5, counts.min())
        trust, suspected = np.ones(len(labels)), np.zeros(len(labels), bool)
        if len(counts) > 1 and folds > 1:  # otherwise there is nothing to cross-validate
            model, how = LogisticRegression(max_iter=1000), StratifiedKFold(folds, shuffle=True, random_state=0)
            scaled = (rows.features - center) / spread
            probabilities = cross_val_predict(model, scaled, labels, cv=how, method="predict_proba")
            trust, suspected = get_label_quality_scores(labels, probabilities), find_label_issues(labels, probabilities)
        each.append(Found(trust[~rows.checked], suspected[~rows.checked]))
    return each


def numbers(sites: Sequence[Rows], found: Sequence[Found], test: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """The four numbers of a method."""
    wrong = np.concatenate([(rows.given != rows.true)[~rows.checked] for rows in sites])
    trust, suspected = (np.concatenate(part) for part in zip(*found, strict=True))
    least = np.argsort(trust, kind="stable")[: wrong.sum()]
    kept = [rows.checked.copy() for rows in sites]
    for keep, rows, one in zip(kept, sites, found, strict=True):
        keep[~rows.checked] = ~one.suspected
    features = np.concatenate([rows.features[keep] for keep, rows in zip(kept, sites, strict=True)])
    labels = np.concatenate([rows.given[keep] for keep, rows in zip(kept, sites, strict=True)])
    center, spread = features.mean(0), features.std(0) + 1e-9
    model = LogisticRegression(max_iter=1000).fit((features - center) / spread, labels)
    return {
        "p@k": wrong[least].mean(),
        "precision": wrong[suspected].mean() if suspected.any() else np.nan,
        "recall": suspected[wrong].mean(),
        "accuracy": model.score((test[0] - center) / spread, test[1]),
    }


def compared(name: str, folder: str, wrong: float, differ: bool, seed: int) -> dict[str, dict[str, float]]:
    """The numbers of all methods."""
    features, labels, images = load(name, folder)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    test, rest = np.split(order, [len(order) // 3])
    sites = planted(features[rest], labels[rest], None if images is None else images[rest], wrong, differ, rng)
    pool = Rows(*(np.concatenate(part) for part in list(zip(*sites, strict=True))[:4]), None)  # type: ignore[arg-type]
    center, spread = pool.features.mean(0), pool.features.std(0) + 1e-9
    pooled = confident([pool], center, spread)[0]
    cuts = np.cumsum([(~rows.checked).sum() for rows in sites])[:-1]
    oracle = [(rows.given != rows.true)[~rows.checked] for rows in sites]
    methods = {
        "fedbilevel clean": ours(sites),
        "confident learning, pooled": [Found(*pair) for pair in zip(*(np.split(part, cuts) for part in pooled), strict=True)],
        "confident learning, each site": confident(sites, center, spread),
        "nothing removed": [Found(np.ones(len(one)), np.zeros(len(one), bool)) for one in oracle],
        "all errors removed": [Found(1.0 - one, one) for one in oracle],
    }
    return {method: numbers(sites, found, (features[test], labels[test])) for method, found in methods.items()}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=[*TABLES, *IMAGES], metavar="SET", help=", ".join((*TABLES, *IMAGES)))
    parser.add_argument("--data", default="", help="folder of the data sets that are not bundled")
    parser.add_argument("--wrong", type=float, default=0.2, help="share of wrong labels (0.2)")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0 on (3)")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| data | sites | method | p@k | precision | recall | accuracy |\n|---|---|---|---|---|---|---|")
    for name in given.sets:
        for differ in (False, True):
            runs = [compared(name, given.data, given.wrong, differ, seed) for seed in range(given.seeds)]
            for method in runs[0]:
                means = {what: np.nanmean([run[method][what] for run in runs]) for what in runs[0][method]}
                spreads = {what: np.nanstd([run[method][what] for run in runs]) for what in means}
                found = [f"{means[what]:.3f} ± {spreads[what]:.3f}" for what in means]
                if method in ("nothing removed", "all errors removed"):
                    found[:3] = [""] * 3
                print(f"| {name} | {'differ' if differ else 'alike'} | {method} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
