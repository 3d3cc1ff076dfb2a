"""Hypergradient estimators against the closed form of their own truncated series."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import weighted

import fedbilevel as fb
from fedbilevel.algorithms.estimators import (
    Sparse,
    compressed,
    conjugate_gradients,
    corrected_descent,
    local_direction,
    neumann,
    unbiased,
)
from fedbilevel.algorithms.storm import storm
from fedbilevel.core.participation import Uniform
from fedbilevel.core.problem import Pair
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.engines.simulated_clients import SimulatedClients
from fedbilevel.tasks.quadratic import RIDGE, Quadratic

KEYS = 8_000
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


@pytest.mark.parametrize("condition", [1.0, 1000.0])
def test_conjugate_gradients_give_the_inverse_and_stop_there(condition):
    A = Quadratic(condition=condition).coefficients().A[0]
    for rhs in (np.arange(8.0), np.zeros(8)):
        found = conjugate_gradients(lambda v: jnp.asarray(A) @ v, jnp.asarray(rhs), 30)
        np.testing.assert_allclose(found, np.linalg.solve(A, rhs), rtol=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_conjugate_gradients_go_downhill_whatever_the_matrix_is(seed):
    half, rhs = np.random.default_rng(seed).standard_normal((2, 6, 6))
    found = conjugate_gradients(lambda v: jnp.asarray(half + half.T) @ v, jnp.asarray(rhs[0]), 20)
    assert np.isfinite(found).all() and rhs[0] @ found > 0


def test_neumann_tends_to_the_inverse():
    A = Quadratic().coefficients().A[0]
    limit = neumann(lambda j, r: jnp.asarray(A) @ r, jnp.ones(8), 1.0, 500)
    np.testing.assert_allclose(limit, np.linalg.solve(A, np.ones(8)), rtol=1e-9)


WEIGHTS = np.array([0.3, 0.25, 0.2, 0.15, 0.1])


def federation(clients, size, weights=None, noise=0.3):
    """A noisy heterogeneous population, `size` of which take part, and its coefficients' weighted averages."""
    task = Quadratic(clients=clients, hessian_heterogeneity=0.8, noise=noise, condition=4.0)
    population, k = task.build().population, task.coefficients()
    weights = np.full(clients, 1 / clients) if weights is None else weights
    population = weighted(population, weights)
    averages = [np.tensordot(weights, a, 1) for a in (k.A, k.B, k.b, k.c, k.d)]
    return SimulatedEngine(population, Uniform(size)), averages


def estimates(algorithm, simulator, keys=KEYS):
    """Independent estimates of the hypergradient at (X, Y)."""

    def estimate(key):
        server, clients = jax.random.split(key)
        return algorithm.hypergradient(
            jnp.asarray(X), jnp.asarray(Y), SimulatedClients(simulator.population, simulator.participation, clients), server
        )

    return np.asarray(
        jax.jit(lambda keys: jax.lax.map(estimate, keys, batch_size=500))(jax.random.split(jax.random.key(0), keys))
    )


@pytest.mark.parametrize(
    ("estimator", "weights", "size"), [("phe", WEIGHTS, 3), ("ihgp", WEIGHTS, 3), ("ihgp", None, 3)], ids=str
)
def test_estimators_are_unbiased_for_their_truncated_series(estimator, weights, size):
    simulator, (A, B, _, c, d) = federation(5, size, weights)
    algorithm = fb.FedMBO(estimator=estimator, neumann_terms=5, smoothness=1.5)
    p = series(A, Y - c, 1 / 1.5, 5)
    within_standard_error(estimates(algorithm, simulator), RIDGE * (X - d) + B.T @ p)


@pytest.mark.slow
def test_aggitd_is_unbiased_for_its_own_truncated_series():
    """h̃ = ∇_x f - λ ∇²_xy g Σ_Q Π_{t>Q} (I - λ H) ∇_y f(y^Q) along the rounds on y, here y^{t+1} = y^t - β ∇g(y^t)."""
    simulator, (A, B, b, c, d) = federation(4, 4, noise=0.0)
    N, step, beta = 4, 0.7, 0.3
    algorithm = fb.FBOAggITD(lower_rounds=N, neumann_step=step, beta=beta)

    def estimate(key):
        clients = SimulatedClients(simulator.population, simulator.participation, key)
        return algorithm.aggregate(jnp.asarray(X), jnp.asarray(Y), clients, clients.everyone(), jax.random.fold_in(key, 1))[0]

    found = jax.vmap(estimate)(jax.random.split(jax.random.key(0), 4000))
    y = [Y]
    for _ in range(N):
        y.append(y[-1] - beta * (A @ y[-1] - B @ X - b))
    contraction = np.eye(8) - step * A
    p = step * sum(np.linalg.matrix_power(contraction, N - Q) @ (y[Q] - c) for Q in range(N + 1))
    within_standard_error(found, RIDGE * (X - d) + B.T @ p)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["phe", "ihgp"])
def test_the_bias_falls_geometrically_in_the_number_of_terms(estimator):
    """By at most (1 - μ/ℓ) for each term, as in the papers' propositions."""
    simulator, (A, B, _, c, d) = federation(4, 4)
    exact = RIDGE * (X - d) + B.T @ np.linalg.solve(A, Y - c)
    eigenvalues = np.linalg.eigvalsh(A)
    biases = {}
    for terms in (2, 4, 8):
        algorithm = fb.FedMBO(estimator=estimator, neumann_terms=terms, smoothness=1.0)
        expected = RIDGE * (X - d) + B.T @ series(A, Y - c, 1.0, terms)
        found = estimates(algorithm, simulator, 4000)
        within_standard_error(found, expected, 4.5)
        biases[terms] = np.linalg.norm(expected - exact)
    for terms in (2, 4):
        assert biases[2 * terms] <= (1 - eigenvalues[0]) ** terms * biases[terms] * np.linalg.cond(A)
        assert biases[2 * terms] < 0.5 * biases[terms]


def variances(estimator, sizes, keys):
    """The variance of the hypergradient estimate for each number of participants, of 64 clients."""
    result = []
    for size in sizes:
        simulator, _ = federation(64, size, noise=0.2)
        algorithm = fb.FedMBO(estimator=estimator, neumann_terms=5, smoothness=1.5)
        result.append(estimates(algorithm, simulator, keys).var(0).sum())
    return result


@pytest.mark.slow
def test_the_variance_of_phe_falls_as_one_over_n_and_that_of_ihgp_does_not():
    sizes = [2, 4, 8, 16, 32]
    slopes = {
        estimator: np.polyfit(np.log(sizes), np.log(variances(estimator, sizes, 6000)), 1)[0] for estimator in ("phe", "ihgp")
    }
    assert -1.2 <= slopes["phe"] <= -0.8
    assert slopes["ihgp"] > -0.5  # the length that all share is random however many take part


def test_compression_keeps_what_it_leaves_out():
    v, residual = jnp.array([1.0, -5.0, 0.5, 2.0]), jnp.array([0.0, 1.0, 3.0, 0.0])
    sparse, left = compressed(v, residual, 2)
    assert set(np.asarray(sparse.places)) == {1, 2}
    np.testing.assert_allclose(sparse.dense(4), [0, -4, 3.5, 0])
    np.testing.assert_allclose(sparse.dense(4) + left, v + residual)
    rows = Sparse(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0, 1], [1, 3]]))
    np.testing.assert_allclose(rows.dense(4), [1, 5, 0, 4])


def test_unbiased_compression_is_right_on_average_over_all_orders():
    v = jnp.array([1.0, -5.0, 0.5, 2.0, 3.0])
    sent = [unbiased(v, jnp.array(order), 2) for order in itertools.permutations(range(5))]
    assert {len(sparse.values) for sparse in sent} == {2}
    np.testing.assert_allclose(np.mean([sparse.dense(5) for sparse in sent], 0), v, rtol=1e-6)


def test_corrected_descent_at_the_start_follows_the_given_direction():
    A = jnp.diag(jnp.array([1.0, 2.0]))
    start, direction = jnp.array([1.0, 1.0]), jnp.array([0.5, -0.5])
    one = corrected_descent(lambda v, k: A @ v, start, direction, 0.1, 1)
    np.testing.assert_allclose(one, start - 0.1 * direction)
    two = corrected_descent(lambda v, k: A @ v, start, direction, 0.1, 2)
    np.testing.assert_allclose(two, one - 0.1 * (A @ (one - start) + direction))


def test_the_local_neumann_hypergradient_is_unbiased_for_its_truncated_series():
    task = Quadratic(clients=1, noise=0.3, lower_level="local")
    population, k = task.build().population, task.coefficients()

    def estimate(key):
        return local_direction(population.client(0, key), Pair(jnp.asarray(X), jnp.asarray(Y)), 0.7, 4, 0).x

    estimates = jax.vmap(estimate)(jax.random.split(jax.random.key(0), KEYS))
    u = series(k.A[0], Y - k.c[0], 0.7, 5)
    within_standard_error(estimates, RIDGE * (X - k.d[0]) + k.B[0].T @ u)
