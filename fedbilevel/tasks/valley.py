"""A lower level that is not convex in y, with a known solution: for methods that claim to need no convexity.

    g_m(x, y) = Σ_j φ(y_j - x_j) + e_mᵀ(y - x),    f_m(x, y) = ½ |y - c_m|² + ½ ρ |x - d_m|²,    φ(s) = s² + 3 sin²(s)

φ is stationary only at 0, its minimum, but φ'' = 2 + 6 cos(2s) lies between -4 and 8: a proximal parameter
must be below ¼. The e_m average to zero, so y*(x) = x, and with c and d the averages x* = (c + ρ d)/(1 + ρ).
The start, y - x = 1, is where ∇²_yy g is negative definite. Gradient noise comes from the data: a client's rows
differ in c, d and e, and average exactly to its own.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedbilevel.core.devices import require_memory
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Problem
from fedbilevel.settings import count, real
from fedbilevel.tasks.base import Better, SuitedTable, Task, mefbo_steps, simfbo_steps, suit
from fedbilevel.tasks.declare import task
from fedbilevel.tasks.quadratic import RIDGE, UpperRows, f, noisy_rows


class LowerRows(NamedTuple):
    """A row is one tilt of g."""

    e: ArrayLike


def g(x: Array, y: Array, rows: LowerRows) -> Array:
    """Σ_j φ(y_j - x_j) + eᵀ(y - x), averaged over the rows."""
    s = y - x
    return jnp.sum(s**2 + 3 * jnp.sin(s) ** 2) + jnp.mean(rows.e, 0) @ s


PROBLEM = Problem(f, g)


@task
class Valley:
    """A lower level that is not convex, with a known solution."""

    headline: ClassVar[str] = "x_error"
    better: ClassVar[Better] = {"x_error": "lower", "y_error": "lower"}
    suited: ClassVar[SuitedTable] = {
        "valley": suit(
            "by trial; MeFBO's γ is below ¼",
            fedbioacc=dict(eta=0.1, gamma=0.2, tau=0.2),
            fedbio=dict(eta=0.02, gamma=0.05, tau=0.05),
            simfbo=simfbo_steps(0.02, 0.05, 0.05),
            fedmbo=dict(alpha=0.05, beta=0.1, smoothness=8),
            mefbo=dict(mefbo_steps(0.1, 0.05, 0.06), penalty=10, proximal=0.1),
        )
    }

    clients: int = count(10, "number of clients")
    dimension: int = count(5, "dimension of x and of y")
    heterogeneity: float = real(1.0, "spread of the clients' c, d and e", least=0)
    noise: float = real(0.0, "standard deviation of one row's gradient", least=0)
    rows: int = count(32, "rows per client, if there is noise", least=2)
    batch_size: int = count(1, "rows in a minibatch, if there is noise")
    data_seed: int = count(0, "random seed of the coefficients and the noise", least=0)

    def build(self, data: str = "") -> Task:
        """The task; it makes its own data."""
        rng, M, count = np.random.default_rng(self.data_seed), self.clients, self.rows if self.noise else 1
        require_memory("valley", 8 * M * (count + 1) * 3 * self.dimension, "lower clients, dimension or rows")

        def spread() -> np.ndarray:
            return self.heterogeneity * rng.standard_normal((M, self.dimension))

        def rows(center: np.ndarray) -> np.ndarray:
            return noisy_rows(center, self.noise, count, rng)

        c, d = (rng.standard_normal(self.dimension) + spread() for _ in range(2))
        e = spread()
        e -= e.mean(0)
        population = Population.build(
            PROBLEM,
            upper=[UpperRows(rows(c[m]), rows(d[m])) for m in range(M)],
            lower=[LowerRows(rows(e[m])) for m in range(M)],
            batch_size=self.batch_size if self.noise else None,
        )
        x_star = jnp.asarray((c.mean(0) + RIDGE * d.mean(0)) / (1 + RIDGE))

        def metrics(x: Array, y: Array) -> dict[str, Array]:
            return {
                "x_error": jnp.linalg.norm(x - x_star),
                "y_error": jnp.linalg.norm(y - x),
            }

        return Task(
            population,
            jnp.zeros(self.dimension),
            jnp.ones(self.dimension),
            metrics,
            strongly_convex=False,
        )
