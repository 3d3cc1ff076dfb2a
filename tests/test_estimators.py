"""Hypergradient estimators against the closed form of their own truncated series."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.estimators import neumann, storm
from fedbilevel.participation import Uniform
from fedbilevel.problem import Pair
from fedbilevel.simulate import SimulatedClients, Simulator
from fedbilevel.tasks.quadratic import RIDGE, Quadratic

KEYS = 20_000
X, Y = np.linspace(-1, 1, 5), np.linspace(0.5, 1.5, 8)


def within_standard_error(samples, expected, bound=4.0):
    """Every coordinate's mean lies within `bound` standard errors of the expected value."""
    samples = np.asarray(samples)
    error = samples.std(0, ddof=1) / np.sqrt(len(samples))
    assert np.all(error > 0)
    np.testing.assert_array_less(np.abs(samples.mean(0) - expected), bound * error)


def series(A, v, step, terms):
    """step · Σ_{k<terms} (I - step A)^k v"""
    return step * sum(np.linalg.matrix_power(np.eye(len(v)) - step * A, k) @ v for k in range(terms))


def test_storm_with_nothing_kept_is_the_gradient_and_with_all_kept_the_corrected_momentum():
    new, momentum, old = jnp.arange(3.0), jnp.ones(3), jnp.full(3, 0.5)
    np.testing.assert_allclose(storm(new, momentum, old, 0.0), new)
    np.testing.assert_allclose(storm(new, momentum, old, 1.0), new + momentum - old)


def test_neumann_with_independent_hessians_is_unbiased_for_the_truncated_series():
    A = Quadratic(hessian_heterogeneity=1.0).coefficients().A
    v, terms, step = np.ones(8), 6, 0.8

    def estimate(key):
        chosen = jax.random.randint(key, (terms,), 0, len(A))
        return neumann(lambda j, r: jnp.asarray(A)[chosen[j]] @ r, jnp.asarray(v), step, terms)

    estimates = jax.vmap(estimate)(jax.random.split(jax.random.key(0), KEYS))
    within_standard_error(estimates, series(A.mean(0), v, step, terms))


def test_neumann_tends_to_the_inverse():
    A = Quadratic().coefficients().A[0]
    limit = neumann(lambda j, r: jnp.asarray(A) @ r, jnp.ones(8), 1.0, 500)
    np.testing.assert_allclose(limit, np.linalg.solve(A, np.ones(8)), rtol=1e-9)


def test_phe_is_unbiased_for_the_truncated_series_with_unequal_weights():
    task = Quadratic(clients=5, hessian_heterogeneity=0.8, noise=0.3)
    population, k = task.build().population, task.coefficients()
    w = np.array([0.3, 0.25, 0.2, 0.15, 0.1])
    population = dataclasses.replace(population, weights=jnp.asarray(w))
    algorithm = fb.FedMBO(neumann_terms=5, smoothness=1.5)
    simulator = Simulator(population, Uniform(3))

    def estimate(key):
        server, clients = jax.random.split(key)
        return algorithm.hypergradient(jnp.asarray(X), jnp.asarray(Y), SimulatedClients(simulator, clients), server)

    estimates = jax.lax.map(estimate, jax.random.split(jax.random.key(0), KEYS), batch_size=500)
    A, B, c, d = (np.tensordot(w, a, 1) for a in (k.A, k.B, k.c, k.d))
    p = series(A, Y - c, 1 / 1.5, 5)
    within_standard_error(estimates, RIDGE * (X - d) + B.T @ p)


def test_the_local_neumann_hypergradient_is_unbiased_for_its_truncated_series():
    task = Quadratic(clients=1, noise=0.3, lower_level="local")
    population, k = task.build().population, task.coefficients()
    algorithm = fb.FedBiOLocal(neumann_order=4, tau=0.7)

    def estimate(key):
        return algorithm.direction(population.client(0, key), Pair(jnp.asarray(X), jnp.asarray(Y)), 0).x

    estimates = jax.vmap(estimate)(jax.random.split(jax.random.key(0), KEYS))
    u = series(k.A[0], Y - k.c[0], 0.7, 5)
    within_standard_error(estimates, RIDGE * (X - k.d[0]) + k.B[0].T @ u)
