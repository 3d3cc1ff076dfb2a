"""What crosses the network: round trips, and numbers sent up and down.

One *round* is one round trip: the server sends something to some clients and they send something back.
A *float* is one number of an array that crosses. Inside compiled code the counts are pairs of 32-bit
words, since JAX has no 64-bit integers by default; on the host they are Python integers.
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
    up: Array
    down: Array

    @classmethod
    def zero(cls) -> Traffic:
        """The counts before anything is sent."""
        return cls(jnp.int32(0), jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.uint32))

    @classmethod
    def of(cls, counts: Traffic | Totals) -> Traffic:
        """The same counts, converted if they were made on the host."""
        if isinstance(counts, Traffic):
            return counts
        up, down = (np.array([n >> 32, n & 0xFFFFFFFF], np.uint32) for n in (counts.up, counts.down))
        return cls(jnp.int32(counts.rounds), jnp.asarray(up), jnp.asarray(down))

    def plus(self, rounds: Array | int, up: Array, down: Array) -> Traffic:
        """These counts plus more rounds (a number) and floats (pairs)."""
        return Traffic(self.rounds + jnp.asarray(rounds, jnp.int32), total(self.up, up), total(self.down, down))


class Totals(NamedTuple):
    """Counts on the host: exact, however long the run."""

    rounds: int = 0
    up: int = 0
    down: int = 0

    def plus(self, traffic: Traffic) -> Totals:
        """These counts plus those of a compiled stretch."""
        return Totals(self.rounds + int(traffic.rounds), self.up + exact(traffic.up), self.down + exact(traffic.down))
