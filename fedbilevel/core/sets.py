"""Closed convex sets that x and y may be confined to, each with its projection.

A set constrains a whole vector: all entries of a user's pytree together. Sets can be compared and hashed, since they
are part of a problem.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from jax import Array
from optax.projections import projection_box, projection_l2_ball, projection_simplex

from fedbilevel.errors import InputError


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

    low: float
    high: float

    def __post_init__(self) -> None:
        _make_numbers(self)
        if not (self.low <= self.high and self.low < math.inf and self.high > -math.inf):
            raise InputError(f"Box: low must be a number no greater than high; given: low = {self.low}, high = {self.high}")

    def project(self, v: Array) -> Array:
        return projection_box(v, self.low, self.high)


@dataclass(frozen=True)
class Ball(ConvexSet):
    """|v| <= radius."""

    radius: float

    def __post_init__(self) -> None:
        _make_numbers(self)
        if not 0 < self.radius < math.inf:
            raise InputError(f"Ball: radius must be a finite number above 0; given: {self.radius}")

    def project(self, v: Array) -> Array:
        return projection_l2_ball(v, self.radius)


@dataclass(frozen=True)
class Simplex(ConvexSet):
    """v_j >= 0 for every entry, Σ_j v_j = scale."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        _make_numbers(self)
        if not 0 < self.scale < math.inf:
            raise InputError(f"Simplex: scale must be a finite number above 0; given: {self.scale}")

    def project(self, v: Array) -> Array:
        return projection_simplex(v, self.scale)


class Sets(NamedTuple):
    """X and Y, the sets in which x and y must stay."""

    x: ConvexSet = Everywhere()
    y: ConvexSet = Everywhere()


EVERYWHERE = Everywhere()
UNCONSTRAINED = Sets()


def _make_numbers(instance: ConvexSet) -> None:
    """Convert every field of a set to a Python number."""
    owner = type(instance).__name__
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, field.name)
        try:
            object.__setattr__(instance, field.name, float(value))
        except (TypeError, ValueError):
            raise InputError(f"{owner}: {field.name} must be a single number; given: {value}") from None
