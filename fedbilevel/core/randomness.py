"""The bits of `jax.random`, from programs that XLA runs faster.

On CPUs JAX computes Threefry (J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, Parallel Random Numbers: As Easy as
1, 2, 3, 2011) in loops that copy their keys around, which takes most of a step's time on small problems. The loop here
runs twice and carries only the bits. Without a loop, XLA would recompute the bits for every number that is gathered
with them. On a GPU each iteration of a loop launches several kernels, so there the loop is unrolled: recomputing costs
less than the launches.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

IMPLEMENTATION = "threefry2x32"
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def key(seed: int) -> Array:
    """`jax.random.key` for Threefry, whatever JAX's default implementation is"""
    return jax.random.key(seed, impl=IMPLEMENTATION)


def wrapped(words: ArrayLike) -> Array:
    """`jax.random.wrap_key_data` for Threefry"""
    return jax.random.wrap_key_data(jnp.asarray(words), impl=IMPLEMENTATION)


def fold_in(key: Array, number: Array | int) -> Array:
    """`jax.random.fold_in`"""
    words = jax.random.key_data(key)
    return wrapped(jnp.stack(_threefry(words, jnp.asarray(number).astype(jnp.uint32))))


def split(key: Array) -> tuple[Array, Array]:
    """`jax.random.split`"""
    return fold_in(key, 0), fold_in(key, 1)


def bits(key: Array, shape: tuple[int, ...]) -> Array:
    """`jax.random.bits` of 32 bits, for fewer than 2³² of them"""
    high, low = _threefry(jax.random.key_data(key), lax.iota(jnp.uint32, math.prod(shape)))
    return (high ^ low).reshape(shape)


def permutation(key: Array, n: int) -> Array:
    """`jax.random.permutation` of 0..n-1"""
    order = jnp.arange(n)
    for _ in range(math.ceil(3 * math.log(max(1, n)) / math.log(2**32 - 1))):
        key, now = split(key)
        _, order = lax.sort_key_val(bits(now, (n,)), order)
    return order


@jax.jit
def _threefry(key: Array, counts: Array) -> tuple[Array, Array]:
    """Both words of the block (0, count), for each count."""
    schedule = [key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)]

    def two_groups(k: Array | int, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        now = [jnp.where(k == 0, schedule[j], schedule[(j + 2) % 3]) for j in range(3)]  # groups 3 and 4 follow 1 and 2
        for group in (1, 2):
            pair = _mixed(*pair, group, now, 2 * jnp.asarray(k, jnp.uint32))
        return pair

    first = _mixed(jnp.full_like(counts, key[0]), counts + key[1], 0, schedule, 0)
    if jax.default_backend() != "cpu":
        return two_groups(1, two_groups(0, first))
    return lax.fori_loop(0, 2, two_groups, first)


def _mixed(x: Array, y: Array, group: int, schedule: list[Array], passed: Array | int) -> tuple[Array, Array]:
    """Four rounds, then the key's words and the number of groups are added; `passed` groups came before this schedule."""
    for turn in ROTATIONS[group % 2]:
        x = x + y
        y = x ^ ((y << turn) | (y >> (32 - turn)))
    counted = jnp.asarray(group + 1 + passed, jnp.uint32)
    return x + schedule[(group + 1) % 3], y + schedule[(group + 2) % 3] + counted
