"""What S-TFBO and D-TFBO share: α, β and γ, which grow with the lengths of all gradients so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, U_NORM, Algorithm
from fedbilevel.core.clients import Clients
from fedbilevel.settings import real


class State(NamedTuple):
    """The server's point, and α, β and γ."""

    x: Array
    y: Array
    u: Array
    alpha: Array
    beta: Array
    gamma: Array


@dataclass(frozen=True, kw_only=True)
class TuningFree(Algorithm):
    """An algorithm whose steps are inverse cumulative lengths of gradients."""

    reports: ClassVar[Mapping[str, str]] = {
        **HYPERGRADIENT_NORM,
        **U_NORM,
        "step_x": "x's step in force",
        "step_y": "y's step in force",
        "step_u": "u's step in force",
    }

    late_answers: ClassVar[bool] = True

    start: float = real(1e-6, "α₀ = β₀ = γ₀", source="ours: far below the first gradients", above=0)

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        start = jnp.asarray(self.start, x.dtype)
        return State(x, y, jnp.zeros_like(y), start, start, start)
