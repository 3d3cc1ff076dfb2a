"""What the columns of a table are: features, the label, row weights, and which rows train and which validate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedbilevel.errors import InputError, require
from fedbilevel.settings import checked, count, nearest, real, settings
from fedbilevel.tasks.data.table_files import Opened, Table

MOST_CATEGORIES = 100  # in a column: more are names or numbers of persons rather than categories
LONGEST_CATEGORY = 100  # characters: more are free text
TRAIN, VALIDATION = "train", "validation"
ROLES = {word: TRAIN for word in (TRAIN, "no", "false", "0")} | {word: VALIDATION for word in (VALIDATION, "yes", "true", "1")}


@dataclass(frozen=True)
class Columns:
    """The roles of a table's columns.

    Args:
        label: the column to predict: a number, or, if it is listed in `categories`, the number of its class.
        features: the columns to predict it from; None takes all that have no other role.
        categories: the columns that hold categories rather than numbers: a list of names, or a dictionary that also declares
            the categories of a column, which then need not be collected from the sites (an empty list: collect them).
        weight: a column with a weight for each row.
        split: a column that says of each row whether it is for "train" (the lower level) or "validation" (the upper one); or,
            as for rows that were checked and shall validate, "no" or "yes" (also false and true, 0 and 1).
        validation, seed: without such a column, the fraction of each site's rows that validate, and the seed of the draw.
    """

    label: str
    features: Sequence[str] | None = None
    categories: Mapping[str, Sequence[str]] | Sequence[str] = field(default_factory=dict)
    weight: str = ""
    split: str = ""
    validation: float = real(1 / 3, "fraction of rows that validate", above=0, below=1)
    seed: int = count(0, "random seed of the split", least=0)

    def __post_init__(self) -> None:
        for name in ("label", "weight", "split"):
            require(isinstance(getattr(self, name), str), name, "the name of a column", getattr(self, name))
        require(self.label != "", "label", "the name of a column", self.label)
        for name, setting in settings(type(self)).items():
            object.__setattr__(self, name, checked("", name, setting, getattr(self, name)))
        if self.features is not None:
            object.__setattr__(self, "features", _names("features", self.features))
            require(bool(self.features), "features", "the names of one column at least", self.features)
        if isinstance(self.categories, Mapping):
            declared = {name: _names(f"the categories of {name!r}", of) for name, of in self.categories.items()}
        else:
            declared = {name: [] for name in _names("categories", self.categories)}
        object.__setattr__(self, "categories", declared)
        for name, of in declared.items():
            require(len(of) <= MOST_CATEGORIES, f"the categories of {name!r}", f"at most {MOST_CATEGORIES}", len(of))
        roles = [self.label, *(self.features or ()), *filter(None, (self.weight, self.split))]
        for name in roles:
            if roles.count(name) > 1:
                raise InputError(f"the column {name!r} has two roles: give it one of features, label, weight and split")
        for name in declared:
            if self.features is not None and name not in (self.label, *self.features):
                raise InputError(f"categories names {name!r}, which is no feature and not the label{nearest(name, roles)}")

    def __str__(self) -> str:
        """The roles in words."""
        features = "all other columns" if self.features is None else ", ".join(self.features)
        roles = {"label": self.label, "weight": self.weight, "split": self.split, "features": features}
        roles["categories"] = ", ".join(self.declared)
        return "; ".join(f"{role}: {name}" for role, name in roles.items() if name)

    def named(self, table: Opened) -> Columns:
        """The same with the features named, as in the header of this table."""
        if self.features is not None:
            return self
        others = [name for name in table.header if name and name not in (self.label, self.weight, self.split)]
        for name in self.declared:
            if name not in (self.label, *others):
                raise InputError(f"{table.top}: there is no column {name!r} for categories{nearest(name, others)}")
        if not others:
            raise InputError(f"{table.top}: there are no columns for features beside {self.label!r}")
        return replace(self, features=list(dict.fromkeys(others)))

    def require_same(self, table: Opened, first: str) -> None:
        """Raise `InputError` if a table has columns that the first, which named the features, has not."""
        known = {*(self.features or ()), self.label, self.weight, self.split, ""}
        for name in table.header:
            if name not in known:
                raise InputError(f"{table.top}: the column {name!r} is not in {first}: leave it out, or name the features")

    @property
    def declared(self) -> Mapping[str, Sequence[str]]:
        """The columns of categories, each with its categories if these are declared."""
        assert isinstance(self.categories, Mapping)
        return self.categories

    @property
    def number_features(self) -> list[str]:
        """The features that are numbers, in order."""
        return [name for name in self.features or () if name not in self.declared]

    @property
    def category_features(self) -> list[str]:
        """The features that are categories, in order."""
        return [name for name in self.features or () if name in self.declared]

    @property
    def numbers(self) -> list[str]:
        """All columns that hold numbers: features, then the label, then the weight."""
        label = [] if self.label in self.declared else [self.label]
        return [*self.number_features, *label, *filter(None, [self.weight])]

    @property
    def texts(self) -> list[str]:
        """All columns that hold categories: features, then the label."""
        return [*self.category_features, *([self.label] if self.label in self.declared else [])]

    @property
    def full(self) -> list[str]:
        """The columns in which no value may be missing."""
        return [self.label, *filter(None, (self.weight, self.split))]

    def trains(self, table: Table, site: int) -> np.ndarray:
        """Which rows of a site's table train: the others validate. There are some of both."""
        if self.split:
            roles = [cell.lower() for cell in table.categories[self.split]]
            for k, role in enumerate(roles):
                if role not in ROLES:
                    raise InputError(f"{table.places(k)}: column {self.split!r} must be {TRAIN!r} or {VALIDATION!r}, no or yes")
            trains = np.array([ROLES[role] == TRAIN for role in roles])
        else:
            validating = min(max(round(self.validation * table.size), 1), table.size - 1)
            order = np.random.default_rng([self.seed, site]).permutation(table.size)
            trains = np.ones(table.size, bool)
            trains[order[:validating]] = False
        for role, word, there in ((TRAIN, "no", trains.any()), (VALIDATION, "yes", not trains.all())):
            if not there:
                said = f", {word!r} in column {self.split!r}" if self.split else ""
                raise InputError(f"{table.name} has no rows for {role!r}{said}: give it some, or leave the table out")
        return trains


def _names(what: str, given: object) -> list[str]:
    wanted = "a list of names"
    require(isinstance(given, Sequence) and not isinstance(given, str), what, wanted, given)
    assert isinstance(given, Sequence)
    require(all(isinstance(name, str) and name for name in given), what, wanted, given)
    require(len(set(given)) == len(given), what, f"{wanted}, each once", given)
    return list(given)
