"""The bits of `jax.random`, in programs that XLA runs and compiles faster on CPUs.

There JAX computes Threefry (J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, Parallel Random Numbers: As Easy as
1, 2, 3, 2011) in loops that copy their keys around: with small problems, most of a step's time. Here a key's two words
come from straight code, and many bits from a loop that carries nothing else; without any loop XLA would compute the bits
anew for every number that is gathered by them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
GROUPS = 5  # of four rounds


def fold_in(key: Array, number: Array | int) -> Array:
    """`jax.random.fold_in`"""
    return jax.random.wrap_key_data(_folded(jax.random.key_data(key), jnp.asarray(number).astype(jnp.uint32)))


def split(key: Array) -> tuple[Array, Array]:
    """`jax.random.split`"""
    return fold_in(key, 0), fold_in(key, 1)


def bits(key: Array, shape: tuple[int, ...]) -> Array:
    """`jax.random.bits` of 32 bits, for fewer than 2³² of them"""
    words = jax.random.key_data(key)
    schedule, counts = _schedule(words), lax.iota(jnp.uint32, math.prod(shape))
    first = _mixed(jnp.full_like(counts, words[0]), counts + words[1], 0, schedule)

    def two_groups(k: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        for ahead in (1, 2):
            now = [jnp.where(k == 0, schedule[g % 3], schedule[(g + 2) % 3]) for g in range(3)]
            pair = _mixed(*pair, ahead, now, 2 * jnp.asarray(k, jnp.uint32))
        return pair

    high, low = lax.fori_loop(0, GROUPS // 2, two_groups, first)
    return (high ^ low).reshape(shape)


def permutation(key: Array, n: int) -> Array:
    """`jax.random.permutation` of 0..n-1"""
    order = jnp.arange(n)
    for _ in range(math.ceil(3 * math.log(max(1, n)) / math.log(2**32 - 1))):
        key, now = split(key)
        _, order = lax.sort_key_val(bits(now, (n,)), order)
    return order


@jax.jit
def _folded(words: Array, number: Array) -> Array:
    pair = words[0], number + words[1]
    for group in range(GROUPS):
        pair = _mixed(*pair, group, _schedule(words))
    return jnp.stack(pair)


def _schedule(words: Array) -> list[Array]:
    return [words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(0x1BD11BDA)]


def _mixed(x: Array, y: Array, group: int, schedule: list[Array], passed: Array | int = 0) -> tuple[Array, Array]:
    """A group of four rounds, and words of the key added; so many groups have passed that the schedule does not count."""
    for turn in ROTATIONS[group % 2]:
        x = x + y
        y = x ^ ((y << turn) | (y >> (32 - turn)))
    counted = jnp.asarray(group + 1 + passed, jnp.uint32)
    return x + schedule[(group + 1) % 3], y + schedule[(group + 2) % 3] + counted
