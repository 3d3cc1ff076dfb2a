"""Heterogeneous quadratics with closed forms: the task that shows whether a method is right.

    g_m(x, y) = ½ yᵀ A_m y - yᵀ (B_m x + b_m),    f_m(x, y) = ½ |y - c_m|² + ½ ρ |x - d_m|²

A_m has its eigenvalues in [1 / condition, 1]. With A, B, b, c, d the weighted averages, J = A⁻¹B and
y*(x) = J x + A⁻¹b, a global lower level has ∇h(x) = ρ (x - d) + Jᵀ (y*(x) - c). A local one has the
average of the same expression with each client's own matrices.
Noise comes from the data: a client's rows differ in all of A, B, b, c and d, and average exactly to its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedbilevel.core.devices import require_memory
from fedbilevel.core.population import Population
from fedbilevel.core.problem import LowerLevel, Problem
from fedbilevel.settings import choice, count, real
from fedbilevel.tasks.base import Better, SuitedTable, Task
from fedbilevel.tasks.declare import task

RIDGE = 0.1  # ρ


class LowerRows(NamedTuple):
    """A row is one quadratic of g."""

    A: ArrayLike
    B: ArrayLike
    b: ArrayLike


class UpperRows(NamedTuple):
    """A row is one quadratic of f."""

    c: ArrayLike
    d: ArrayLike


def f(x: Array, y: Array, rows: UpperRows) -> Array:
    """½ |y - c|² + ½ ρ |x - d|², averaged over the rows."""
    return 0.5 * jnp.mean(jnp.sum((y - rows.c) ** 2, -1) + RIDGE * jnp.sum((x - rows.d) ** 2, -1))


def g(x: Array, y: Array, rows: LowerRows) -> Array:
    """½ yᵀAy - yᵀ(Bx + b), averaged over the rows."""
    A, B, b = (jnp.mean(rows_of, 0) for rows_of in rows)
    return 0.5 * y @ A @ y - y @ (B @ x + b)


PROBLEM = Problem(f, g)


def noisy_rows(center: np.ndarray, noise: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows around a center that average to it exactly."""
    e = rng.standard_normal((count, *center.shape))
    return np.asarray(center + noise * (e - e.mean(0)), dtype=jnp.result_type(float))


@dataclass(frozen=True)
class Coefficients:
    """Every client's matrices and vectors, a row per client, and the clients' weights."""

    A: np.ndarray
    B: np.ndarray
    b: np.ndarray
    c: np.ndarray
    d: np.ndarray
    weights: np.ndarray

    def mean(self) -> Coefficients:
        """One client, the average of all."""
        A, B, b, c, d = (np.tensordot(self.weights, a, 1)[None] for a in (self.A, self.B, self.b, self.c, self.d))
        return Coefficients(A, B, b, c, d, np.ones(1))

    def lower(self, x: np.ndarray) -> np.ndarray:
        """Each client's own y*(x)."""
        return np.linalg.solve(self.A, (self.B @ x + self.b)[..., None])[..., 0]

    def hypergradient(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The average over clients of ∇_x f - ∇²_xy g A⁻¹ ∇_y f, each at its own row of y."""
        u = np.linalg.solve(self.A, (y - self.c)[..., None])[..., 0]
        each = RIDGE * (x - self.d) + np.einsum("mqp,mq->mp", self.B, u)
        return self.weights @ each

    def upper(self) -> np.ndarray:
        """x*, where the average of the clients' hypergradients is zero."""
        J = np.linalg.solve(self.A, self.B)
        rest = RIDGE * self.d + np.einsum("mqp,mq->mp", J, self.c - np.linalg.solve(self.A, self.b[..., None])[..., 0])
        curvature = RIDGE * np.eye(self.d.shape[1]) + np.einsum("m,mqp,mqr->pr", self.weights, J, J)
        return np.linalg.solve(curvature, self.weights @ rest)


@task
class Quadratic:
    """Heterogeneous quadratics with a known solution."""

    headline: ClassVar[str] = "x_error"
    better: ClassVar[Better] = {"x_error": "lower", "y_error": "lower"}
    suited: ClassVar[SuitedTable] = {}

    clients: int = count(10, "number of clients")
    x_dimension: int = count(5, "dimension of x")
    y_dimension: int = count(8, "dimension of y")
    condition: float = real(10.0, "condition number of the lower Hessians", least=1)
    hessian_heterogeneity: float = real(0.5, "0: all clients share A and B; 1: each has its own", least=0, most=1)
    linear_heterogeneity: float = real(1.0, "spread of the clients' b, c and d", least=0)
    noise: float = real(0.0, "standard deviation of one row's b, c and d; of A and B divided by their columns", least=0)
    rows: int = count(32, "rows per client, if there is noise", least=2)
    batch_size: int = count(1, "rows in a minibatch, if there is noise")
    lower_level: LowerLevel = choice("global", "whose problem y solves", ("global", "local"))
    data_seed: int = count(0, "random seed of the coefficients and the noise", least=0)

    def coefficients(self) -> Coefficients:
        """The clients' matrices and vectors."""
        rng, q, p, M = np.random.default_rng(self.data_seed), self.y_dimension, self.x_dimension, self.clients
        h, spread = self.hessian_heterogeneity, self.linear_heterogeneity

        def hessian() -> np.ndarray:
            basis = np.linalg.qr(rng.standard_normal((q, q)))[0]
            return basis @ np.diag(np.geomspace(1 / self.condition, 1, q)) @ basis.T

        def vectors(size: int) -> np.ndarray:
            return rng.standard_normal(size) + spread * rng.standard_normal((M, size))

        shared, B = hessian(), rng.standard_normal((q, p)) / np.sqrt(p)
        return Coefficients(
            A=np.stack([(1 - h) * shared + h * hessian() for _ in range(M)]),
            B=np.stack([B + h * rng.standard_normal((q, p)) / np.sqrt(p) for _ in range(M)]) * 0.3,
            b=vectors(q) * 0.3,
            c=vectors(q),
            d=vectors(p),
            weights=np.full(M, 1 / M),
        )

    def build(self, data: str = "") -> Task:
        """The task, starting from zero; it makes its own data."""
        p, q, count = self.x_dimension, self.y_dimension, self.rows if self.noise else 1
        numbers = self.clients * (count + 1) * (q * q + q * p + 2 * q + p) + 3 * p * p
        require_memory("quadratic", 8 * numbers, "lower clients, x_dimension, y_dimension or rows")
        k, rng = self.coefficients(), np.random.default_rng([self.data_seed, 1])

        def rows(center: np.ndarray) -> np.ndarray:
            return noisy_rows(center, self.noise / center.shape[-1] if center.ndim > 1 else self.noise, count, rng)

        population = Population.build(
            PROBLEM,
            upper=[UpperRows(rows(k.c[m]), rows(k.d[m])) for m in range(self.clients)],
            lower=[LowerRows(rows(k.A[m]), rows(k.B[m]), rows(k.b[m])) for m in range(self.clients)],
            batch_size=self.batch_size if self.noise else None,
        )
        target = k.mean() if self.lower_level == "global" else k
        x_star = jnp.asarray(target.upper())

        def metrics(x: Array, y: Any) -> dict[str, Array]:
            y_star = jnp.asarray(target.lower(np.zeros(self.x_dimension))) + jnp.einsum(
                "mqp,p->mq", jnp.asarray(np.linalg.solve(target.A, target.B)), x
            )
            return {
                "x_error": jnp.linalg.norm(x - x_star),
                "y_error": jnp.linalg.norm(y - (y_star[0] if self.lower_level == "global" else y_star)),
            }

        return Task(
            population,
            jnp.zeros(self.x_dimension),
            jnp.zeros(self.y_dimension),
            metrics,
            self.lower_level,
        )
