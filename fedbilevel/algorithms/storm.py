"""What the algorithms with STORM momenta share.

A. Cutkosky and F. Orabona, Momentum-Based Variance Reduction in Non-Convex SGD, NeurIPS 2019. In iteration t = 1, 2, ...

    z⁺ = z - η α_t d,    d⁺ = D(z⁺; B) + (1 - c α_t²) (d - D(z; B)),    α_t = δ / (u₀ + t)^⅓,

with both D on the same minibatch B. If c α_t² is 1 or more, no momentum is kept; such settings are refused.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import Scheduled
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.settings import settings


def storm(at_new: Tree, momentum: Tree, at_old: Tree, keep: Tree) -> Tree:
    """D(new; B) + keep · (momentum - D(old; B)), with one number in `keep` for each part."""
    return jax.tree.map(lambda new, m, old, k: new + k * (m - old), at_new, momentum, at_old, keep)


class WithMomenta(Scheduled):
    """An algorithm whose steps shrink with α_t, and whose momenta each forget a share c α_t² in an iteration."""

    delta: float
    offset: float
    local_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        forgetting = {name: getattr(self, name) for name in settings(type(self)) if name.startswith("c_")}
        if any(hasattr(number, "aval") for number in (self.delta, self.offset, *forgetting.values())):
            return  # JAX arrays are not checked, as in `check_all`
        for name, c in forgetting.items():
            forgotten = c * (self.delta / (self.offset + 1) ** (1 / 3)) ** 2
            if forgotten >= 1:
                raise InputError(
                    f"{type(self).__name__}: {name} α_t² must be below 1, or no momentum is kept; {name} = {c:g}, delta = "
                    f"{self.delta:g} and offset = {self.offset:g} make it {forgotten:.3g} at first: lower {name} or delta"
                )

    def alpha(self, t: Array | int) -> Array:
        """α_t"""
        return jnp.asarray(self.delta / (self.offset + t) ** (1 / 3))

    def scheduled(self, step: int) -> dict[str, float]:
        return {"alpha_t": float(self.alpha(step * self.local_steps))}
