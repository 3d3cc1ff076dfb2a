"""Means that hide what any one client contributes: each client's change is clipped, and the server adds noise.

With z the point that answers are near (see `Cohort.mean`), C the bound and n the members that answer, the mean is

    z + ( Σ_i min(1, C / |h_i - z|) (h_i - z)  +  σ C ξ ) / n,    ξ ~ N(0, I),

over all arrays of an answer as one vector (McMahan, Ramage, Talwar and Zhang, Learning Differentially Private Recurrent
Language Models, ICLR 2018). Whatever becomes of such means is private at the level of clients: whoever sees x and y learns
little about any one client's data as a whole. The server is trusted, since it sees single answers and metrics; in a federation
its noise comes from a secret of its own. ε counts every call of the client that is asked most, as if all of them were averaged,
and does not count on chance in who takes part, which others may know. Algorithms whose server needs single answers are refused,
and the drift between clients is not reported.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.aggregation import Aggregation, aggregation, change_from, weighted_sum
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.privacy import clip_factor, gaussian
from fedbilevel.core.problem import Tree
from fedbilevel.core.randomness import fold_in
from fedbilevel.errors import InputError
from fedbilevel.settings import real, step_size


@aggregation
class PrivateMean(Aggregation):
    """The mean of clipped changes, with noise."""

    noisy: ClassVar[bool] = True

    clip: float = step_size(1.0, "C, the longest change that counts in full")
    epsilon: float | None = real(None, "ε of the whole run, to which the noise is calibrated", above=0, most=100)
    delta: float = real(1e-5, "δ", above=0, below=0.5)
    noise: float | None = real(None, "σ, the noise's deviation in units of C", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is not None and self.noise is not None:
            raise InputError("private-mean: give either epsilon, to which the noise is calibrated, or the noise")

    def require(self, population: Population, participation: Participation) -> None:
        super().require(population, participation)
        if self.noise is None:
            raise InputError("private-mean: give epsilon, to which the noise is calibrated, or the noise")

    def combine(self, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        assert self.noise is not None
        there = weights > 0
        changes = jax.vmap(lambda row: change_from(around, row))(rows)
        lengths = jnp.sqrt(sum(jnp.sum(jnp.square(c.reshape(len(there), -1)), 1) for c in jax.tree.leaves(changes)))
        shares = jnp.where(there, clip_factor(lengths, self.clip), 0) / there.sum()
        finite = jax.tree.map(lambda c: jnp.where(jnp.isfinite(c), c, 0), changes)
        means, structure = jax.tree.flatten(weighted_sum(shares, finite))
        deviation = self.noise * self.clip / there.sum()
        noisy = [m + (deviation * gaussian(fold_in(key, k), m)).astype(m.dtype) for k, m in enumerate(means)]
        mean = jax.tree.unflatten(structure, noisy)
        return mean if around is None else jax.tree.map(jnp.add, around, mean)
