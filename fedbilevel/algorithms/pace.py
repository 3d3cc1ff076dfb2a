"""The pace of x: what FedPace and its two variants multiply x's step with, so that nobody has to.

The pace p is 1 to begin with. It grows by 2 % in a round, up to a bound that its method sets, while rounds agree on x's
direction, and sinks back to 1 while they do not. It is halved when f has risen above its least by more than it changes from
round to round, and x's direction points back to where f was least.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.curvature import squared
from fedbilevel.core.problem import Tree

FASTER = 1.02  # the pace's growth in a round
FADE = 0.98  # of a measured curvature from round to round
PATIENCE = 25  # rounds after which f may be found to have risen


class Averages(NamedTuple):
    """What is averaged over rounds with β, from the first round's value on."""

    dx: Array  # |D_x|²
    loss: Array  # f
    jump: Array  # of f from round to round, squared

    def agree(self, along: Array) -> Array:
        """Whether rounds agree on x's direction: its average, of that squared length, is at least √½ as long as they are."""
        return 2 * along > self.dx


class Heading(NamedTuple):
    """What the pace depends on of x and its direction, wherever these are."""

    dx: Array  # |D_x|²
    along: Array  # |a|², where a is the average direction that x moves along
    ahead: Array  # ⟨a, x - best x⟩: positive if a points back to where f was least

    @classmethod
    def of(cls, d: Array, along: Array, x: Array, best_x: Array) -> Heading:
        """That of these vectors."""
        return cls(squared(d), squared(along), jnp.vdot(along, x - best_x))


class Pace(NamedTuple):
    """The pace, and what decides it."""

    p: Array
    averages: Averages
    last_loss: Array
    least: Array  # loss since the pace was last halved
    best_x: Any  # where that was; None if only the clients know
    since: Array  # rounds

    @classmethod
    def first(cls, x: Any, zero: Array) -> Pace:
        """The pace of the first round."""
        return cls(zero + 1, Averages(zero, zero, zero), zero, zero, x, jnp.int32(0))

    def after(self, t: Array, beta: float, heading: Heading, loss: Array, fastest: Array | float) -> tuple[Pace, Array]:
        """The pace after round t = 0, 1, ..., which has found this heading and loss, and whether the loss is the least so far.

        If it is, `best_x` is to become the x of that round.
        """
        jump = jnp.where(self.since > 0, loss - self.last_loss, 0) ** 2
        averages = averaged(t, beta, self.averages, Averages(heading.dx, loss, jump))
        better = (averages.loss <= self.least) | (self.since == 0)
        least = jnp.where(better, averages.loss, self.least)
        back = (heading.ahead > 0) & ~better
        risen = (averages.loss > least + jnp.sqrt(averages.jump)) & back & (self.since > PATIENCE)
        calmer = jnp.minimum(self.p, jnp.maximum(1, self.p / FASTER))
        p = jnp.where(averages.agree(heading.along), jnp.minimum(self.p * FASTER, fastest), calmer)
        p = jnp.where(risen, self.p / 2, p)
        return Pace(p, averages, loss, least, self.best_x, jnp.where(risen, 0, self.since + 1)), better


def average(beta: float, old: Tree, new: Tree) -> Tree:
    """β old + (1 - β) new"""
    return jax.tree.map(lambda a, b: beta * a + (1 - beta) * b, old, new)


def averaged(begun: Array, beta: float, old: Tree, new: Tree) -> Tree:
    """The average of what comes in round by round, which starts from the new value if nothing has come yet: `begun` is 0."""
    return jax.tree.map(lambda a, b: jnp.where(begun > 0, a, b), average(beta, old, new), new)


def if_any(active: Array, new: Tree, old: Tree) -> Tree:
    """What is new if anyone takes part, and what is old if not."""
    return jax.tree.map(lambda a, b: jnp.where(jnp.any(active), a, b), new, old)
