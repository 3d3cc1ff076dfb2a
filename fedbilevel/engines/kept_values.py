"""What a client keeps in memory for the server, by number, within bounds that no request can exceed."""

from __future__ import annotations

from collections.abc import Collection

import jax

from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError

MOST_KEPT = 1000  # values at a time; algorithms keep a handful
MOST_BYTES, MOST_TIMES = 256 << 20, 64  # that values may take: so many bytes, or so many times the largest call's


class KeptValues:
    """The values; `largest_call` is the size of the largest call in bytes, and without it the values may take any number."""

    def __init__(self, largest_call: int | None):
        self._most = None if largest_call is None else max(MOST_BYTES, MOST_TIMES * largest_call)
        self._values: dict[int, Tree] = {}
        self._sizes: dict[int, int] = {}
        self._made: list[int] = []  # the sizes of values that the present request has made

    def begin(self, needed: Collection[int]) -> None:
        """Begin a request: of the values kept so far only these are still needed."""
        for slot in self._values.keys() - needed:
            del self._values[slot], self._sizes[slot]
        self._made = []

    def add(self, slot: int | None, value: Tree) -> Tree:
        """The value that a request has made, and from now on keep it, unless there is no number for it."""
        if slot is not None and len(self._values) >= MOST_KEPT and slot not in self._values:
            raise InputError(f"{MOST_KEPT} values are kept here already: refused")
        self.count(size(value))
        if slot is not None:
            sizes = self._sizes | {slot: self._made[-1]}
            self.require_room(sum(sizes.values()))
            self._values[slot], self._sizes = value, sizes
        return value

    def count(self, made: int) -> None:
        """Count a value of so many bytes that the present request makes; `InputError` if those are too many."""
        if len(self._made) > MOST_KEPT:
            raise InputError(f"a request makes more than {MOST_KEPT} values: refused")
        self._made.append(made)
        self.require_room(sum(self._made))

    def recall(self, slot: int) -> Tree:
        """The value kept under a number."""
        if slot not in self._values:
            raise InputError(f"no value is kept here under the number {slot}: this client started after it was computed")
        return self._values[slot]

    def require_room(self, needed: int) -> None:
        """Raise `InputError` if values may not take so many bytes here."""
        if self._most is not None and needed > self._most:
            raise InputError(f"values here may take {self._most:,} bytes, and these take {needed:,}: refused")


def size(value: Tree) -> int:
    """The bytes of all arrays of a value; a plain number counts as one of eight bytes."""
    return sum(getattr(leaf, "nbytes", 8) for leaf in jax.tree.leaves(value))
