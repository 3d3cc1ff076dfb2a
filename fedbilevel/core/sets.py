"""Closed convex sets that x and y may be confined to, each with its projection.

A set constrains a whole vector: all entries of a user's pytree together. Sets can be compared and hashed, since they
are part of a problem.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import NamedTuple

from jax import Array
from optax.projections import projection_box, projection_l2_ball, projection_simplex

from fedbilevel.errors import InputError
from fedbilevel.settings import REQUIRED, check_all, real, step_size


class ConvexSet(abc.ABC):
    """A closed convex set of vectors."""

    @abc.abstractmethod
    def project(self, v: Array) -> Array:
        """The nearest point of the set."""


@dataclass(frozen=True)
class Everywhere(ConvexSet):
    """No constraint."""

    def project(self, v: Array) -> Array:
        return v


@dataclass(frozen=True)
class Box(ConvexSet):
    """low <= v_j <= high for every entry; either bound may be infinite."""

    low: float = real(REQUIRED, "the least an entry may be", finite=False)
    high: float = real(REQUIRED, "the most an entry may be", finite=False)

    def __post_init__(self) -> None:
        check_all(self)
        if not (self.low <= self.high and self.low < math.inf and self.high > -math.inf):
            raise InputError(f"Box: low must be a number no greater than high; given: low = {self.low}, high = {self.high}")

    def project(self, v: Array) -> Array:
        return projection_box(v, self.low, self.high)


@dataclass(frozen=True)
class Ball(ConvexSet):
    """|v| <= radius."""

    radius: float = step_size(REQUIRED, "the most |v| may be")

    def __post_init__(self) -> None:
        check_all(self)

    def project(self, v: Array) -> Array:
        return projection_l2_ball(v, self.radius)


@dataclass(frozen=True)
class Simplex(ConvexSet):
    """v_j >= 0 for every entry, Σ_j v_j = scale."""

    scale: float = step_size(1.0, "the sum of the entries")

    def __post_init__(self) -> None:
        check_all(self)

    def project(self, v: Array) -> Array:
        return projection_simplex(v, self.scale)


class Sets(NamedTuple):
    """X and Y, the sets in which x and y must stay."""

    x: ConvexSet = Everywhere()
    y: ConvexSet = Everywhere()


EVERYWHERE = Everywhere()
UNCONSTRAINED = Sets()
