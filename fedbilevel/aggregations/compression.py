"""Compression of what clients send, with error feedback, for every algorithm.

A client whose answer h is near a point z that the server knows (for iterates, where they started; 0 for directions) sends

    C_m = compress(h - z + e_m),    e_m ← h - z + e_m - C_m,

and the server takes z + Σ a_i C_i for the mean: what is left out is not lost but sent later. Every client function whose
answers are averaged has an e_m of its own at every client, for as long as the run lasts; one who is absent keeps its e_m.

    quantized    blocks of numbers as whole numbers of 8 or 4 bits times one scale per block, rounded to the nearest
    top-k        the largest entries of each array and their places (Stich, Cordonnier and Jaggi, Sparsified SGD with Memory,
                 NeurIPS 2018; with local steps: Basu, Data, Karakus and Diggavi, Qsparse-local-SGD, NeurIPS 2019)
    random-k     random entries of each array, the same at all clients of a round: their places are not sent

Arrays of at most 8 numbers are sent as they are. With `down`, `quantized` also shrinks what the server sends: to each client
function it sends Q(z + e) instead of an array z, and keeps e ← z + e - Q(z + e), the same for all clients. These start from
what they received, and the server adds the changes that they report to its own z.
"""

from __future__ import annotations

import abc
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.core.aggregation import Aggregation, aggregation, weighted_sum
from fedbilevel.core.problem import Tree
from fedbilevel.settings import choice, count

SMALL = 8  # numbers of an array that is not worth compressing


class Compressed(Aggregation):
    """A weighted mean of compressed changes; `shrunk` and `restored` are for one vector."""

    weighs: ClassVar[bool] = True
    encodes: ClassVar[bool] = True

    def encode(self, key: Array, change: Tree, memory: Tree) -> tuple[Tree, Tree]:
        wanted, structure = jax.tree.flatten(jax.tree.map(jnp.add, change, memory))
        message = [v if _is_small(v) else self.shrunk(jax.random.fold_in(key, k), v.ravel()) for k, v in enumerate(wanted)]
        sent = self.decode(key, message, jax.tree.unflatten(structure, wanted))
        return message, jax.tree.map(jnp.subtract, jax.tree.unflatten(structure, wanted), sent)

    def decode(self, key: Array, message: Tree, like: Tree) -> Tree:
        shapes, structure = jax.tree.flatten(like)
        whole = [
            m if _is_small(s) else self.restored(jax.random.fold_in(key, k), m, s.size).astype(s.dtype).reshape(s.shape)
            for k, (m, s) in enumerate(zip(message, shapes, strict=True))
        ]
        return jax.tree.unflatten(structure, whole)

    def combine(self, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        total = weighted_sum(weights, rows)
        return total if around is None else jax.tree.map(jnp.add, around, total)

    @abc.abstractmethod
    def shrunk(self, key: Array, v: Array) -> Any:
        """What is sent of a vector."""

    @abc.abstractmethod
    def restored(self, key: Array, message: Any, size: int) -> Array:
        """The vector of that size that it stands for."""


def _is_small(array: Any) -> bool:
    return array.size <= SMALL


@aggregation
class Quantized(Compressed):
    """Whole numbers of a few bits, with a scale for each block."""

    bits: str = choice("8", "bits of a number: 8 or 4", ("8", "4"))
    block: int = count(64, "numbers that share a scale", least=2, bits=16)
    down: str = choice("none", "bits of a number that the server sends: 8, 4, or none to send it as it is", ("none", "8", "4"))

    def shrinks(self, value: Any) -> bool:
        return self.down != "none" and jnp.issubdtype(jnp.result_type(value), jnp.floating) and np.size(value) > SMALL

    def encode_sent(self, value: Array) -> tuple[Array, Array]:
        return self._whole(value.ravel(), self.down)

    def decode_sent(self, message: tuple[Array, Array], like: Any) -> Array:
        return self._numbers(message, math.prod(like.shape), self.down).astype(like.dtype).reshape(like.shape)

    def shrunk(self, key: Array, v: Array) -> tuple[Array, Array]:
        return self._whole(v, self.bits)

    def restored(self, key: Array, message: tuple[Array, Array], size: int) -> Array:
        return self._numbers(message, size, self.bits)

    def _whole(self, v: Array, bits: str) -> tuple[Array, Array]:
        most = 2.0 ** (int(bits) - 1) - 1
        blocks = jnp.pad(v, (0, -v.size % self.block)).reshape(-1, self.block)
        scales = jnp.abs(blocks).max(1, keepdims=True) / most
        whole = jnp.round(blocks / jnp.where(scales > 0, scales, 1)).astype(jnp.int8).ravel()[: v.size]
        if bits == "4":
            pairs = jnp.pad(whole, (0, v.size % 2)).reshape(-1, 2).astype(jnp.uint8)
            return (pairs[:, 0] & 15) | (pairs[:, 1] << 4), scales[:, 0]
        return whole, scales[:, 0]

    def _numbers(self, message: tuple[Array, Array], size: int, bits: str) -> Array:
        whole, scales = message
        if bits == "4":
            low, high = (whole << 4).astype(jnp.int8) >> 4, whole.astype(jnp.int8) >> 4
            whole = jnp.stack([low, high], 1).ravel()[:size]
        return whole.astype(scales.dtype) * jnp.repeat(scales, self.block)[:size]


@aggregation
class TopK(Compressed):
    """The largest entries, and where they are."""

    one_in: int = count(10, "a client sends one in this many entries of each array")

    def shrunk(self, key: Array, v: Array) -> tuple[Array, Array]:
        _, places = lax.top_k(jnp.abs(v), max(1, v.size // self.one_in))
        return v[places], places.astype(jnp.uint16 if v.size <= 2**16 else jnp.int32)

    def restored(self, key: Array, message: tuple[Array, Array], size: int) -> Array:
        values, places = message
        return jnp.zeros(size, values.dtype).at[places].set(values)


@aggregation
class RandomK(Compressed):
    """Random entries, in places that both sides draw."""

    one_in: int = count(10, "a client sends one in this many entries of each array")

    def shrunk(self, key: Array, v: Array) -> Array:
        return v[self._places(key, v.size)]

    def restored(self, key: Array, message: Array, size: int) -> Array:
        return jnp.zeros(size, message.dtype).at[self._places(key, size)].set(message)

    def _places(self, key: Array, size: int) -> Array:
        return jax.random.permutation(key, size)[: max(1, size // self.one_in)]
