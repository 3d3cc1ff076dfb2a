"""How the answers of a cohort become one value at the server: a run has one rule, and both engines apply it.

`Cohort.mean` and its variants go through it for every algorithm; `gather`, which hands single answers to the server, does not.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, TypeVar, dataclass_transform, final

import jax
from jax import Array

from fedbilevel import own_code
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError, require
from fedbilevel.settings import check_all, settings


class Aggregation(abc.ABC):
    """A rule. Its fields are settings; two rules with equal settings are equal."""

    streams: ClassVar[bool] = False  # whether it is the weighted sum, which engines add up in parts and in their own order

    def __post_init__(self) -> None:
        check_all(self)

    def settings(self) -> dict[str, Any]:
        """Its settings, by name."""
        return {name: getattr(self, name) for name in settings(type(self))}

    def require(self, population: Population, participation: Participation) -> None:
        """Raise `InputError` unless the rule can be used with these clients; one that is no weighted sum has no weights."""
        if not self.streams and not population.equal_weights:
            raise InputError(
                f"{type(self).__name__} counts every client the same, but the task's clients weigh differently: choose mean"
            )

    @abc.abstractmethod
    def combine(self, active: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        """The value at the server from all answers, a row for each member of a cohort, where each counts the same.

        Members that are not `active` have zeros in their rows and must not count; at least one is active. `around` is the
        point that the answers are near, or None: see `Cohort.mean`. `key` is fresh randomness. Where a rule streams, the
        engines add up the answers themselves.
        """


def require_aggregation(value: object) -> Aggregation:
    """The value; `InputError` unless it is an instance of a rule."""
    fits = isinstance(value, Aggregation) and dataclasses.is_dataclass(value)
    require(fits, "aggregation", "a name or an instance of a class decorated with @aggregation", value)
    return value  # type: ignore[return-value]


Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def aggregation(cls: Class) -> Class:
    """Make a class of settings a rule that can be named: final and frozen."""
    fits = isinstance(cls, type) and issubclass(cls, Aggregation)
    require(fits, "@aggregation", "used on a class derived from Aggregation", cls)
    dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    return final(own_code.offered(cls, "aggregation"))


@aggregation
class Mean(Aggregation):
    """The estimate of the weighted mean that `Cohort.mean` describes."""

    streams: ClassVar[bool] = True

    def combine(self, active: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        return jax.tree.map(lambda r: r.sum(0) / active.sum().astype(r.dtype), rows)
