"""Cleaning tables: how far to trust each row of the sites' tables, learned from a few rows that were checked.

    min_x  Σ_m w_m ℓ(y*(x); checked rows of m),    y*(x) = argmin_y  Σ_m w_m mean_n s(x_mn) ℓ(y; row n of m) + λ |W|²

ℓ is the cross-entropy of a softmax regression y = (W, b) on the standardised columns, s the sigmoid. x_m, a number for each
unchecked row of site m, stays there (FedPace-Own). How far a row is trusted is the probability that the model, which has
learned from the rows in proportion to their weights s(x_mn), gives its label; it is suspected if another one is more probable.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.problem import Tree
from fedbilevel.errors import warn
from fedbilevel.settings import real, text
from fedbilevel.tasks.base import Better, SuitedTable, Task, suit
from fedbilevel.tasks.classification import cross_entropy, squared_norm
from fedbilevel.tasks.client_data import ClientData
from fedbilevel.tasks.data.columns import Columns
from fedbilevel.tasks.data.image_tables import PIXELS
from fedbilevel.tasks.data.tables import Tables
from fedbilevel.tasks.declare import task

IMAGES = "pixels"  # in place of the names of features
COLUMN, COLUMNS = "the name of a column", "names of columns, separated by commas"


class Model(NamedTuple):
    """A softmax regression."""

    weights: Array  # W
    bias: Array  # b

    def scores(self, rows: Tree) -> Array:
        """The logits of all classes, for each row."""
        return rows["features"] @ self.weights + self.bias


class Verdict(NamedTuple):
    """What is learned of each row."""

    trust: Array  # probability of its label
    suggested: Array  # label
    suspected: Array  # whether that is another one
    weight: Array  # in the training of the model, between 0 and 1


def judged(x: Array, model: Model, rows: Tree) -> Verdict:
    """What x and the model say of a site's own unchecked rows."""
    scores = model.scores(rows)
    trust, suggested = jnp.exp(-cross_entropy(scores, rows["label"])), scores.argmax(1)
    return Verdict(trust, suggested, suggested != rows["label"], jax.nn.sigmoid(x[rows["place"]]))


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _are_names(given: str) -> bool:
    return not given or len(_names(given)) == given.count(",") + 1


def _warn_of_unchecked_classes(tables: Tables) -> None:
    """Warn about labels that no checked row here has: for f no row with such a label is of any use."""
    here = [m for m, names in enumerate(tables.names) if names]
    if not here:
        return
    present, checked = (np.unique(np.concatenate([part[m]["label"] for m in here])) for part in (tables.lower, tables.upper))
    if missing := " or ".join(repr(tables.preprocessing.classes[k]) for k in np.setdiff1d(present, checked)):
        unless = "" if len(here) == len(tables.names) else ", unless another site has checked some"
        warn(f"no checked row has the label {missing}, so rows that have it look wrong{unless}: check some of them")


@task
class LabelErrors:
    """Learn how far to trust each row of the sites' tables, from a few rows that were checked."""

    headline: ClassVar[str] = "accuracy"
    better: ClassVar[Better] = {"accuracy": "higher"}
    suited: ClassVar[SuitedTable] = {
        "label-errors": suit("without minibatches several would be the same", fedpace_own=dict(minibatches=1))
    }

    roles: ClassVar[tuple[str, ...]] = ("label", "checked", "features", "categories")  # the knobs that name columns

    label: str = text("label", "column with the label", COLUMN, bool)
    checked: str = text("checked", "column that says of each row whether its label was checked, yes or no", COLUMN, bool)
    features: str = text(
        "", f"columns to predict the label from; all others unless given; {IMAGES}: those of images", COLUMNS, _are_names
    )
    categories: str = text("", "which of them hold categories rather than numbers", COLUMNS, _are_names)
    decay: float = real(0.01, "λ, weight of |W|²", least=0)

    @property
    def columns(self) -> Columns:
        """The roles of the tables' columns."""
        features = PIXELS if self.features == IMAGES else _names(self.features)
        categories = {name: () for name in (*_names(self.categories), self.label)}
        return Columns(self.label, features or None, categories, split=self.checked)

    def build(self, data: str | ClientData | Tables = "") -> Task:
        """The task; `data` is the folder with a table or a folder of images for each site, or these tables."""
        source = ClientData(data) if isinstance(data, str) else data
        tables = source if isinstance(source, Tables) else source.tables(self.columns)
        lower = [{**rows, "place": np.arange(len(rows["place"]), dtype=np.int32)} for rows in tables.lower]

        def f(x: Array, y: Model, rows: Tree) -> Array:
            return cross_entropy(y.scores(rows), rows["label"]).mean()

        def g(x: Array, y: Model, rows: Tree) -> Array:
            losses = cross_entropy(y.scores(rows), rows["label"])
            return (jax.nn.sigmoid(x[rows["place"]]) * losses).mean() + self.decay * squared_norm(y.weights)

        def accuracy(x: Array, y: Model, rows: Tree) -> Array:
            return (y.scores(rows).argmax(1) == rows["label"]).mean()

        def suspected(x: Array, y: Model, rows: Tree) -> Array:
            return judged(x, y, rows).suspected.mean()

        _warn_of_unchecked_classes(tables)
        classes = max(1, len(tables.preprocessing.classes))
        start: Any = jnp.zeros(max(tables.sizes)), Model(jnp.zeros((tables.width, classes)), jnp.zeros(classes))
        return Task.of(
            f,
            g,
            *start,
            lower=lower,
            upper=tables.upper,
            row_metrics={"accuracy": accuracy},
            lower_metrics={"suspected": suspected},
            preprocessing=tables.preprocessing,
            own_x=True,
        )
