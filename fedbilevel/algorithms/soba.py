"""What the compressed SOBA methods share: how the server moves along a direction D in x, y and u.

x ← x - α h,    h ← (1 - θ) h + θ D_x,    y ← y - β D_y,    u ← P_r(u - γ D_u).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import HYPERGRADIENT_NORM, U_NORM, Algorithm
from fedbilevel.core.clients import Clients
from fedbilevel.core.problem import Point
from fedbilevel.settings import count, real, step_size


@dataclass(frozen=True, kw_only=True)
class CompressedSOBA(Algorithm):
    """An algorithm with one loop, one round per step, and a moving average for x."""

    reports: ClassVar[Mapping[str, str]] = {**HYPERGRADIENT_NORM, **U_NORM}
    gathers: ClassVar[bool] = True  # clients send unlike entries

    alpha: float = step_size(0.02, "α, step on x")
    beta: float = step_size(0.1, "β, step on y")
    gamma: float = step_size(0.1, "γ, step on u")
    theta: float = real(0.2, "θ, weight of the new direction in x's moving average", above=0, most=1)
    radius: float = real(1e4, "r, bound on the norm of u", source="ours: idle unless u runs away", above=0)
    one_in: int = count(4, "s: a client sends one in this many entries")

    def moved(self, z: Point, h: Array, d: Point, clients: Clients) -> tuple[Point, Array]:
        """The point after the step, and the new h."""
        z = z.moved(Point(h, d.y, d.u), self.alpha, self.beta, self.gamma, self.radius)
        clients.report(hypergradient_norm=jnp.linalg.norm(h), u_norm=jnp.linalg.norm(z.u))
        return z, (1 - self.theta) * h + self.theta * d.x

    def rounds(self, key: Array, size: int) -> int:
        return 1
