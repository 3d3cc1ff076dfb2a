"""What two or more algorithms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from fedbilevel.clients import iterate
from fedbilevel.problem import Tree


def storm(at_new: Tree, momentum: Tree, at_old: Tree, keep: Array) -> Tree:
    """D(new; B) + keep · (momentum - D(old; B)), both D on the same minibatch B.

    Cutkosky and Orabona, Momentum-based variance reduction in non-convex SGD, 2019.
    """
    return jax.tree.map(lambda new, m, old: new + keep * (m - old), at_new, momentum, at_old)


def neumann(hessian: Callable[[Any, Array], Array], v: Array, step: Array | float, terms: int) -> Array:
    """step · Σ_{k<terms} Π_{j<k} (I - step H_j) v, which tends to H⁻¹ v.

    `hessian(j, r)` is H_j r; with independent minibatches for every j the expectation is the same series in E[H].
    """

    def term(k: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        power, total = carry
        power = power - step * hessian(k, power)
        return power, total + power

    return step * iterate(terms - 1, term, (v, v))[1]
