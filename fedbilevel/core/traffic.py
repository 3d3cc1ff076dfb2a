"""What crosses the network: round trips, and numbers sent up and down with the bytes that they take.

One *round* is one round trip: the server sends something to some clients and they send something back.
A *float* is one number of an array that crosses, of any type; its bytes are those of its type. Inside compiled code the counts
are pairs of 32-bit words, since JAX has no 64-bit integers by default; on the host they are Python integers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.problem import Tree

HALF = 16
MASK = (1 << HALF) - 1


def floats(tree: Tree) -> int:
    """How many numbers the arrays of a tree hold."""
    return sum(int(np.prod(np.shape(leaf))) for leaf in jax.tree.leaves(tree))


def size_in_bytes(tree: Tree) -> int:
    """How many bytes the arrays of a tree take when they cross."""
    return sum(int(np.prod(np.shape(leaf))) * jnp.result_type(leaf).itemsize for leaf in jax.tree.leaves(tree))


def product(n: Array | int, m: Array | int) -> Array:
    """n · m for 0 <= n, m < 2³² as (high, low) words."""
    n, m = jnp.asarray(n, jnp.uint32), jnp.asarray(m, jnp.uint32)
    n_high, n_low = n >> HALF, n & MASK
    m_high, m_low = m >> HALF, m & MASK
    low, cross, other, high = n_low * m_low, n_low * m_high, n_high * m_low, n_high * m_high
    middle = (low >> HALF) + (cross & MASK) + (other & MASK)
    return jnp.stack([high + (cross >> HALF) + (other >> HALF) + (middle >> HALF), (low & MASK) | (middle << HALF)])


def total(a: Array, b: Array) -> Array:
    """The sum of two (high, low) pairs."""
    low = a[1] + b[1]
    return jnp.stack([a[0] + b[0] + (low < a[1]), low])


def exact(pair: Array) -> int:
    """A (high, low) pair as a Python integer."""
    high, low = np.asarray(pair)
    return (int(high) << 32) | int(low)


class Traffic(NamedTuple):
    """Counts inside compiled code."""

    rounds: Array
    up: Array  # floats
    down: Array
    bytes_up: Array
    bytes_down: Array

    @classmethod
    def zero(cls) -> Traffic:
        """The counts before anything is sent."""
        return cls(jnp.int32(0), *(jnp.zeros(2, jnp.uint32) for _ in cls._fields[1:]))

    @classmethod
    def of_clients(cls, n: Array | int, up: Tree = (), down: Tree = (), rounds: Array | int = 0) -> Traffic:
        """What n clients send and receive, each of them trees like these."""
        counts = floats(up), floats(down), size_in_bytes(up), size_in_bytes(down)
        return cls(jnp.asarray(rounds, jnp.int32), *(product(n, count) for count in counts))

    @classmethod
    def of(cls, counts: Traffic | Totals) -> Traffic:
        """The same counts, converted if they were made on the host."""
        if isinstance(counts, Traffic):
            return counts
        pairs = (np.array([n >> 32, n & 0xFFFFFFFF], np.uint32) for n in counts[1:])
        return cls(jnp.int32(counts.rounds), *map(jnp.asarray, pairs))

    def plus(self, more: Traffic) -> Traffic:
        """The sum of both counts."""
        return Traffic(self.rounds + more.rounds, *map(total, self[1:], more[1:]))


class Totals(NamedTuple):
    """Counts on the host: exact, however long the run."""

    rounds: int = 0
    up: int = 0  # floats
    down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def plus(self, traffic: Traffic) -> Totals:
        """These counts plus those of a compiled stretch."""
        return self.and_also(Totals(int(traffic.rounds), *map(exact, traffic[1:])))

    def with_bytes(self, bytes_per_float: int) -> Totals:
        """These counts, with the bytes of all floats if none were counted, as by version 0.1."""
        if self.bytes_up or self.bytes_down:
            return self
        return self._replace(bytes_up=self.up * bytes_per_float, bytes_down=self.down * bytes_per_float)

    def and_also(self, more: Totals) -> Totals:
        """The sum of both counts."""
        return Totals(*(a + b for a, b in zip(self, more, strict=True)))
