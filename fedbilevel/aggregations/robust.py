"""Rules that a few arbitrary answers cannot lead astray: medians, trimmed means, Krum and centred clipping.

Of the n answers of a cohort, as vectors v_1..v_n, up to f may be anything:

    median            of every entry (Yin, Chen, Ramchandran and Bartlett, Byzantine-Robust Distributed Learning, ICML 2018)
    trimmed-mean      of every entry, without the f largest and the f smallest (the same paper)
    geometric-median  argmin_z Σ |v_i - z|, by Weiszfeld's iterations (Pillutla, Kakade and Harchaoui, Robust Aggregation for
                      Federated Learning, 2022): z ← Σ v_i / β_i / Σ 1 / β_i with β_i = max(ν, |v_i - z|), from the centre
    krum              the v_i whose n - f nearest, itself among them, are nearest in squares (Blanchard, El Mhamdi, Guerraoui
                      and Stainer, Machine Learning with Adversaries, NeurIPS 2017, whose sum has one term fewer)
    multi-krum        the mean of the n - f vectors that are best by that measure
    centred-clipping  z ← z + mean_i min(1, τ / |v_i - z|) (v_i - z), from the centre (Karimireddy, He and Jaggi, Learning from
                      History for Byzantine Robust Optimization, ICML 2021)

The centre is the point that the answers are near where the algorithm names one (for iterates, where they started), and 0 for
directions. Clients with unlike data look like liars to each other, so vectors can be mixed first: `nnm` replaces each by the
mean of its n - f nearest (Allouah et al., Fixing by Mixing, AISTATS 2023), `bucketing` all by the means of random groups of s
(Karimireddy, He and Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022).

All arrays of an answer are one vector. Each of f liars can spoil a group of bucketing, so 2f must be below the ⌈n / s⌉ groups.
A round in which so few answers arrive that n, or the number of groups, is 2f or less takes f as (n - 1) / 2 of these.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.core.aggregation import Aggregation, aggregation
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.settings import choice, count, step_size

MIXING = ("none", "nnm", "bucketing")


@dataclass(frozen=True, kw_only=True)
class Robust(Aggregation):
    """A rule on vectors, which may be mixed before."""

    byzantine: int = count(1, "f, how many answers may be anything", least=0)
    before: str = choice("none", "mix the answers first: nearest neighbours (nnm) or bucketing", MIXING)
    bucket: int = count(2, "s, answers in a group of bucketing")

    def require(self, population: Population, participation: Participation) -> None:
        super().require(population, participation)
        n = participation.capacity(population.size)
        if 2 * self.byzantine >= n:
            raise InputError(f"byzantine must be below half of the {n} clients of a round; given: {self.byzantine}")
        groups = -(-n // self.bucket)
        if self.before == "bucketing" and 2 * self.byzantine >= groups:
            raise InputError(
                f"byzantine must be below half of the groups that bucketing makes of {n} clients, here {groups}, as a liar"
                f" may spoil its group: lower byzantine or bucket; given: byzantine={self.byzantine}, bucket={self.bucket}"
            )

    def combine(self, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        active, (leaves, structure) = weights > 0, jax.tree.flatten(rows)
        vectors = jnp.concatenate([leaf.reshape(len(active), -1) for leaf in leaves], 1)
        center = jnp.zeros(vectors.shape[1], vectors.dtype)
        if around is not None:
            center = jnp.concatenate([jnp.ravel(leaf).astype(vectors.dtype) for leaf in jax.tree.leaves(around)])
        if self.before == "nnm":
            vectors = _neighbours(active, vectors, self._liars(active))
        elif self.before == "bucketing":
            active, vectors = _buckets(active, vectors, self.bucket, key)
        combined = self.rule(active, vectors, center, self._liars(active))
        ends = np.cumsum([leaf[0].size for leaf in leaves])[:-1]
        parts = zip(jnp.split(combined, ends), leaves, strict=True)
        return jax.tree.unflatten(structure, [part.reshape(leaf.shape[1:]).astype(leaf.dtype) for part, leaf in parts])

    def _liars(self, active: Array) -> Array:
        """f, or as many as there can be."""
        return jnp.minimum(self.byzantine, (active.sum() - 1) // 2)

    @abc.abstractmethod
    def rule(self, active: Array, vectors: Array, center: Array, f: Array) -> Array:
        """The vector made of the active ones, of which f may be anything."""


@aggregation
class Median(Robust):
    """The median of every entry."""

    def rule(self, active: Array, vectors: Array, center: Array, f: Array) -> Array:
        n, ordered = active.sum(), _ordered(active, vectors)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


@aggregation
class TrimmedMean(Robust):
    """The mean of every entry without its f largest and f smallest."""

    def rule(self, active: Array, vectors: Array, center: Array, f: Array) -> Array:
        place, n = jnp.arange(len(active)), active.sum()
        return _mean((f <= place) & (place < n - f), _ordered(active, vectors))


@aggregation
class GeometricMedian(Robust):
    """The point with the least sum of distances, smoothed."""

    iterations: int = count(3, "Weiszfeld's iterations", source="Pillutla, Kakade and Harchaoui, 2022")
    smoothing: float = step_size(1e-6, "ν, the least distance", source="Pillutla, Kakade and Harchaoui, 2022")

    def rule(self, active: Array, vectors: Array, center: Array, f: Array) -> Array:
        def nearer(_: int, z: Array) -> Array:
            share = active / jnp.maximum(self.smoothing, jnp.linalg.norm(vectors - z, axis=1))
            return share @ vectors / share.sum()

        return lax.fori_loop(0, self.iterations, nearer, center)


@aggregation
class Krum(Robust):
    """The vector whose neighbours are nearest."""

    def rule(self, active: Array, vectors: Array, center: Array, f: Array) -> Array:
        return vectors[jnp.argmin(_loneliness(active, vectors, f))]


@aggregation
class MultiKrum(Robust):
    """The mean of the n - f vectors whose neighbours are nearest."""

    def rule(self, active: Array, vectors: Array, center: Array, f: Array) -> Array:
        return _mean(_rank(_loneliness(active, vectors, f)) < active.sum() - f, vectors)


@aggregation
class CentredClipping(Robust):
    """The mean of differences from a centre, none of them longer than τ."""

    radius: float = step_size(10.0, "τ, the longest difference from the centre that counts in full")
    iterations: int = count(1, "how often the centre moves")

    def rule(self, active: Array, vectors: Array, center: Array, f: Array) -> Array:
        def moved(_: int, z: Array) -> Array:
            away = vectors - z
            length = jnp.linalg.norm(away, axis=1, keepdims=True)
            return z + _mean(active, away * (self.radius / jnp.maximum(length, self.radius)))

        return lax.fori_loop(0, self.iterations, moved, center)


def _ordered(active: Array, vectors: Array) -> Array:
    """Every entry in order, with those of absent members last."""
    return jnp.sort(jnp.where(active[:, None], vectors, jnp.inf), 0)


def _mean(chosen: Array, vectors: Array) -> Array:
    """The mean of the chosen rows."""
    return jnp.where(chosen[:, None], vectors, 0).sum(0) / chosen.sum()


def _squares(active: Array, vectors: Array) -> Array:
    """|v_i - v_j|², infinite where one of the two is absent; row by row, so that no cube of numbers is held."""
    squares = lax.map(lambda v: ((vectors - v) ** 2).sum(1), vectors)
    return jnp.where(active[:, None] & active, squares, jnp.inf)


def _rank(values: Array) -> Array:
    """The place of every value in their order, along the last axis."""
    return jnp.argsort(jnp.argsort(values, -1), -1)


def _loneliness(active: Array, vectors: Array, f: Array) -> Array:
    """For every vector the sum of its least n - f squared distances, of which that to itself is 0."""
    squares = _squares(active, vectors)
    near = _rank(squares) < active.sum() - f
    return jnp.where(active, jnp.where(near, squares, 0).sum(1), jnp.inf)


def _neighbours(active: Array, vectors: Array, f: Array) -> Array:
    """Every vector replaced by the mean of its n - f nearest, itself among them."""
    n = active.sum() - f
    near = (_rank(_squares(active, vectors)) < n) & active[:, None]
    return near.astype(vectors.dtype) @ vectors / n


def _buckets(active: Array, vectors: Array, size: int, key: Array) -> tuple[Array, Array]:
    """The means of random groups of the active vectors, in the first rows; the last group may be smaller."""
    place = _rank(jnp.where(active, jax.random.uniform(key, active.shape), 2.0))
    group, counted = place // size, active.astype(vectors.dtype)
    total = jnp.zeros_like(vectors).at[group].add(counted[:, None] * vectors)
    members = jnp.zeros_like(counted).at[group].add(counted)
    return members > 0, total / jnp.maximum(members, 1)[:, None]
