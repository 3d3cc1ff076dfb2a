"""How long a client computes for one request, by estimate, within what it allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from fedbilevel.core.problem import Tree
from fedbilevel.engines.call_shapes import Shape
from fedbilevel.errors import InputError

Estimates = Mapping[tuple[str, Shape], float]  # seconds of an answer, by function and arguments


class AnswerTimes:
    """The estimates, and what those of one request may add up to."""

    def __init__(self, most: float = math.inf, estimates: Estimates = MappingProxyType({})):
        self.estimates, self._most, self._needed = estimates, most, 0.0

    def begin(self) -> None:
        """Begin a request."""
        self._needed = 0.0

    def count(self, name: str, args: Tree) -> None:
        """Count an answer of that function before it is computed; `InputError` if the request takes too long with it."""
        self._needed += self.estimates.get((name, Shape.of(args)), 0.0)
        if self._needed > self._most:
            raise InputError(
                f"a request would take {self._needed:,.3g} s or more here, and this site allows {self._most:,.3g} s: "
                "ask for less at a time"
            )
