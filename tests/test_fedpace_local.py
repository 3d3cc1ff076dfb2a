"""FedPace-Local without tuning: closed forms, invariance to units, derivatives by differences. See also test_pseudocode.py."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import trajectory

from fedbilevel.algorithms.fedpace_local import FedPaceLocal
from fedbilevel.algorithms.pace import if_any
from fedbilevel.core.clients import iterate
from fedbilevel.core.participation import Dropouts, Everyone, Uniform
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Problem
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.tasks.quadratic import Quadratic

ALGORITHM = FedPaceLocal()
SIZE, WAYS = 4, 3


states = partial(trajectory, ALGORITHM)


def errors(task, participation, steps):
    """|x - x*| after every step, as a share of the first, and the states."""
    built = task.build()
    found = states(SimulatedEngine(built.population, participation), built.x, built.y, steps)
    x_star = task.coefficients().upper()
    return np.linalg.norm(found.x - x_star, axis=1) / np.linalg.norm(built.x - x_star), found


LOCAL = partial(Quadratic, lower_level="local")


@pytest.mark.parametrize(
    "task",
    [
        LOCAL(),
        LOCAL(condition=1000.0),
        LOCAL(condition=1000.0, hessian_heterogeneity=1.0),
        LOCAL(hessian_heterogeneity=1.0, linear_heterogeneity=3.0, noise=0.3),
    ],
    ids=["mild", "ill-conditioned", "ill-conditioned, each in its own way", "very unequal, minibatches of one row"],
)
def test_closed_forms_are_reached_without_tuning(task):
    share, found = errors(task, Everyone(), 350)
    print(np.flatnonzero(share < 1e-4)[:1], share[-1])
    assert share[-1] < 1e-4
    np.testing.assert_allclose(found.y[-1].rows, task.coefficients().lower(np.asarray(found.x[-2])), rtol=1e-4)


@pytest.mark.parametrize("participation", [Uniform(3), Dropouts(Uniform(10), 0.5)], ids=str)
def test_the_noise_of_changing_cohorts_dies_down(participation):
    share, found = errors(LOCAL(clients=30), participation, 1200)
    print(share[[100, 300, 600, -1]], found.apart[-1])
    assert np.mean(share[-200:]) < 0.15 < np.mean(share[20:60])


def test_a_round_without_clients_changes_nothing():
    new, old = (jnp.ones(2), jnp.int32(3)), (jnp.zeros(2), jnp.int32(2))
    for active, wanted in (([False, False], old), ([False, True], new)):
        jax.tree.map(np.testing.assert_array_equal, if_any(jnp.asarray(active), new, old), wanted)


ROWS = [(rng.standard_normal((12, SIZE)), rng.integers(0, WAYS, 12)) for rng in map(np.random.default_rng, range(6))]


def scores(x, y, inputs):
    return jnp.tanh(inputs @ x.reshape(SIZE, 3)) @ y.reshape(3, WAYS)


def upper(x, y, rows):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores(x, y, rows[0])), rows[1][:, None], 1))


def lower(x, y, rows):
    return upper(x, y, rows) + 0.02 * jnp.sum(y**2)


HEADS = Population.build(Problem(upper, lower), ROWS[:3], ROWS[3:])
X = np.random.default_rng(0).standard_normal(SIZE * 3)
FAR = np.linspace(-9.0, 9.0, 3 * WAYS)


UNITS = np.array([[1, 1, 1, 1], [1000, 1, 1, 1], [1, 1000, 1, 1], [1, 1, 0.01, 1], [1, 1, 1, 0.01]])  # of f, g, x and y


def in_units(problem, units):
    f, g, x, y = units
    return Problem(lambda a, b, rows: f * problem.f(x * a, y * b, rows), lambda a, b, rows: g * problem.g(x * a, y * b, rows))


def assert_all_alike(found):
    """What has been found in each of some units is the same."""
    for ours, *theirs in found:
        for other in theirs:
            print(np.abs(other - ours).max() / np.abs(ours).max())
            assert np.abs(other - ours).max() < 1e-9 * np.abs(ours).max()


def test_units_do_not_matter_to_the_server():
    built = LOCAL().build()

    def run(units):
        population = dataclasses.replace(built.population, problem=in_units(built.population.problem, units))
        found = states(SimulatedEngine(population, Uniform(4)), built.x / units[2], built.y / units[3], 60)
        return found.x * units[2], found.y.rows * units[3], found.pace.p

    found = jax.lax.map(run, UNITS)
    assert_all_alike(found)
    assert np.ptp(found[0][0], 0).max() > 0.1  # it does move


def test_units_do_not_matter_to_a_client():
    def run(units):
        f, _, x, y = units
        problem, rows = in_units(HEADS.problem, units), HEADS.whole(0)
        solution = ALGORITHM.solution(problem, rows, X / x, FAR / y)
        answer = ALGORITHM.answer(problem, rows, X / x, solution)
        return solution * y, answer.d / (f * x), jnp.sqrt(answer.turned) / (f * x**2)

    assert_all_alike(jax.lax.map(run, UNITS))


def solved(x):
    """The first client's y*(x), from far away."""
    return iterate(30, lambda _, y: ALGORITHM.solution(HEADS.problem, HEADS.whole(0), x, y), jnp.asarray(FAR))


def test_a_lower_level_is_solved_from_far_away():
    y = jax.jit(solved)(jnp.asarray(X))
    assert np.linalg.norm(HEADS.problem.gy(X, y, HEADS.whole(0))) < 1e-10


def test_the_hypergradient_and_how_it_turns_are_those_of_differences():
    @jax.jit
    def at(x):
        y = solved(x)
        return ALGORITHM.answer(HEADS.problem, HEADS.whole(0), x, y)

    x, step = jnp.asarray(X), 1e-4
    answer = at(x)
    along = answer.d / jnp.linalg.norm(answer.d)
    ahead, behind = at(x + step * along), at(x - step * along)
    np.testing.assert_allclose((ahead.loss - behind.loss) / (2 * step), np.linalg.norm(answer.d), rtol=1e-6)
    turned = np.sum(((ahead.d - behind.d) / (2 * step)) ** 2)
    np.testing.assert_allclose(answer.turned, turned, rtol=1e-5)


@pytest.mark.parametrize("curvature", [0.0, -1.0])
def test_a_lower_level_that_does_not_bend_upwards_gives_finite_numbers(curvature):
    def g(x, y, rows):
        return 0.5 * curvature * jnp.sum(y**2) + jnp.sum(x * y) + jnp.mean(rows[0])

    population = dataclasses.replace(HEADS, problem=Problem(lambda x, y, rows: jnp.sum((x + y) ** 2), g))
    found = states(SimulatedEngine(population, Everyone()), jnp.ones(3), jnp.ones(3), 5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
