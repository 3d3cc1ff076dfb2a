"""The pace of x: what FedPace and FedPace-Local multiply x's step with, so that nobody has to.

The pace p is 1 to begin with. It grows by 2 % in a round, up to 10, while rounds agree on x's direction, and sinks back to 1
while they do not. It is halved when f has risen above its least by more than it changes from round to round, and x's direction
points back to where f was least.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.curvature import squared
from fedbilevel.core.problem import Tree

FASTER, FASTEST = 1.02, 10  # the pace's growth in a round, and its bound
FADE = 0.98  # of a measured curvature from round to round
PATIENCE = 25  # rounds after which f may be found to have risen


class Averages(NamedTuple):
    """What is averaged over rounds with β, from the first round's value on."""

    dx: Array  # |D_x|²
    loss: Array  # f
    jump: Array  # of f from round to round, squared

    def agree(self, along: Array) -> Array:
        """Whether rounds agree on x's direction: the average of their directions is at least √½ as long as they are."""
        return 2 * squared(along) > self.dx


class Pace(NamedTuple):
    """The pace, and what decides it."""

    p: Array
    averages: Averages
    last_loss: Array
    least: Array  # loss since the pace was last halved
    best_x: Array  # where that was
    since: Array  # rounds

    @classmethod
    def first(cls, x: Array) -> Pace:
        """The pace of the first round."""
        zero = jnp.zeros((), x.dtype)
        return cls(zero + 1, Averages(zero, zero, zero), zero, zero, x, jnp.int32(0))

    def after(self, t: Array, beta: float, x: Array, d: Array, along: Array, loss: Array) -> Pace:
        """The pace after round t = 0, 1, ... at x, which has found the direction d and the loss, and moves x along `along`."""
        jump = jnp.where(self.since > 0, loss - self.last_loss, 0) ** 2
        averages = averaged(t, beta, self.averages, Averages(squared(d), loss, jump))
        better = (averages.loss <= self.least) | (self.since == 0)
        least, best_x = jnp.where(better, averages.loss, self.least), jnp.where(better, x, self.best_x)
        risen = (averages.loss > least + jnp.sqrt(averages.jump)) & (jnp.vdot(along, x - best_x) > 0) & (self.since > PATIENCE)
        calmer = jnp.minimum(self.p, jnp.maximum(1, self.p / FASTER))
        p = jnp.where(averages.agree(along), jnp.minimum(self.p * FASTER, FASTEST), calmer)
        p = jnp.where(risen, self.p / 2, p)
        return Pace(p, averages, loss, least, best_x, jnp.where(risen, 0, self.since + 1))


def average(beta: float, old: Tree, new: Tree) -> Tree:
    """β old + (1 - β) new"""
    return jax.tree.map(lambda a, b: beta * a + (1 - beta) * b, old, new)


def averaged(t: Array, beta: float, old: Tree, new: Tree) -> Tree:
    """The average after round t = 0, 1, ..., which the first round's value starts."""
    return jax.tree.map(lambda a, b: jnp.where(t > 0, a, b), average(beta, old, new), new)


def if_any(active: Array, new: Tree, old: Tree) -> Tree:
    """What is new if anyone takes part, and what is old if not."""
    return jax.tree.map(lambda a, b: jnp.where(jnp.any(active), a, b), new, old)
