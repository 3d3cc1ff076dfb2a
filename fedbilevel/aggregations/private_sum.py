"""Means that hide what any one client contributes, also from the server: clients add the noise, and only their sum is seen.

With z the point that answers are near (see `Cohort.mean`; zeros where there is none), client i shortens its change h_i - z to
the length C, `clip`, if all arrays of it as one vector are longer, and sends it in a secure sum as whole numbers, with a share
of the noise, whose deviation is to be σ C in the sum: σ is `noise`, or what ε asks for. In steps of s = σ C / (D √(t - c)),
with ξ_i ~ N(0, I) of its own, it sends

    trunc( min(1, C / |h_i - z|) (h_i - z) / s )  +  round( D ξ_i ),

where t is `at_least`, c is `colluding`, and D is 2¹⁷, or what fits into a sum of 32 bits over the cohort. No sum over fewer
than t clients is opened, whoever drops out, and whoever attacks knows at most c of their shares: a member knows its own, and
the server those that members tell it. So the sum has at least the noise of t - c shares, whose variance is (σ C / s)². With all
n of a cohort it has more, by n / (t - c).

The sum is at least as private as that of the Gaussian mechanism with that noise, which is what ε counts, for a client's
contribution replaced by zeros (C), not by what other data would have given (2C). Truncation lengthens nothing, so clients
contribute C / s or less. A rounded normal number is k with a probability that is the density at k of a normal number plus a
uniform one on [-½, ½]. So is the sum of m rounded ones with m of each, up to aliases that by Poisson's summation formula are
of the order of exp(-π² D² / 2), less than 10⁻⁸⁰⁰⁰ for a D of at least 64. If one of the uniform numbers is seen as what
rounding all the rest takes away, the sum is a rounded normal number plus m - 1 uniform ones, which depend on nobody's data.
Other noise, for coarser steps: Kairouz, Liu and Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning
with Secure Aggregation, ICML 2021; Agarwal, Kairouz and Liu, The Skellam Mechanism for Differentially Private Federated
Learning, NeurIPS 2021.

Metrics are summed in the same way, each clipped alone, so that m of them are no longer than √m times the bound of one, which
is the C of their noise. In a simulation they are exact, and noise follows from its seed. In a federation it is made at each
site anew for every sum, also for one that is asked for again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.aggregations.private import PrivateClients, shortened
from fedbilevel.aggregations.secure import HiddenSum
from fedbilevel.core.aggregation import aggregation
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.privacy import LEAST_BOUND, MOST_NOISE, gaussian
from fedbilevel.core.problem import Tree
from fedbilevel.core.randomness import fold_in
from fedbilevel.errors import InputError
from fedbilevel.settings import count, real

MOST_STEPS, LEAST_STEPS = 2**17, 2**6  # D: few enough for the digits of single precision, and many
LONGEST = 20  # deviations, which no noise is as long as
MARGIN = 1e-3  # of the bound, for what rounding does to lengths


@aggregation
class PrivateSum(PrivateClients, HiddenSum):
    """The mean of clipped changes, from a hidden sum that has the clients' own noise."""

    typed: ClassVar[str] = "private-sum"
    clients_add_noise: ClassVar[bool] = True

    colluding: int = count(
        1, "c: members whose shares of the noise an attacker knows, fewer than t; every member knows its own", least=0
    )
    metric_noise: float = real(30.0, "σ of each evaluation of the metrics", above=0, most=MOST_NOISE)
    metric_clip: float = real(1.0, "the largest of each metric of a client that counts in full", least=LEAST_BOUND)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.colluding >= self.at_least:
            raise InputError(f"colluding must be below at_least, which is {self.at_least}; given: {self.colluding}")

    def require(self, population: Population, participation: Participation) -> None:
        super().require(population, participation)
        self.require_steps()

    def require_steps(self) -> None:
        """Raise `InputError` unless the noise is known, and is as good as what is not rounded."""
        for name, rule in (("noise", self), ("metric_noise", self.for_metrics(1))):
            if rule.deviation < LEAST_STEPS:
                raise InputError(f"{name} = {rule.noise:.3g} is too small for sums of 32 bits: raise it, or lower cohort")

    @property
    def counted_metric_noise(self) -> float:
        """See `PrivateClients`."""
        return self.metric_noise

    @property
    def step(self) -> float:
        """See `HiddenSum`."""
        return self.share * self.clip / self.deviation

    @property
    def share(self) -> float:
        """The deviation of a client's noise, in units of the bound."""
        return self.multiplier / math.sqrt(self.at_least - self.colluding)

    @property
    def deviation(self) -> float:
        """The same in steps: D."""
        return min(MOST_STEPS, self.most * self.share / (1 + LONGEST * self.share))

    def for_metrics(self, number: int) -> Self:
        return replace(self, epsilon=None, noise=self.metric_noise, clip=self.metric_clip * math.sqrt(number))

    def encode_metrics(self, metrics: Array) -> Array:
        """See `HiddenSum`: one that is too large does not shorten the others."""
        return super().encode_metrics(jnp.nan_to_num(jnp.clip(metrics, -self.metric_clip, self.metric_clip)))

    def encode(self, key: Array, change: Tree, memory: Tree) -> tuple[Tree, Tree]:
        kept = shortened(change, self.clip * (1 - MARGIN))
        return jax.tree.map(lambda c: jnp.trunc(c / self.step).astype(jnp.int32), kept), memory

    def with_noise(self, key: Array, message: Tree) -> Tree:
        numbers, structure = jax.tree.flatten(message)
        noise = (jnp.round(self.deviation * gaussian(fold_in(key, k), m)).astype(m.dtype) for k, m in enumerate(numbers))
        return jax.tree.unflatten(structure, map(jnp.add, numbers, noise))
