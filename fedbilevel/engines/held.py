"""Values that clients hold for the server, which knows only how they are made or under which number they are kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax

from fedbilevel.core.clients import PerClient
from fedbilevel.engines.messages import Call, Kept, Part, Saved, Store


class Slots:
    """The numbers under which clients keep values, and which of them the server still needs."""

    def __init__(self, clients: int):
        self.needed: dict[int, set[int]] = {m: set() for m in range(clients)}
        self._last = 0

    def new(self, m: int) -> int:
        """A number for a value that client m will keep."""
        self._last += 1
        self.needed[m].add(self._last)
        return self._last


class Held:
    """One client's value, as the server knows it: still to be computed there, or kept there."""

    def __init__(self, slots: Slots, m: int, make: Make):
        self.slot = slots.new(m)
        self.make: Make | None = make
        weakref.finalize(self, slots.needed[m].discard, self.slot)

    def expression(self, computed: list[Held]) -> Any:
        """The expression for a request; adds to `computed` what the client will keep after it."""
        if self.make is None or any(self is c for c in computed):
            return Kept(self.slot)
        expression = self.make(self.slot, computed)
        computed.append(self)
        return expression


Make = Callable[[int, list[Held]], Call | Store | Saved]  # the expression that makes a value and keeps it under a slot
Wanted = dict[int, tuple[Any, list[Held]]]  # by client, what it should compute, and what it then keeps


class HeldPart(NamedTuple):
    """A held value, or a part of it."""

    held: Held
    path: tuple[int, ...] = ()

    def expression(self, computed: list[Held]) -> Any:
        """See `Held.expression`."""
        whole = self.held.expression(computed)
        return Part(whole, self.path) if self.path else whole


class HeldRows(PerClient):
    """A held value for each client, by its number; made on first use, since a cohort's members can still change."""

    def __init__(self, at: Callable[[int], HeldPart]):
        self.at: Callable[[int], HeldPart] = cache(at)

    def __getitem__(self, index: int) -> HeldRows:
        def part(m: int) -> HeldPart:
            whole = self.at(m)
            return HeldPart(whole.held, (*whole.path, index))

        return HeldRows(part)

    def made(self, population: int) -> HeldRows:
        """The same values, made now for all clients, so that nothing that they were made from is kept alive."""
        return HeldRows([self.at(m) for m in range(population)].__getitem__)


def leaves(state: Any) -> list[Any]:
    """The arrays of a state, and the values that its clients hold."""
    return jax.tree.leaves(state, is_leaf=is_per_client)


def is_per_client(node: Any) -> bool:
    """Whether a node of a state is a value that clients hold."""
    return isinstance(node, PerClient)
