"""Means that hide what any one client contributes: each client's change is clipped, and the server adds noise.

With z the point that answers are near (see `Cohort.mean`), C the bound and n the members that answer, the mean is

    z + ( Σ_i min(1, C / |h_i - z|) (h_i - z)  +  σ C ξ ) / n,    ξ ~ N(0, I),

over all arrays of an answer as one vector (McMahan, Ramage, Talwar and Zhang, Learning Differentially Private Recurrent
Language Models, ICLR 2018). Whatever becomes of such means is private at the level of clients: whoever sees x and y learns
little about any one client's data as a whole. ε compares each sum with the one in which that client's contribution is
replaced by zeros, which is C away; with other data it can be 2C away, as if σ were half as large. The server is trusted,
since it sees single answers and metrics; in a federation its noise comes from a secret of its own. With private-sum it need
not be. ε counts every call of the client that is asked most, as if all of them were averaged, and does not count on chance in
who takes part, which others may know. Algorithms whose server needs single answers are refused, and the drift between clients
is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.aggregation import Aggregation, aggregation, change_from, weighted_sum
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.privacy import LEAST_BOUND, MOST_NOISE, clip_factor, gaussian
from fedbilevel.core.problem import Tree
from fedbilevel.core.randomness import fold_in
from fedbilevel.errors import InputError
from fedbilevel.settings import STEP_DECADES, real


@dataclass(frozen=True, kw_only=True)
class PrivateClients(Aggregation):
    """A rule whose means have noise of σ times the most that one client contributes to them."""

    typed: ClassVar[str]  # its name as users type it

    clip: float = real(1.0, "C, the longest change that counts in full", least=LEAST_BOUND, decades=STEP_DECADES)
    epsilon: float | None = real(None, "ε of the whole run, to which the noise is calibrated", above=0, most=100)
    delta: float = real(1e-5, "δ", above=0, below=0.5)
    noise: float | None = real(None, "σ, the noise's deviation in units of C", above=0, most=MOST_NOISE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is not None and self.noise is not None:
            raise InputError(f"{self.typed}: give either epsilon, to which the noise is calibrated, or the noise")

    def require(self, population: Population, participation: Participation) -> None:
        super().require(population, participation)
        self.multiplier  # noqa: B018 (which may raise)

    @property
    def multiplier(self) -> float:
        """σ, once it is known."""
        if self.noise is None:
            raise InputError(f"{self.typed}: give epsilon, to which the noise is calibrated, or the noise")
        return self.noise

    @property
    def counted_metric_noise(self) -> float | None:
        """σ of each evaluation of the metrics; None if the server, who is trusted, keeps them to itself."""
        return None


@aggregation
class PrivateMean(PrivateClients):
    """The mean of clipped changes, with noise."""

    typed: ClassVar[str] = "private-mean"
    server_adds_noise: ClassVar[bool] = True

    def combine(self, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        there = weights > 0
        changes = jax.vmap(lambda row: shortened(change_from(around, row), self.clip))(rows)
        means, structure = jax.tree.flatten(weighted_sum(there / there.sum(), changes))
        deviation = self.multiplier * self.clip / there.sum()
        noisy = [m + (deviation * gaussian(fold_in(key, k), m)).astype(m.dtype) for k, m in enumerate(means)]
        mean = jax.tree.unflatten(structure, noisy)
        return mean if around is None else jax.tree.map(jnp.add, around, mean)


def shortened(change: Tree, bound: float) -> Tree:
    """The change, shortened to the bound if all its arrays as one vector are longer; zeros if that is not finite."""
    factor = clip_factor(jnp.sqrt(sum(jnp.sum(jnp.square(c)) for c in jax.tree.leaves(change))), bound)
    return jax.tree.map(lambda c: jnp.where(jnp.isfinite(c), c, 0) * factor.astype(c.dtype), change)
