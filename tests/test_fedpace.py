"""FedPace without tuning: closed forms, invariance to units, and what it sees of a lower level. See also test_pseudocode.py."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from federations import trajectory, weighted
from sklearn.datasets import load_breast_cancer

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.algorithms.fedpace import SHORTEST
from fedbilevel.core.curvature import PRODUCTS, SKETCHED, derivative_along, extreme_curvatures, probe, ratio, sketch, unit
from fedbilevel.core.participation import Bernoulli, Dropouts, Everyone, Uniform
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Problem
from fedbilevel.core.sets import Ball, Box, Sets
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.quadratic import RIDGE, Quadratic
from fedbilevel.tasks.valley import Valley

ALGORITHM = fb.FedPace()


def first_state(population, x, y):
    return jax.jit(SimulatedEngine(population, Everyone()).init)(ALGORITHM, x, y, jax.random.key(0)).state


states = partial(trajectory, ALGORITHM)


def assert_finite(tree):
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


# --- closed forms ---

EASY = [(Quadratic(), 800), (Quadratic(data_seed=1), 800), (Valley(), 1000)]
HARD = [
    (Quadratic(data_seed=2), 1000),
    (Quadratic(condition=1000.0), 2500),
    (Quadratic(hessian_heterogeneity=1.0, linear_heterogeneity=3.0), 2500),
    (Valley(data_seed=1, heterogeneity=3.0), 1500),
]


@pytest.mark.parametrize(("task", "rounds"), [*EASY, *(pytest.param(*case, marks=pytest.mark.slow) for case in HARD)], ids=str)
def test_closed_forms_are_reached_without_tuning(task, rounds):
    first, *rest = [moment.metrics for moment in simulation(task.build(), ALGORITHM, rounds=rounds, every=50).run()]
    errors = [row["x_error"] / first["x_error"] for row in rest if row]
    print([k * 50 + 50 for k, e in enumerate(errors) if e < 1e-4][:1], errors[-1], len(errors))
    assert errors[-1] < 1e-4


# --- running on ---


def log_loss(x, y, rows):
    return jnp.mean(jax.nn.softplus((1 - 2 * rows["label"]) * (rows["features"] @ y)))


@pytest.mark.slow
def test_f_falls_for_as_long_as_the_run_goes_on_where_x_grows_without_bound():
    """The README's problem. Its lower level is followed at first; later it hardly bends where exp(x) is next to nothing."""
    features, labels = load_breast_cancer(return_X_y=True)
    features = (features - features.mean(0)) / features.std(0)
    hospitals = np.split(np.arange(len(labels)), [60, 180, 260, 420])
    upper, lower = ([{"features": features[h][k::2], "label": labels[h][k::2]} for h in hospitals] for k in (1, 0))
    problem = Problem(log_loss, lambda x, y, rows: log_loss(x, y, rows) + jnp.sum(jnp.exp(x) * y**2))
    population = Population.build(problem, upper, lower)
    found = states(SimulatedEngine(population, Everyone()), jnp.zeros(30), jnp.zeros(30), 1000)

    def mean_f(y):
        return sum(problem.f(None, y, rows) for rows in upper) / len(hospitals)

    def mean_g(y, x):
        return sum(problem.g(x, y, rows) for rows in lower) / len(hospitals)

    def solved(x, y):
        """y*(x), by Newton's method from y with steps that go down."""
        for _ in range(60):
            along, a = np.linalg.solve(jax.hessian(mean_g)(y, x), jax.grad(mean_g)(y, x)), 1.0
            while mean_g(y - a * along, x) > mean_g(y, x) and a > 1e-9:
                a /= 2
            y = y - a * along
        return y

    early, late = (mean_f(found.y[t]) for t in (300, 999))
    followed = mean_f(solved(found.x[300], found.y[300]))
    print(early, late, followed)
    assert late < 0.9 * early < 0.08
    assert abs(early - followed) < 0.05 * followed


# --- where f does not depend on x ---


@pytest.mark.parametrize("participation", [Everyone(), Uniform(4)], ids=str)
def test_x_does_not_outrun_y_where_its_first_direction_is_zero(participation):
    """A start for linear models that twelve clients fit to six rows each: f knows x through y alone, and u is 0 at first."""
    rng = np.random.default_rng(3)
    truth = rng.normal(0, 1, 8) + 0.3 * rng.normal(0, 1, (12, 8))

    def rows(slope, number):
        features = rng.normal(0, 1, (number, 8))
        return {"features": features, "label": features @ slope + 0.1 * rng.normal(0, 1, number)}

    lower, upper = [rows(slope, 6) for slope in truth], [rows(slope, 12) for slope in truth]

    def fit(x, y, rows):
        return jnp.mean((rows["features"] @ y - rows["label"]) ** 2)

    problem = Problem(fit, lambda x, y, rows: fit(x, y, rows) + 0.5 * jnp.sum((y - x) ** 2))
    population = Population.build(problem, upper, lower)
    found = states(SimulatedEngine(population, participation), jnp.zeros(8), jnp.zeros(8), 400)

    bends = np.eye(8) + np.mean([2 * r["features"].T @ r["features"] / 6 for r in lower], 0)
    pull = np.mean([2 * r["features"].T @ r["label"] / 6 for r in lower], 0)
    responses = np.linalg.solve(bends, np.eye(8)), np.linalg.solve(bends, pull)  # y*(x) = A x + b
    pooled, labels = (np.concatenate([r[name] for r in upper]) for name in ("features", "label"))
    least = np.mean(
        (
            pooled @ responses[0] @ np.linalg.lstsq(pooled @ responses[0], labels - pooled @ responses[1])[0]
            - labels
            + pooled @ responses[1]
        )
        ** 2
    )
    h = [np.mean((pooled @ (responses[0] @ x + responses[1]) - labels) ** 2) for x in found.x]
    print(max(h) / h[0], h[-1] / least, h[0] / least)
    assert max(h) <= 1.01 * h[0]
    assert h[-1] - least < 0.01 * (h[0] - least)


# --- hyperparameters of networks ---


@pytest.mark.slow
def test_weight_decays_of_a_network_are_good_for_a_y_that_has_not_seen_f():
    """A quarter of g's labels are wrong. With δ near δ₀ y fits f's rows as well, and x lowers decays that a new y needs."""
    features, labels = load_breast_cancer(return_X_y=True)
    features, draw = (features - features.mean(0)) / features.std(0), np.random.default_rng(41)
    shares = np.array_split(draw.permutation(len(labels)), 6)
    upper = [{"features": features[s][20:], "label": labels[s][20:]} for s in shares]
    lower = [{"features": features[s][:20], "label": labels[s][:20] ^ (draw.random(20) < 0.25)} for s in shares]
    y = jnp.asarray(np.concatenate([draw.normal(0, 0.2, 300), np.zeros(10), draw.normal(0, 0.3, 10)]))

    def f(x, y, rows):
        scores = jax.nn.softplus(rows["features"] @ y[:300].reshape(30, 10) + y[300:310]) @ y[310:]
        return jnp.mean(jax.nn.softplus((1 - 2 * rows["label"]) * scores))

    def g(x, y, rows):
        return f(x, y, rows) + jnp.exp(x[0]) * jnp.sum(y[:300] ** 2) + jnp.exp(x[1]) * jnp.sum(y[310:] ** 2)

    population = Population.build(Problem(f, g), upper, lower, batch_size=10)
    start = jnp.full(2, -7.0)
    found = states(SimulatedEngine(population, Everyone()), start, y, 500)

    def h(x):
        """f at a y that Adam trains on g from where y starts."""
        adam = optax.adam(1e-2)

        def step(_, carry):
            y, state = carry
            change, state = adam.update(sum(jax.grad(g, 1)(x, y, rows) for rows in lower), state)
            return optax.apply_updates(y, change), state

        trained, _ = jax.lax.fori_loop(0, 3000, step, (y, adam.init(y)))
        return sum(f(x, trained, rows) for rows in upper) / len(upper)

    before, after = jax.jit(partial(jax.lax.map, h))(jnp.stack([start, found.x[-1]]))
    assert found.few.all() and after < 0.7 * before


# --- units ---


UNITS = np.array([[1, 1, 1, 1], [1000, 1, 1, 1], [1, 1000, 1, 1], [1, 1, 0.01, 1], [1, 1, 1, 0.01]])  # of f, g, x and y
NOISY = {"quadratic": Quadratic(noise=0.3), "valley": Valley(noise=0.3)}


@pytest.mark.parametrize(
    ("task", "participation"),
    [
        ("quadratic", Uniform(4)),
        ("valley", Everyone()),
        pytest.param("quadratic", Everyone(), marks=pytest.mark.slow),
        pytest.param("valley", Uniform(4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_units_do_not_matter(task, participation):
    """Rounding is some units of the last place; without convexity, 60 rounds make it larger."""
    built = NOISY[task].build()
    loss = built.population.problem

    def run(units):
        f, g, x, y = units
        problem = Problem(lambda a, b, rows: f * loss.f(x * a, y * b, rows), lambda a, b, rows: g * loss.g(x * a, y * b, rows))
        population = dataclasses.replace(built.population, problem=problem)
        found = states(SimulatedEngine(population, participation), built.x / x, built.y / y, 60)
        return found.x * x, found.y * y, found.pace.p

    for (ours, *theirs), tolerance in zip(jax.lax.map(run, UNITS), (1e-8, 1e-8, 1e-12), strict=True):
        for other in theirs:
            print(np.abs(other - ours).max() / np.abs(ours).max())
            assert np.abs(other - ours).max() < tolerance * np.abs(ours).max()
        assert np.ptp(ours, 0).max() > 0.01  # it does move


# --- what is seen of the lower level ---


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [1, 7, PRODUCTS, 80])
@pytest.mark.parametrize("definite", [True, False])
def test_extreme_curvatures_are_eigenvalues(size, seed, definite):
    """Exact up to as many dimensions as products; beyond, within what separates the ends from the rest of a spectrum."""
    half = np.random.default_rng(seed).standard_normal((size, size))
    matrix = half @ half.T if definite else half + half.T
    values = np.linalg.eigvalsh(matrix)
    largest, least = jax.jit(lambda: extreme_curvatures(lambda v: matrix @ v, jnp.zeros(size)))()
    scale = np.abs(values).max()
    print(size, abs(largest / scale - 1), (least - values.min()) / scale)
    tolerance = 1e-9 if size <= PRODUCTS else 0.02
    assert abs(largest - scale) < tolerance * scale
    assert -1e-9 * scale < least - values.min() < tolerance * scale


def test_runs_side_by_side_do_not_wait_for_each_other():
    """A call of LAPACK for a batch waits in one of XLA's threads for another: two programs on two cores stopped for ever."""
    matrices = jnp.stack([jnp.eye(5), 2 * jnp.eye(5)])
    looked = jax.jit(jax.vmap(lambda matrix: extreme_curvatures(lambda v: matrix @ v, jnp.zeros(5))))
    assert "lapack" not in looked.lower(matrices).as_text()
    assert "lapack" in jax.jit(jnp.linalg.eigvalsh).lower(matrices).as_text()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rank", "ridge"), [(0, 1.0), (1, 1.0), (10, 0.5), (10, 0.0), (0, 0.0)])
def test_extreme_curvatures_of_a_matrix_of_few_eigenvalues(rank, ridge, dtype):
    """Products then span fewer dimensions than there are, and what is left is rounding."""
    half = np.random.default_rng(0).standard_normal((80, rank)) / 9
    matrix = (half @ half.T + ridge * np.eye(80)).astype(dtype)
    largest, least = jax.jit(lambda: extreme_curvatures(lambda v: matrix @ v, jnp.zeros(80, dtype)))()
    values = np.linalg.eigvalsh(matrix.astype(float))
    np.testing.assert_allclose([largest, least], [values.max(), values.min()], rtol=1e-4, atol=1e-5)


def curve(x):
    return {"sine": jnp.sin(x[:2] * x[1:]), "sum": jnp.sum(x**3)}


def test_a_derivative_along_a_direction_is_that_of_forward_mode():
    x, v = jax.random.normal(jax.random.key(0), (2, 3))
    value, found = derivative_along(curve, x, v)
    expected = jax.jvp(curve, (x,), (v,))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), (value, found), expected)


@pytest.mark.parametrize("size", [1, SKETCHED, SKETCHED + 1, 5000])
def test_sketches_are_linear_and_as_long_as_the_vector(size):
    """Exactly so up to their own size, and beyond on average over directions; vectors that are all alike are no exception."""
    a, b = jax.random.normal(jax.random.key(1), (2, 200, size))
    np.testing.assert_allclose(jax.vmap(sketch)(a + 2 * b), jax.vmap(sketch)(a) + 2 * jax.vmap(sketch)(b), atol=1e-9 * size)
    lengths = jnp.linalg.norm(jax.vmap(sketch)(a), axis=1) / jnp.linalg.norm(a, axis=1)
    alike = jnp.linalg.norm(sketch(jnp.ones(size))) / np.sqrt(size)
    if size <= SKETCHED:
        np.testing.assert_allclose([*lengths, alike], 1, rtol=1e-12)
    else:
        print(jnp.mean(lengths**2), jnp.std(lengths), alike)
        assert abs(jnp.mean(lengths**2) - 1) < 0.1 and jnp.std(lengths) < 0.2
        assert 0.5 < alike < 2


def test_ratios_and_directions_at_zero_are_zero():
    zero = jnp.zeros(3)
    np.testing.assert_array_equal(ratio(jnp.array([1.0, 0.0, 6.0]), jnp.array([0.0, 0.0, 2.0])), [0, 0, 3])
    np.testing.assert_array_equal(unit(zero), zero)
    assert jnp.linalg.norm(unit(jnp.array([3.0, 4.0, 1e-3]))) == pytest.approx(1)
    assert jnp.linalg.norm(probe(zero)) == pytest.approx(1)
    assert_finite(jax.jvp(unit, (jnp.ones(3),), (jnp.ones(3),)))


ROWS = [(rng.standard_normal((20, 4)), rng.integers(0, 3, 20)) for rng in map(np.random.default_rng, range(3))]


def cross_entropy(scores, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1))


def softmax_regression(y, inputs):
    return inputs @ y[:12].reshape(4, 3)


def network(y, inputs):
    return jnp.tanh(inputs @ y[:12].reshape(4, 3)) @ y[12:].reshape(3, 3)


@pytest.mark.parametrize(("model", "size", "convex"), [(softmax_regression, 12, True), (network, 21, False)])
def test_convexity_is_recognised(model, size, convex):
    def f(x, y, rows):
        return cross_entropy(model(y, rows[0]), rows[1])

    def g(x, y, rows):
        return f(x, y, rows) + 0.5 * jnp.exp(x[0]) * jnp.sum(y**2)

    population = Population.build(Problem(f, g), ROWS, ROWS)
    x, y = jnp.full(1, -4.0), jax.random.normal(jax.random.key(0), (size,))
    state = first_state(population, x, y)
    assert state.convex == convex and (state.delta == 0) == convex and state.delta_0 > 0
    assert state.few == (not convex)  # 60 rows of f for one entry
    assert not first_state(population, jnp.full(4, -4.0), y).few
    confined = dataclasses.replace(population, problem=Problem(f, g, Sets(y=Ball(100.0))))
    state = first_state(confined, x, y)
    assert not state.convex and state.few and state.delta == state.delta_0 > 0


@pytest.mark.parametrize(("counts", "few"), [((3000, 3000), True), ((45, 3), True), ((20, 18), False)])
def test_rows_are_counted_whatever_their_number_and_weights_where_sums_have_a_bound(counts, few):
    """x has two entries: few if all clients together have forty rows of f."""
    rows, x = [{"a": np.sin(np.arange(n))} for n in counts], jnp.zeros(2)

    def f(x, y, r):
        return jnp.mean((y[0] * r["a"] - 1) ** 2)

    def g(x, y, r):
        return jnp.mean(jnp.cos(y[0] * r["a"] - x.sum()))

    population = weighted(Population.build(Problem(f, g), rows, rows), np.array([0.7, 1.3]))
    engine = SimulatedEngine(population, Everyone(), aggregation=configured("secure-sum(at_least=2)"))
    state = jax.jit(engine.init)(ALGORITHM, x, jnp.ones(1), jax.random.key(0)).state.state
    assert np.isfinite(state.delta_0) and not state.convex and state.few == few


# --- constraints ---

CENTERS = [np.array([[2.5, -2.0, 0.4]]), np.array([[0.5, 0.0, 0.2]])]  # on average (1.5, -1, 0.3)
TILTS = [np.array([[1.0, -0.5, 2.0]]), np.array([[-1.0, 0.5, -2.0]])]


def upper(x, y, center):
    return 0.5 * jnp.mean(jnp.sum((y - center) ** 2, -1)) + 0.5 * RIDGE * jnp.sum(x**2)


def lower(x, y, tilt):
    return 0.5 * jnp.mean(jnp.sum((y - x - tilt) ** 2, -1))


@pytest.mark.parametrize("within", [Box(-0.5, 0.5), Ball(0.8)], ids=str)
def test_a_constrained_solution_is_reached_from_within(within):
    """On Y y*(x) = x, so the solution is the projection of the free one."""
    population = Population.build(Problem(upper, lower, Sets(within, within)), CENTERS, TILTS)
    found = states(SimulatedEngine(population, Everyone()), jnp.full(3, 5.0), jnp.full(3, -5.0), 800)
    for point in (found.x, found.y, found.z.x, found.z.y, found.z.y + found.delta[:, None] * found.z.u):
        np.testing.assert_allclose(point, jax.vmap(within.project)(point), atol=1e-12)
    assert np.all(found.delta > SHORTEST * found.delta_0)
    free = jnp.array([1.5, -1.0, 0.3]) / (1 + RIDGE)
    for got in (found.x[-1], found.y[-1]):
        print(np.linalg.norm(got - within.project(free)), float(found.delta[-1] / found.delta_0[-1]))
        assert np.linalg.norm(got - within.project(free)) < 0.01


# --- corners ---


@pytest.mark.parametrize(
    ("task", "participation"),
    [
        pytest.param(Quadratic(clients=3, noise=0.2), Bernoulli(0.1), marks=pytest.mark.slow, id="quadratic"),
        pytest.param(Valley(clients=3, noise=0.2), Dropouts(Uniform(1), 0.7), id="valley"),
    ],
)
def test_rounds_without_clients_do_no_harm(task, participation):
    built = task.build()
    found = states(SimulatedEngine(built.population, participation), built.x, built.y, 600)
    assert_finite(found)
    first, last = (built.metrics(x, y)["x_error"] for x, y in ((built.x, built.y), (found.x[-1], found.y[-1])))
    assert last < 0.6 * first


def loss_without_x(x, y, center):
    return 0.5 * jnp.mean(jnp.sum((y - center) ** 2, -1))


def lower_without_x_at_zero(x, y, tilt):
    return 0.5 * jnp.mean(jnp.sum((y - tilt) ** 2, -1)) + 0.5 * jnp.sum((x * y) ** 2)


@pytest.mark.parametrize(("f", "g"), [(loss_without_x, lower), (upper, lower_without_x_at_zero), (upper, loss_without_x)])
def test_vanishing_gradients_give_finite_numbers(f, g):
    """Without tilts y = 0 is stationary for every client's g, with them for none's, and for their average."""
    for tilts, y in itertools.product((1, 0), (1.0, 0.0)):
        population = Population.build(Problem(f, g), CENTERS, [tilts * tilt for tilt in TILTS])
        assert_finite(states(SimulatedEngine(population, Everyone()), jnp.zeros(3), jnp.full(3, y), 150))


@jax.custom_vjp
def softened(y):
    return jnp.log(jnp.cosh(y))


softened.defvjp(lambda y: (softened(y), y), lambda y, w: (w * jnp.tanh(y),))


def test_losses_may_have_custom_derivatives():
    """Forward mode is refused for them."""

    def population(soft):
        return Population.build(Problem(upper, lambda x, y, tilt: lower(x, y, tilt) + jnp.sum(soft(x * y))), CENTERS, TILTS)

    own, plain = (
        states(SimulatedEngine(population(soft), Everyone()), jnp.ones(3), jnp.ones(3), 30)
        for soft in (softened, lambda y: jnp.log(jnp.cosh(y)))
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), own, plain)
