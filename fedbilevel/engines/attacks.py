"""Clients that lie, as a knob of a simulated run: the first of them answer whatever hurts.

    sign-flip:K     K clients send their own answer mirrored
    ipm:K           all send -ε times the honest mean (Xie, Koyejo and Gupta, Fall of Empires, UAI 2019), ε = 0.5
    alie:K          all send the honest mean plus z honest standard deviations (Baruch, Baruch and Goldberg, A Little Is Enough,
                    NeurIPS 2019), z = 1.5
    noise:K         each sends Gaussian noise of deviation σ = 1
    label-flip:K    honest work on false labels, in rows' `label` or `labels`: class c is called C - 1 - c

Mirrored and scaled are differences from the point that answers are near, where the algorithm names one, or from 0. A third part
sets ε, z, σ or the multiple of the mirrored difference, as in ipm:2:0.1. The liars know all honest answers of their cohort.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.population import Population, Shards
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.settings import nearest

STRENGTHS = {"sign-flip": 1.0, "ipm": 0.5, "alie": 1.5, "noise": 1.0, "label-flip": 1.0}
FORM = "NAME:CLIENTS or NAME:CLIENTS:STRENGTH, as in sign-flip:2"


@dataclass(frozen=True)
class Attack:
    """What the clients below `liars` do."""

    name: str
    liars: int
    strength: float

    @classmethod
    def parse(cls, text: str) -> Attack:
        """The attack that a text describes; `InputError` if it describes none."""
        name, *numbers = text.split(":")
        if name not in STRENGTHS:
            raise InputError(f"there is no attack {name!r}{nearest(name, STRENGTHS)}")
        try:
            liars, strength = int(numbers[0]), float(numbers[1]) if len(numbers) > 1 else STRENGTHS[name]
        except (ValueError, IndexError):
            raise InputError(f"attack must be {FORM}; given: {text}") from None
        if len(numbers) > 2 or liars < 1 or not np.isfinite(strength) or strength < 0:
            raise InputError(f"attack must be {FORM}, with at least one client and a strength of at least 0; given: {text}")
        return cls(name, liars, strength)

    def require(self, population: Population) -> None:
        """Raise `InputError` unless an honest client is left."""
        if self.liars >= population.size:
            raise InputError(f"attack: at most {population.size - 1} of {population.size} clients can lie; given: {self.liars}")

    def corrupted(self, members: Array, active: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        """The answers of a cohort, those of the liars in it replaced; whole numbers stay as they are."""
        lying = members < self.liars
        honest = active & ~lying
        leaves, structure = jax.tree.flatten(rows)
        centers = [jnp.zeros(())] * len(leaves) if around is None else jax.tree.leaves(around)
        keys = jax.random.split(key, len(leaves))
        sent = [
            jnp.where(_over(lying, r), self._forged(r, z, _over(honest, r), k), r)
            if jnp.issubdtype(r.dtype, jnp.floating)
            else r
            for r, z, k in zip(leaves, centers, keys, strict=True)
        ]
        return jax.tree.unflatten(structure, sent)

    def _forged(self, rows: Array, center: Array, honest: Array, key: Array) -> Array:
        n = jnp.maximum(honest.sum(), 1)
        mean = jnp.where(honest, rows, 0).sum(0) / n
        match self.name:
            case "sign-flip":
                return center - self.strength * (rows - center)
            case "ipm":
                return jnp.broadcast_to(center - self.strength * (mean - center), rows.shape)
            case "alie":
                variance = jnp.where(honest, (rows - mean) ** 2, 0).sum(0) / jnp.maximum(n - 1, 1)
                return jnp.broadcast_to(mean + self.strength * jnp.sqrt(variance), rows.shape)
            case "noise":
                return center + self.strength * jax.random.normal(key, rows.shape, rows.dtype)
            case _:
                return rows

    def poisoned(self, population: Population) -> Population:
        """The population, with false labels at the liars if that is their attack; `InputError` if the rows have no labels."""
        if self.name != "label-flip":
            return population
        upper, lower = (self._relabelled(shards) for shards in (population.upper, population.lower))
        return dataclasses.replace(population, upper=upper, lower=lower)

    def _relabelled(self, shards: Shards) -> Shards:
        last = int(shards.start[self.liars])  # rows lie client by client
        paths, structure = jax.tree_util.tree_flatten_with_path(shards.rows)
        named = [jax.tree_util.keystr(path).rstrip("']").endswith(("label", "labels")) for path, _ in paths]
        if not any(named):
            raise InputError("label-flip needs rows with `label` or `labels`, and this task's have neither: choose another")
        leaves = [
            leaf.at[:last].set(leaf.max() - leaf[:last]) if is_labels else leaf
            for (_, leaf), is_labels in zip(paths, named, strict=True)
        ]
        return dataclasses.replace(shards, rows=jax.tree.unflatten(structure, leaves))


def _over(flags: Array, rows: Array) -> Array:
    """Flags of members, shaped to choose among their rows."""
    return flags.reshape(-1, *(1,) * (rows.ndim - 1))
