"""What a client keeps in memory for the server, by number, within bounds that no request can exceed."""

from __future__ import annotations

import math
from collections.abc import Collection

import jax

from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError

MOST_KEPT = 1000  # values at a time; algorithms keep a handful
MOST_BYTES, MOST_TIMES = 256 << 20, 64  # that values may take: so many bytes, or so many times the largest call's


class KeptValues:
    """The values, which with those that a request makes take no more than `memory`, in bytes.

    `largest_call` is the size of the largest call, and without it they may take that much however small calls are.
    """

    def __init__(self, largest_call: int | None, memory: float):
        usual = math.inf if largest_call is None else max(MOST_BYTES, MOST_TIMES * largest_call)
        self._most = min(usual, memory)
        self._remedy = "" if usual <= memory else " unless the site's policy has more memory"
        self._values: dict[int, Tree] = {}
        self._taken = 0  # bytes of the values kept when the present request began, and of all that it makes
        self._made = 0  # values that it makes

    def begin(self, needed: Collection[int]) -> None:
        """Begin a request: of the values kept so far only these are still needed."""
        for slot in self._values.keys() - needed:
            del self._values[slot]
        self._taken, self._made = size(list(self._values.values())), 0

    def count(self, made: int) -> None:
        """Count a value of so many bytes before the present request makes it; `InputError` if those are too many."""
        if self._made > MOST_KEPT:
            raise InputError(f"a request makes more than {MOST_KEPT} values: refused")
        self._made, self._taken = self._made + 1, self._taken + made
        if self._taken > self._most:
            raise InputError(
                f"values here may take {self._most:,.0f} bytes, and these take {self._taken:,}: refused{self._remedy}"
            )

    def add(self, slot: int | None, value: Tree) -> Tree:
        """A value that has been counted, from now on kept, unless there is no number for it."""
        if slot is not None:
            if len(self._values) >= MOST_KEPT and slot not in self._values:
                raise InputError(f"{MOST_KEPT} values are kept here already: refused")
            self._values[slot] = value
        return value

    def recall(self, slot: int) -> Tree:
        """The value kept under a number."""
        if slot not in self._values:
            raise InputError(f"no value is kept here under the number {slot}: this client started after it was computed")
        return self._values[slot]


def size(value: Tree) -> int:
    """The bytes of all arrays of a value; a plain number counts as one of eight bytes."""
    return sum(getattr(leaf, "nbytes", 8) for leaf in jax.tree.leaves(value))
