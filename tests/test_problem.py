"""Derivatives, batches and exact solutions against finite differences and closed forms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core import devices, ground_truth
from fedbilevel.core.client_lists import shares_of
from fedbilevel.core.mean_check import check_means
from fedbilevel.core.population import Population, Shards
from fedbilevel.core.problem import Batch, Point, Problem, from_trees, mean_loss
from fedbilevel.errors import InputError
from fedbilevel.tasks.base import Task
from fedbilevel.tasks.quadratic import Quadratic


def f(x, y, rows):
    return jnp.mean(jnp.sin(rows @ y) + jnp.sum(x**2) * jnp.cos(rows[:, 0]))


def g(x, y, rows):
    return jnp.mean(jnp.log(jnp.cosh(rows @ y - x[0]))) + jnp.exp(x[1]) * jnp.sum(y**4) / 4


PROBLEM = Problem(f, g)
X, Y, V = np.array([0.3, -0.2]), np.array([0.5, -0.7, 0.2]), np.array([1.0, 0.4, -0.6])
ROWS = np.random.default_rng(0).standard_normal((7, 3))
BATCH = Batch(ROWS[:4], ROWS[4:])


def finite_differences(h, at, step=1e-5):
    compiled = jax.jit(h)
    return np.stack([(compiled(at + step * e) - compiled(at - step * e)) / (2 * step) for e in np.eye(len(at))])


def test_six_derivatives_against_finite_differences():
    p = PROBLEM
    names = ("fx", "fy", "gx", "gy", "gyy", "gxy")
    found = jax.jit(lambda v: [getattr(p, name)(X, Y, BATCH, *[v][: len(name) - 2]) for name in names])(V)
    wanted = (
        finite_differences(lambda x: f(x, Y, BATCH.upper), X),
        finite_differences(lambda y: f(X, y, BATCH.upper), Y),
        finite_differences(lambda x: g(x, Y, BATCH.lower), X),
        finite_differences(lambda y: g(X, y, BATCH.lower), Y),
        finite_differences(lambda y: p.gy(X, y, BATCH), Y).T @ V,
        finite_differences(lambda x: p.gy(x, Y, BATCH), X) @ V,
    )
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-8)


def test_direction_uses_each_of_the_five_batches_for_its_own_derivative():
    population = Population.build(PROBLEM, [ROWS], [ROWS], batch_size=2)
    five = population.client(0, jax.random.key(3)).five_batches()
    p, z = PROBLEM, Point(X, Y, V)

    def by_hand(x, y, u):
        return p.fx(x, y, five.f1) - p.gxy(x, y, five.g1, u), p.gy(x, y, five.y), p.gyy(x, y, five.g2, u) - p.fy(x, y, five.f2)

    for ours, theirs in zip(jax.jit(p.direction)(z, five), jax.jit(by_hand)(*z), strict=True):
        np.testing.assert_allclose(ours, theirs)
    lowers = [np.asarray(b.lower).tobytes() for b in five]
    assert len(set(lowers)) == 5
    shared = population.client(0, jax.random.key(3)).five_batches(shared=True)
    assert all(b is shared[0] for b in shared)


def test_one_linearisation_serves_both_second_order_products():
    """On a shared batch the compiled direction does the floating-point work of one vjp, not of two."""
    widths = 64, 96

    def loss(x, y, rows):
        return jnp.mean((jnp.tanh(rows @ x.reshape(widths)) @ y) ** 2)

    problem, rows = Problem(loss, loss), jnp.ones((512, 64))
    x, y, batch = jnp.ones(64 * 96), jnp.ones(96), Batch(rows, rows)

    def flops(function):
        return jax.jit(function).lower(x, y, y).compile().cost_analysis()["flops"]

    both = flops(lambda x, y, u: (problem.gxy(x, y, batch, u), problem.gyy(x, y, batch, u)))
    assert both < 1.1 * flops(lambda x, y, u: problem.gxy(x, y, batch, u))


def test_rows_are_drawn_uniformly_from_the_clients_own():
    sizes = [3, 5, 1]
    shards = [np.full((n, 1), 10.0 * m) + np.arange(n)[:, None] for m, n in enumerate(sizes)]
    population = Population.build(PROBLEM, shards, shards, batch_size=4000)
    for m, n in enumerate(sizes):
        batch = population.client(m, jax.random.key(m)).batch()
        for rows in batch:
            values, counts = np.unique(np.asarray(rows), return_counts=True)
            np.testing.assert_array_equal(values, 10 * m + np.arange(n))
            assert np.all(np.abs(counts - 4000 / n) < 5 * np.sqrt(4000 / n))
        assert not np.array_equal(batch.upper, batch.lower) or n == 1


def test_all_rows_of_unequal_clients_count_each_once():
    shards = [ROWS[:4], ROWS[4:6], ROWS[6:]]
    population = Population.build(PROBLEM, shards, shards)
    loss, slope = jax.jit(partial(mean_loss, f)), jax.jit(PROBLEM.gy)
    for m, rows in enumerate(shards):
        whole = jax.jit(population.whole)(m)
        np.testing.assert_allclose(loss(X, Y, whole.upper), f(X, Y, rows), rtol=1e-12)
        np.testing.assert_allclose(slope(X, Y, whole), jax.grad(g, 1)(X, Y, rows), rtol=1e-12)


@pytest.mark.parametrize("lower", ["global", "local"])
def test_exact_solution_is_the_closed_form(lower):
    task = Quadratic(lower_level=lower, clients=4)
    population, k = task.build().population, task.coefficients()
    target, x = (k.mean() if lower == "global" else k), np.linspace(-1, 1, 5)
    start = np.zeros(8 if lower == "global" else (4, 8))
    y, _, gradient = jax.jit(lambda x, y: ground_truth.solution(population, x, y, lower, 1e-12))(x, start)
    y_star = target.lower(x)
    np.testing.assert_allclose(y, y_star[0] if lower == "global" else y_star, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient, target.hypergradient(x, y_star), rtol=1e-9)
    np.testing.assert_allclose(target.hypergradient(target.upper(), target.lower(target.upper())), 0, atol=1e-12)


def test_exact_hypergradient_against_finite_differences_of_a_nonlinear_problem():
    population = Population.build(PROBLEM, [ROWS[:4], ROWS[4:]], [ROWS[:3], ROWS[3:]], weights=[1, 3])

    @jax.jit
    def h_and_its_gradient(x):
        y, _, gradient = ground_truth.solution(population, x, Y, tolerance=1e-13)
        return ground_truth.losses(population, x, y)[0], gradient

    differences = finite_differences(lambda x: h_and_its_gradient(x)[0], X, 1e-4)
    np.testing.assert_allclose(h_and_its_gradient(X)[1], differences, rtol=1e-6)


def test_large_systems_are_solved_by_conjugate_gradients(monkeypatch):
    task = Quadratic(clients=3).build()
    direct = jax.jit(lambda x: ground_truth.solution(task.population, x, task.y, tolerance=1e-12))(task.x + 1)
    monkeypatch.setattr(ground_truth, "DIRECT", 1)
    iterative = jax.jit(lambda x: ground_truth.solution(task.population, x, task.y, tolerance=1e-12))(task.x + 1)
    np.testing.assert_allclose(direct.hypergradient, iterative.hypergradient, rtol=1e-7)


def test_trees_come_back_as_they_were():
    tree = {"a": jnp.ones((2, 3)), "b": [jnp.zeros(4)]}
    problem, x, y, x_tree, _ = from_trees(lambda x, y, rows: x["a"].sum() + y, lambda x, y, rows: y**2, tree, jnp.array(1.0))
    assert x.shape == (10,) and jax.tree.structure(x_tree(x)) == jax.tree.structure(tree)
    assert problem.f(x, y, None).shape == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shards.stack([]), "no client"),
        (lambda: Shards.stack([np.ones((2, 1)), np.ones((0, 1))]), "client 1 has no rows"),
        (lambda: Shards.stack([np.ones((2, 1)), (np.ones((2, 1)),)]), "client 1 has other arrays"),
        (lambda: Shards.stack([(np.ones(2), np.ones(3))]), "one common first axis"),
        (lambda: Population.build(PROBLEM, [ROWS], [ROWS, ROWS]), "upper has 1 clients and lower 2"),
        (lambda: Population.build(PROBLEM, [ROWS], [ROWS], weights=[-1.0]), "weights must be 1 numbers"),
        (lambda: Population.build(PROBLEM, [ROWS], [ROWS], batch_size=0), "batch_size must be a whole number of at least 1"),
        (lambda: from_trees(f, g, [], Y), "x0 has no arrays"),
        (lambda: from_trees(f, g, X, np.arange(3)), "y0 holds int64 numbers"),
        (lambda: from_trees(f, g, np.array([np.nan]), Y), "x0 holds a value that is not finite"),
        (lambda: Problem(lambda x, y, rows: rows @ y, g).check(X, Y, BATCH), r"f\(x, y, batch\) must return one real number"),
        (lambda: Problem(f, lambda x, y, rows: (y.sum(), y)).check(X, Y, BATCH), r"g\(x, y, batch\) must return one real"),
    ],
)
def test_bad_input_is_refused_by_name(make, message):
    with pytest.raises(InputError, match=message):
        make()


def squared_mean(x, y, rows):
    return jnp.mean(rows @ y) ** 2 + x @ x


NOT_MEANS = {
    "a sum": lambda x, y, rows: jnp.sum((rows @ y - 1) ** 2) + x @ x,
    "a median": lambda x, y, rows: jnp.median((rows @ y) ** 2) + x @ x,
    "centred by the batch": lambda x, y, rows: jnp.mean((rows @ y - jnp.mean(rows @ y)) ** 2) + x @ x,
    "a squared mean": squared_mean,
    "a variance, which one row has not": lambda x, y, rows: jnp.var(rows @ y, ddof=1) + x @ x,
    "weighted by the batch": lambda x, y, rows: jnp.average((rows @ y) ** 2, weights=rows[:, 0] ** 2) + x @ x,
    "a maximum": lambda x, y, rows: jnp.max(rows @ y) + x @ x,
}
MEANS = {
    "with a regulariser": lambda x, y, rows: jnp.mean((rows @ y - 1) ** 2) + jnp.exp(x).sum() * (y @ y),
    "of rows alone": lambda x, y, rows: jnp.mean(rows**2) + 0 * (x.sum() + y.sum()),
    "of no row": lambda x, y, rows: x @ x + y @ y,
    "of numbers that cancel": lambda x, y, rows: 1e3 * jnp.mean(rows @ y + jnp.where(rows[:, 0] > 0, 1, -1)) + x.sum(),
    "defined near the start alone": lambda x, y, rows: jnp.mean(jnp.log(1.05 - x[0]) * rows[:, 0]) + y.sum(),
}
UNEQUAL, EQUAL = [ROWS[:4], ROWS[4:]], [ROWS[:3], ROWS[3:6]]


def check(f, g, clients, batch_size=None, pooled=False, x=X, y=Y):
    check_means(Population.build(Problem(f, g), clients, clients, batch_size=batch_size), x, y, pooled)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("loss", NOT_MEANS.values(), ids=NOT_MEANS)
def test_a_loss_that_is_no_mean_is_refused_with_both_numbers_where_the_number_of_rows_varies(loss, dtype):
    unequal, equal = ([rows.astype(dtype) for rows in clients] for clients in (UNEQUAL, EQUAL))
    start = dict(x=X.astype(dtype), y=jnp.zeros(3, dtype))  # where some of them vanish
    number = r"-?(nan|[\d.e+-]+)"
    said = rf"must be a mean over its rows .* it is {number}, and the mean of its values on each of these alone is {number};"
    mean = MEANS["with a regulariser"]
    for case in (dict(clients=unequal), dict(clients=equal, batch_size=2), dict(clients=equal, pooled=True)):
        with pytest.raises(InputError, match=f"^f {said}"):
            check(loss, mean, **case, **start)
        with pytest.raises(InputError, match=f"^g {said}"):
            check(mean, loss, **case, **start)
    check(loss, loss, equal, **start)  # all rows of equal clients: the loss is what it says


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_means_with_and_without_regularisers_pass(loss, dtype):
    rows = [rows.astype(dtype) for rows in UNEQUAL]
    check(loss, loss, rows, batch_size=2, x=X.astype(dtype), y=Y.astype(dtype))
    check(loss, loss, rows, x=jnp.zeros(2, dtype), y=jnp.zeros(3, dtype))


def test_a_metric_that_is_no_mean_is_refused_where_clients_have_unequal_numbers_of_rows():
    mean, root = MEANS["of no row"], lambda x, y, rows: jnp.sqrt(jnp.mean((y - rows) ** 2))
    for named, test in (("metrics", None), ("lower_metrics", None), ("tests", UNEQUAL)):
        problem = Problem(mean, mean, **{named: (("rmse", root),)})
        with pytest.raises(InputError, match=r"^rmse must be a mean over its rows"):
            check_means(Population.build(problem, UNEQUAL, UNEQUAL, test=test), X, Y)
        check_means(Population.build(problem, EQUAL, EQUAL, batch_size=2, test=test and EQUAL), X, Y)  # of all rows of each


def test_clients_with_one_row_tell_a_sum_from_a_mean():
    with pytest.raises(InputError, match=r"^f must be a mean over its rows"):
        check(NOT_MEANS["a sum"], MEANS["of no row"], [ROWS[:1]], batch_size=4)


def test_arrays_of_a_tree_keep_their_own_precision_for_the_losses_and_in_the_end():
    tree = {"wide": jnp.ones(2), "half": jnp.ones(3, "bfloat16"), "single": np.ones((1, 2), "float32"), "number": 2.0}
    seen = []

    def loss(x, y, rows):
        seen.append(jax.tree.map(lambda a: a.dtype.name, x))
        return sum(leaf.astype(float).sum() for leaf in jax.tree.leaves(x)) + y

    problem, x, y, x_tree, _ = from_trees(loss, loss, tree, 1.0)
    problem.f(x, y, None)
    wanted = {"wide": "float64", "half": "bfloat16", "single": "float32", "number": "float64"}
    assert seen == [wanted] and jax.tree.map(lambda a: a.dtype.name, x_tree(x)) == wanted


def test_single_precision_says_what_it_does_to_doubles_and_to_whole_numbers():
    with jax.enable_x64(False):
        with pytest.warns(UserWarning, match="^y0 is in double precision, and JAX computes in single: set JAX_ENABLE_X64=1"):
            from_trees(f, g, jnp.zeros(2), np.zeros(3))
        from_trees(f, g, 1.0, np.zeros(3, np.float32))  # neither of which is a double
        with pytest.raises(InputError, match=r"^x0 holds a value that is not finite in float32"):
            from_trees(f, g, 1e300, jnp.zeros(3))
        for wide in (2**40, -(2**31) - 1):
            with pytest.raises(InputError, match=f"^lower holds {wide}, which JAX's int32 cannot: make it a float"):
                Shards.stack([np.array([1, wide])], "lower")
        with pytest.raises(InputError, match=f"^lower holds {2**32}, which JAX's uint32 cannot"):
            Shards.stack([np.array([2**32], np.uint64)], "lower")
        np.testing.assert_array_equal(Shards.stack([np.array([2**31 - 1, -(2**31)])]).rows, [2**31 - 1, -(2**31)])
        with pytest.raises(InputError, match=r"^weights must be .* and none lost beside the others; given: \[1, 1e-39\]"):
            shares_of([1, 1e-39], 2)


@pytest.mark.parametrize("whole", [2**40, np.int64(2**40), np.array(-(2**40)), np.uint64(2**63)])
def test_single_precision_keeps_whole_numbers_that_a_metric_returns(whole):
    with jax.enable_x64(False):
        task = Task.of(f, g, jnp.zeros(2), jnp.zeros(3), lower=[ROWS.astype(np.float32)], metrics=lambda x, y: {"whole": whole})
        assert float(task.evaluate(*task.start)["whole"]) == whole
    np.testing.assert_array_equal(Shards.stack([np.array([2**40])]).rows, [2**40])


def test_rows_that_memory_or_whole_numbers_cannot_hold_are_refused_before_they_are_copied(monkeypatch):
    many = np.broadcast_to(np.ones(1, bool), (2**31, 1))
    with pytest.raises(InputError, match=r"^lower has 2,147,483,648 rows, and fewer than 2³¹ can be numbered"):
        Shards.stack([many], "lower")
    monkeypatch.setattr(devices, "memory", lambda: 10**9)
    with pytest.raises(InputError, match=r"^lower: the clients' rows: about 1\.6 GB of memory are needed, and 1\.0 are there"):
        Shards.stack([many[: 3 * 2**28]] * 2, "lower")
