"""MeFBO against the closed form of its penalty problem, without convexity, and within constraints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import SHARED_X, deployed, weighted

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.mefbo import State, Triple
from fedbilevel.core import ground_truth
from fedbilevel.core.participation import Everyone, Uniform
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Problem
from fedbilevel.core.sets import UNCONSTRAINED, Ball, Box, Everywhere, Sets, Simplex
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.quadratic import RIDGE, Quadratic
from fedbilevel.tasks.valley import Valley

QUADRATIC = Quadratic(clients=6, hessian_heterogeneity=0.3, condition=4.0)
FAST = fb.MeFBO(lambda_x=3.0, growth=0.0, proximal=1.0)
ON_VALLEY = fb.MeFBO(**Valley.suited["valley"]["mefbo"].values)


def states(task, algorithm, steps, every=1, participation=None):
    """The states of a run, every so many steps."""
    simulator = SimulatedEngine(task.population, participation or Everyone())
    key = jax.random.key(0)

    @jax.jit
    def advance(state):
        return jax.lax.fori_loop(0, every, lambda _, s: simulator.step(algorithm, s, jax.random.fold_in(key, s.t))[0], state)

    state, *_ = jax.jit(simulator.init)(algorithm, task.x, task.y, key)
    found = [state]
    for _ in range(steps // every):
        found.append(advance(found[-1]))
    return found


def stationary_point(c, proximal):
    """Where ∇Υ_c = 0 on the quadratic: linear equations in x, y and θ."""
    k = QUADRATIC.coefficients().mean()
    A, B, b, center, d = (a[0] for a in (k.A, k.B, k.b, k.c, k.d))
    q, p = B.shape
    one, prox = np.eye(q), np.eye(q) / proximal
    equations = np.block(
        [
            [RIDGE / c * np.eye(p), -B.T, B.T],
            [-B, one / c + A - prox, prox],
            [-B, -prox, A + prox],
        ]
    )
    return Triple(*np.split(np.linalg.solve(equations, np.concatenate([RIDGE / c * d, center / c + b, b])), [p, p + q]))


def test_one_round_is_equations_8_to_12():
    algorithm = fb.MeFBO(eta_x=0.2, eta_y=0.3, eta_theta=0.1, lambda_x=0.5, lambda_y=0.4, lambda_theta=0.7, local_steps=3)
    task, k, weights = QUADRATIC.build(), QUADRATIC.coefficients(), np.arange(1.0, 7.0) / 21
    population = weighted(task.population, weights)
    rng = np.random.default_rng(0)
    x0, y0, theta0 = rng.standard_normal(5), rng.standard_normal(8), rng.standard_normal(8)
    t, gamma = 4, algorithm.proximal
    c = algorithm.penalty * 5**algorithm.growth
    total = [0, 0, 0]
    for m in range(6):
        x, y, theta = x0, y0, theta0
        for _ in range(3):
            h_theta = k.A[m] @ theta - k.B[m] @ x - k.b[m] + (theta - y) / gamma
            h_y = (y - k.c[m]) / c + k.A[m] @ y - k.B[m] @ x - k.b[m] - (y - theta) / gamma
            h_x = RIDGE * (x - k.d[m]) / c - k.B[m].T @ y + k.B[m].T @ theta
            x, y, theta = x - 0.2 * h_x, y - 0.3 * h_y, theta - 0.1 * h_theta
            total = [old + weights[m] * h / 3 for old, h in zip(total, (h_x, h_y, h_theta), strict=True)]
    state = State(*map(jnp.asarray, (x0, y0, theta0)), jnp.int32(t))
    new, traffic, *_ = jax.jit(SimulatedEngine(population, Everyone()).step)(algorithm, state, jax.random.key(0))
    for got, old, h, step in zip(new[:3], (x0, y0, theta0), total, (0.5, 0.4, 0.7), strict=True):
        np.testing.assert_allclose(got, old - step * h, rtol=1e-12)
    assert new.t == 5 and traffic.rounds == 1


def test_both_gradients_of_g_are_on_the_same_rows():
    """On the valley a row's tilt e cancels from ∇_x g(x, y; ζ) - ∇_x g(x, θ; ζ): any noise of g's leaves h_x alone."""
    task = Valley(noise=100.0, clients=2).build()
    client = task.population.client(0, jax.random.key(1))
    x, y, theta = jnp.zeros(5), jnp.linspace(-1, 1, 5), jnp.linspace(0, 2, 5)
    batch = client.batch()
    h = ON_VALLEY.direction(client.problem, Triple(x, y, theta), jnp.array(7.0), batch)
    slope = lambda s: 2 * s + 3 * jnp.sin(2 * s)  # noqa: E731  φ'
    np.testing.assert_allclose(h.x - client.problem.fx(x, y, batch) / 7, slope(theta) - slope(y), atol=1e-11)
    assert jnp.linalg.norm(client.problem.gx(x, y, batch)) > 50


def test_it_finds_the_stationary_point_of_its_penalty_problem_whose_bias_falls_as_one_over_c():
    task, x_star = QUADRATIC.build(), QUADRATIC.coefficients().mean().upper()
    errors = []
    for c in (30.0, 300.0):
        wanted = stationary_point(c, 1.0)
        last = states(task, dataclasses.replace(FAST, penalty=c), 20_000, 20_000)[-1]
        for got, exactly in zip(last[:3], wanted, strict=True):
            np.testing.assert_allclose(got, exactly, rtol=1e-7, atol=1e-8)
        errors.append(np.linalg.norm(last.x - x_star))
    assert 8 < errors[0] / errors[1] < 10  # tends to 10 as c grows


def test_the_residual_is_zero_at_a_stationary_point_and_nowhere_near_it():
    population = QUADRATIC.build().population
    x, y, theta = map(jnp.asarray, stationary_point(50.0, 0.7))
    residual = jax.jit(lambda x, y: ground_truth.residual(population, x, y, 50.0, 0.7, tolerance=1e-12))
    np.testing.assert_allclose(jax.jit(lambda: ground_truth.proximal_point(population, x, y, 0.7, 1e-12))(), theta, atol=1e-11)
    assert residual(x, y) < 1e-22
    assert residual(x + 0.01, y) > 1e-7 and residual(x, y + 0.01) > 1e-7


@pytest.mark.parametrize("task", [QUADRATIC, Valley(clients=4)], ids=["quadratic", "valley"])
@pytest.mark.parametrize("within", [Everywhere(), Box(-9, 9)], ids=["newton", "projected-gradient"])
def test_the_residual_is_the_gradient_of_the_penalty_function(task, within):
    """Against finite differences of Υ_c at points inside the sets, whichever way the proximal problem is solved."""
    built, c, gamma = task.build(), 5.0, 0.1
    population = with_sets(built, Sets(y=within)).population
    p = len(built.x)

    @jax.jit
    def upsilon(z):
        x, y = z[:p], z[p:]
        theta = ground_truth.proximal_point(population, x, y, gamma, 1e-11)
        (f, g), (_, at_theta) = ground_truth.losses(population, x, y), ground_truth.losses(population, x, theta)
        return f / c + g - at_theta - jnp.sum((theta - y) ** 2) / (2 * gamma)

    residual = jax.jit(lambda x, y: ground_truth.residual(population, x, y, c, gamma, 1e-11))
    for seed in range(3):
        z = jax.random.normal(jax.random.key(seed), (p + len(built.y),))
        slopes = np.array([(upsilon(z + 1e-4 * e) - upsilon(z - 1e-4 * e)) / 2e-4 for e in np.eye(len(z))])
        np.testing.assert_allclose(residual(z[:p], z[p:]), slopes @ slopes, rtol=1e-5)


@pytest.mark.slow
def test_at_a_boundary_only_what_points_inside_counts():
    """In a corner of a box, on a sphere and inside a simplex, against the tangent cones written out."""
    free, c, gamma, y = QUADRATIC.build(), 5.0, 0.5, jnp.linspace(-1, 1, 8)

    def residual(x, x_set):
        population = with_sets(free, Sets(x_set)).population
        return jax.jit(lambda x: ground_truth.residual(population, x, y, c, gamma, 1e-12))(x)

    @jax.jit
    def descent(x):
        """-∇_x Υ_c"""
        theta = ground_truth.proximal_point(free.population, x, y, gamma, 1e-12)
        (fx, gx), (_, at_theta) = (jax.jacrev(lambda x, y=y: ground_truth.losses(free.population, x, y))(x) for y in (y, theta))
        return at_theta - gx - fx / c

    def check(x, x_set, inside):
        """The residual differs from the free one by what the tangent cone takes from x's part."""
        d = descent(x)
        taken = d @ d - jnp.sum(inside(d) ** 2)
        np.testing.assert_allclose(residual(x, Everywhere()) - residual(x, x_set), taken, rtol=1e-5, atol=1e-7)
        return float(taken)

    corner = jnp.array([0.5, -0.5, 0.1, 0.5, -0.5])
    outward = lambda d: jnp.sign(corner) * d > 0  # noqa: E731
    in_box = lambda d: jnp.where((jnp.abs(corner) == 0.5) & outward(d), 0, d)  # noqa: E731
    assert check(corner, Box(-0.5, 0.5), in_box) > 0.01
    unit = descent(jnp.zeros(5)) / jnp.linalg.norm(descent(jnp.zeros(5)))
    assert check(0.01 * unit, Ball(0.01), lambda d: d - (d @ unit) * unit) > 0.001  # there it points outwards
    check(-0.01 * unit, Ball(0.01), lambda d: d)  # and here inwards: nothing is taken
    assert check(jnp.full(5, 0.2), Simplex(), lambda d: d - d.mean()) > 0.01


@pytest.mark.parametrize(
    ("task", "algorithm", "fall"),
    [(QUADRATIC, FAST, 1e-15), (Valley(), ON_VALLEY, 1e-9), (Valley(noise=0.2), ON_VALLEY, 1e-3)],
    ids=["quadratic", "valley", "noisy-valley"],
)
def test_the_residual_falls_along_a_run(task, algorithm, fall):
    """R_t with the c_t of its step. Noise leaves a floor, where the minibatches' gradients cannot tell."""
    built = task.build()

    @jax.jit
    def residual(state):
        return ground_truth.residual(
            built.population, state.x, state.y, algorithm.penalty_at(state.t), algorithm.proximal, 1e-9
        )

    values = [float(residual(state)) for state in states(built, algorithm, 3000, 1000)]
    assert values[-1] < fall * values[0]
    above_rounding = [max(value, 1e-18) for value in values]
    assert task.noise or above_rounding == sorted(above_rounding, reverse=True)


def test_without_convexity_it_reaches_the_known_solution():
    task = Valley().build()
    hessian = jax.hessian(lambda y: ground_truth.losses(task.population, task.x, y)[1])(task.y)
    assert np.linalg.eigvalsh(hessian).max() < 0  # the start is where g is concave in y
    first, *_, last = simulation(task, ON_VALLEY, rounds=3000, every=3000).run()
    assert last.metrics["x_error"] < 0.005 * first.metrics["x_error"]  # the bias of c_t = 22 and γ = 0.1
    assert last.metrics["y_error"] < 0.005 * first.metrics["y_error"]


@pytest.mark.parametrize("name", [n for n in SHARED_X if ALGORITHMS[n].load().lower_level == "global"])
def test_who_needs_strong_convexity_says_so_where_there_is_none(name):
    algorithm = ALGORITHMS[name].load()()
    caveats = simulation(Valley().build(), algorithm, steps=1).caveats()
    assert len(caveats) == (name not in ("mefbo", "fedavg", "fedpace"))
    assert all(type(algorithm).__name__ in c and "strongly convex in y" in c for c in caveats)
    assert simulation(Quadratic().build(), algorithm, steps=1).caveats() == []


def test_decreasing_steps_follow_theorem_c1():
    algorithm = fb.MeFBO(schedule="decreasing", decay=0.75, penalty=3.0, growth=0.1)
    fixed = fb.MeFBO(penalty=3.0, growth=0.1)
    for t in (0, 15, 80):
        for name in ("x", "y", "theta"):
            sizes = algorithm.step_sizes(t + 1)  # the first step is at t = 0
            assert np.isclose(sizes[f"lambda_{name}"], getattr(algorithm, f"lambda_{name}") * (t + 1) ** -0.75)
            assert np.isclose(sizes[f"eta_{name}"], getattr(algorithm, f"eta_{name}") * (t + 1) ** -0.25)
            assert np.isclose(fixed.step_sizes(t)[f"lambda_{name}"], getattr(fixed, f"lambda_{name}"))
            assert np.isclose(fixed.step_sizes(t)[f"eta_{name}"], getattr(fixed, f"eta_{name}"))
        assert np.isclose(algorithm.step_sizes(t + 1)["c_t"], 3 * (t + 1) ** 0.1)
    # and the steps made are these: at t = 15 the server moves 1/8 of what it moves with fixed steps
    task = QUADRATIC.build()
    state = State(task.x + 1, task.y + 1, task.y, jnp.int32(15))
    moves = [
        SimulatedEngine(task.population, Everyone()).step(a, state, jax.random.key(0))[0].y - 1 for a in (algorithm, fixed)
    ]
    np.testing.assert_allclose(moves[0], moves[1] / 8, rtol=1e-9)


# --- constraints ---

CENTERS = [np.array([[2.5, -2.0, 0.4]]), np.array([[0.5, 0.0, 0.2]])]  # on average (1.5, -1, 0.3)
TILTS = [np.array([[1.0, -0.5, 2.0]]), np.array([[-1.0, 0.5, -2.0]])]
FREE = np.array([1.5, -1.0, 0.3]) / (1 + RIDGE)  # the solution without constraints


def upper(x, y, center):
    return 0.5 * jnp.mean(jnp.sum((y - center) ** 2, -1)) + 0.5 * RIDGE * jnp.sum(x**2)


def lower(x, y, tilt):
    return 0.5 * jnp.mean(jnp.sum((y - x - tilt) ** 2, -1))


def with_sets(task, sets):
    problem = dataclasses.replace(task.population.problem, sets=sets)
    return dataclasses.replace(task, population=dataclasses.replace(task.population, problem=problem))


@pytest.mark.parametrize(
    ("sets", "start"),
    [
        (Sets(Ball(0.8), Ball(0.8)), 5.0),
        (Sets(y=Box(-0.5, 0.5)), 0.0),
        *(
            pytest.param(Sets(within, within), 5.0, marks=pytest.mark.slow)
            for within in (Box(-0.5, 0.5), Simplex(), Simplex(0.3))
        ),
    ],
    ids=str,
)
def test_a_constrained_solution_is_reached(sets, start):
    """On Y y*(x) = x, and h(x) = ½|x - c|² + ½ρ|x|²: the solution is the projection of the free one, c/(1 + ρ), on Y.

    Where a box confines y alone, y* stays at its side for x beyond, and h rises there with |x|: the same solution.
    There y stays at its side, and the penalty draws x off y by (1 + γ)/γ · ρ|x|/c_t, here at most 0.001.
    """
    algorithm = fb.MeFBO(lambda_x=0.5, lambda_y=0.5, lambda_theta=0.4, penalty=200.0, growth=0.0, proximal=1.0)
    x, y, _ = fb.solve(
        *(upper, lower, jnp.full(3, start), jnp.full(3, -start)),
        lower=TILTS,
        upper=CENTERS,
        algorithm=algorithm,
        steps=6000,
        every=6000,
        x_set=sets.x,
        y_set=sets.y,
    )
    wanted = sets.y.project(jnp.asarray(FREE))
    assert np.linalg.norm(wanted - FREE) > 0.3  # the constraint matters
    assert np.linalg.norm(x - wanted) < 0.0012 and np.linalg.norm(y - wanted) < 0.0012
    population = Population.build(Problem(upper, lower, sets), CENTERS, TILTS)
    residual = jax.jit(lambda x, y: ground_truth.residual(population, x, y, 200.0, 1.0, 1e-10))
    elsewhere = sets.y.project(jnp.zeros(3))
    assert residual(x, y) < 1e-10 < residual(elsewhere, elsewhere)


@pytest.mark.parametrize(
    ("x_set", "y_set"), [(Box(-0.1, 0.1), Ball(0.3)), (Ball(0.2), Simplex(2.0)), (Simplex(0.5), Box(-0.2, 0.1))], ids=str
)
def test_every_iterate_is_feasible(x_set, y_set):
    sets = Sets(x_set, y_set)
    task = with_sets(dataclasses.replace(QUADRATIC, noise=1.0).build(), sets)
    task = dataclasses.replace(task, x=task.x + 3, y=task.y - 3)
    algorithm = fb.MeFBO(lambda_x=2.0, local_steps=3)
    found = states(task, algorithm, 40, participation=Uniform(3))
    for state in found:
        for value, within in ((state.x, x_set), (state.y, y_set), (state.theta, y_set)):
            assert feasible(within, value)
    assert jnp.linalg.norm(found[-1].x - found[0].x) > 1e-3  # they do move
    free, *_ = states(with_sets(task, UNCONSTRAINED), algorithm, 1, participation=Uniform(3))[1:]
    assert not feasible(x_set, free.x) and not feasible(y_set, free.y)


def feasible(within, v, slack=1e-12):
    """By the set's definition, not by its projection."""
    match within:
        case Box(low=low, high=high):
            return bool(jnp.all((v >= low - slack) & (v <= high + slack)))
        case Ball(radius=radius):
            return bool(jnp.linalg.norm(v) <= radius + slack)
        case Simplex(scale=scale):
            return bool(jnp.all(v >= -slack) & (jnp.abs(v.sum() - scale) <= slack))


def test_both_engines_project():
    sets = Sets(Ball(0.2), Simplex())
    task, algorithm = with_sets(QUADRATIC.build(), sets), fb.MeFBO(local_steps=2)
    federation, _ = deployed(algorithm, task.population, Everyone())
    remote, *_ = federation.init(algorithm, task.x, task.y, jax.random.key(0))
    for k, state in enumerate(states(task, algorithm, 3)):
        for a, b in zip(remote, state, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
        assert feasible(sets.x, remote.x) and feasible(sets.y, remote.y)
        remote, *_ = federation.step(algorithm, remote, jax.random.fold_in(jax.random.key(0), k))


@pytest.mark.parametrize("sets", [Sets(x=Box(0, 1)), Sets(y=Ball(1.0))], ids=str)
def test_an_algorithm_that_does_not_project_is_refused_constraints(sets):
    task = with_sets(QUADRATIC.build(), sets)
    with pytest.raises(InputError, match=r"SimFBO does not keep x and y in given sets: choose an algorithm that projects"):
        simulation(task, fb.SimFBO(), steps=1)
    simulation(task, fb.MeFBO(), steps=1)
    if sets.y != Everywhere():
        with pytest.raises(InputError, match=r"unconstrained y: use ground_truth\.residual"):
            ground_truth.solution(task.population, task.x, task.y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box(1, 0), "Box: low must be a number no greater than high; given: low = 1.0, high = 0.0"),
        (lambda: Box(float("nan"), 0), "Box: low must be a number no greater than high"),
        (lambda: Box(np.zeros(3), 1), "Box: low must be a number; given: array"),
        (lambda: Ball(0), "Ball: radius must be a number above 0; given: 0"),
        (lambda: Ball("wide"), "Ball: radius must be a number above 0; given: 'wide'"),
        (lambda: Simplex(float("inf")), "Simplex: scale must be a number above 0; given: inf"),
        (lambda: fb.MeFBO(schedule="falling"), "schedule must be one of fixed, decreasing; given: falling"),
        (lambda: fb.MeFBO(decay=0.4), "decay must be a number above 0.5 and at most 1; given: 0.4"),
    ],
)
def test_bad_input_is_refused_by_name(make, message):
    with pytest.raises(InputError, match=message):
        make()
