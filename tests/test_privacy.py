"""Privacy of rows: clipping, sampling and noise against brute force, ε against the library, and an audit with a canary."""

import dataclasses
from collections import Counter

import dp_accounting
import dp_accounting.pld
import dp_accounting.rdp
import jax
import jax.numpy as jnp
import numpy as np
import private_rows
import pytest
from federations import deployed
from private_rows import Y, audited, population, task, two_gradients

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core import privacy as mechanism
from fedbilevel.core.participation import Everyone, Uniform
from fedbilevel.core.population import Population
from fedbilevel.core.privacy import CUT, RowPrivacy, capacity, rate
from fedbilevel.core.privacy_accounting import KEPT, ORDERS, Event, calibrated_noise, composed, epsilon, of_evaluations
from fedbilevel.core.private_tasks import require_private
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.release_counts import Release, releases_of
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.runs.derivative_counts import Tally
from fedbilevel.runs.simulation import simulation
from fedbilevel.runs.spending import Calls
from fedbilevel.tasks.base import Task

POINT = jnp.asarray([0.3, -0.2, 0.5]), jnp.asarray([-0.4, 0.1, 0.7])
V = jnp.asarray([1.0, -2.0, 0.5])
BOUNDS = dict(clip_f=0.8, clip_g=0.6, clip_products=0.5)
SILENT = dict(noise=1e-13, **BOUNDS)
ASKED = {"fx": (), "fy": (), "gx": (), "gy": (), "gyy": (V,), "gxy": (V,)}


def by_hand(name, rows, drawn, expected):
    """The release without noise, from the rows' own Jacobian matrices."""
    loss = private_rows.f if name.startswith("f") else private_rows.g

    def alone(row):
        first = jax.jacobian(lambda x, y: loss(x, y, row[None]), (0, 1))
        if len(name) == 2:
            return first(*POINT)["xy".index(name[1])]
        return jax.jacobian(lambda x, y: first(x, y)[1], (0, 1))(*POINT)["xy".index(name[1])].T @ V

    each = np.asarray(jax.jit(jax.vmap(alone))(rows))
    bound = dict(f=0.8, g=0.6)[name[0]] if len(name) == 2 else 0.5 * np.linalg.norm(V)
    short = each * np.minimum(1, bound / np.linalg.norm(each, axis=1))[:, None]
    assert np.any(np.linalg.norm(each, axis=1) > bound)
    return short[np.asarray(drawn)].sum(0) / expected


@pytest.mark.parametrize(("name", "batch_size"), [*((name, 4) for name in ASKED), ("fx", None)])
def test_each_rows_contribution_is_clipped(name, batch_size, monkeypatch):
    monkeypatch.setattr(mechanism, "PER_ROW_NUMBERS", 9)  # three rows at once
    client = population(batch_size=batch_size, **SILENT).client(1, jax.random.key(3))
    batch = jax.jit(client.batch)()
    draw = batch.upper if name.startswith("f") else batch.lower
    assert int(draw.expected) == (batch_size or 12) and 0 < int(draw.drawn.sum()) <= 12
    got = getattr(client.problem, name)(*POINT, batch, *ASKED[name])
    np.testing.assert_allclose(got, by_hand(name, draw.rows, draw.drawn, batch_size or 12), rtol=1e-9, atol=1e-12)


def test_a_row_without_finite_derivatives_contributes_nothing():
    made = population(**SILENT)
    rows = made.lower.rows.at[0].set(jnp.inf)
    broken = dataclasses.replace(made, lower=dataclasses.replace(made.lower, rows=rows)).client(0, jax.random.key(0))
    batch = broken.whole()
    drawn = batch.lower.drawn.at[0].set(False)
    want = by_hand("gy", made.lower.rows[: len(drawn)], drawn, 7)
    np.testing.assert_allclose(broken.problem.gy(*POINT, batch), want, rtol=1e-9)


def test_rows_are_drawn_independently_with_the_probability_that_is_accounted_for():
    made = population(sizes=(30, 300), batch_size=20, **SILENT)
    for m, n in enumerate((30, 300)):
        draw = jax.jit(jax.vmap(lambda key, m=m: made.client(m, key).batch()))
        batches = draw(jax.random.split(jax.random.key(m), 2000))
        counts = np.asarray(batches.lower.drawn.sum(1))
        q = 20 / n
        assert abs(counts.mean() - 20) < 5 * np.sqrt(n * q * (1 - q) / 2000)
        assert 0.8 < counts.var() / (n * q * (1 - q)) < 1.2
        assert q <= rate(n, 20) < q + 1e-9 and rate(n, 2 * n) == 1
    own = made.lower.rows[30:]
    first = jax.tree.map(lambda a: a[0], batches.lower)
    assert all((own == row).all(1).any() for row in first.rows[first.drawn])
    assert len(first.drawn) == capacity(300, 20) < 300 and CUT < 1e-15


def test_the_noise_has_its_size_and_no_two_questions_share_it():
    made = population(noise=3.0, **BOUNDS)

    @jax.jit
    @jax.vmap
    def noise(key):
        client = made.client(0, key)
        silent = dataclasses.replace(made, privacy=RowPrivacy(**SILENT)).client(0, key)
        batch = client.whole()

        def asked(problem):
            x, y = POINT
            at = [problem.gy(x, y, batch), problem.gy(x, y + 1e-9, batch), problem.gx(x, y, batch), problem.gyy(x, y, batch, V)]
            in_a_loop = jax.lax.map(lambda k: problem.gy(x, y + k, batch), jnp.arange(1.0, 3.0))
            return jnp.concatenate([*at, *in_a_loop, problem.gy(x, y, batch)])

        return asked(client.problem) - asked(silent.problem)

    found = np.asarray(noise(jax.random.split(jax.random.key(0), 3000)))
    deviations = 3.0 * np.r_[[0.6] * 9, [0.5 * np.linalg.norm(V)] * 3, [0.6] * 9] / 7
    np.testing.assert_allclose(found.std(0), deviations, rtol=0.07)
    np.testing.assert_array_equal(found[:, :3], found[:, -3:])  # the same question
    between = np.corrcoef(found[:, :-3].T) - np.eye(18)
    assert np.abs(between).max() < 0.1


def test_epsilon_is_the_librarys():
    events = Counter({Event(0.05, 1.1): 300, Event(1.0, 12.0): 4, Event(0.2, 2.0): 50})
    direct = dp_accounting.rdp.RdpAccountant(ORDERS)
    direct.compose(composed(events))
    assert epsilon(events, 1e-5) == pytest.approx(direct.get_epsilon((1 - KEPT) * 1e-5), rel=1e-9)
    assert epsilon(Counter(), 1e-5) == 0 and epsilon(Counter({Event(0.05, 0.05): 10**6}), 1e-5) == np.inf


def test_another_event_never_lowers_epsilon():
    rates, noises = (1e-3, 0.3, 1.0), (0.5, 30.0, 1e6, 1e31)
    for events in (Counter({Event(1.0, 1.0): 20}), Counter({Event(0.1, 20.0): 5})):
        alone = epsilon(events, 1e-5)
        assert 0 < alone < np.inf
        for event in (Event(q, noise) for q in rates for noise in noises):
            assert epsilon(events + Counter({event: 1}), 1e-5) >= alone, event


def test_a_run_whose_metrics_cost_too_much_is_refused_with_that_reason():
    with pytest.raises(InputError, match="metrics alone cost more"):
        simulation(task(), fb.SimFBO(), rounds=9, privacy="rows(epsilon=0.01)")


@pytest.mark.slow
def test_epsilon_is_near_that_of_a_tighter_accountant():
    events = Counter({Event(0.05, 1.1): 300, Event(1.0, 12.0): 4, Event(0.2, 2.0): 50})
    tight = dp_accounting.pld.PLDAccountant()
    tight.compose(composed(events))
    assert 0.8 * epsilon(events, 1e-5) < tight.get_epsilon(1e-5) < epsilon(events, 1e-5)


def test_derivatives_on_one_draw_count_as_one_release_with_a_larger_reach():
    """They share the rows that are drawn: to count them as drawn anew would promise too much."""
    assert releases_of(two_gradients, (Y,), 0, full_batches=False) == Counter({Release("lower", 1, 2): 1})
    together, apart = Counter({Event(0.1, 1.0 / np.sqrt(4)): 50}), Counter({Event(0.1, 1.0): 200})
    assert epsilon(together, 1e-5) > 1.5 * epsilon(apart, 1e-5)


@pytest.mark.parametrize(
    "name",
    ["mefbo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedbio", "fedbioacc", "fedmbo", "fednest", "simfbo"))],
)
def test_as_many_derivatives_are_accounted_for_as_are_computed(name):
    values = {"share_batch": True} if name == "fedbio" else {"spread": 1} if name == "simfbo" else {}
    made, algorithm = task(sizes=(9, 9)), ALGORITHMS[name].configure(name, values)
    options = dict(steps=3, clients_per_round=2)
    plain, private = simulation(made, algorithm, **options), simulation(made, algorithm, privacy="rows(noise=1)", **options)
    calls = private.spending.calls.at(3)
    counted = [
        calls[function] * release.derivatives * release.times * count
        for function, releases in private.spending.releases.items()
        for release, count in releases.items()
    ]
    work = Tally(plain).at([3])[0]
    assert sum(counted) >= (work.gradients + work.second_order) / 2
    assert sum(counted) == (work.gradients + work.second_order) / 2 or name in ("simfbo", "fedmbo")  # clients differ


def test_calls_are_those_of_the_client_that_is_asked_most():
    made = task()
    engine = SimulatedEngine(dataclasses.replace(made.population, privacy=RowPrivacy(noise=1.0)), Uniform(1))
    calls = Calls(made, fb.SimFBO(), engine, seed=0)
    key, asked = jax.random.key(0), np.zeros(3, int)
    for step in range(1, 6):
        clients = jax.random.split(jax.random.fold_in(key, step))[1]
        asked[int(Uniform(1).draw(jax.random.fold_in(clients, 0), 3)[0][0])] += 1
        assert calls.at(step) == {"direction_sum": asked.max()}


def test_a_run_is_calibrated_to_its_epsilon_and_says_what_it_has_spent():
    experiment = simulation(task(), fb.SimFBO(), rounds=30, every=10, privacy="rows(epsilon=4, delta=1e-4)")
    moments = [moment for moment in experiment.run() if moment.metrics]
    spent = [moment.metrics["epsilon"] for moment in moments]
    assert spent == sorted(spent) and 3.95 < spent[-1] <= 4.0 and spent[0] < 1
    *_, last = experiment.run()
    np.testing.assert_array_equal(last.state.x, moments[-1].state.x)


@pytest.mark.slow
def test_noise_that_goes_to_zero_leaves_the_run_as_it_is():
    wide = RowPrivacy(noise=1e-13, clip_f=1e6, clip_g=1e6, clip_products=1e6)
    full = task(sizes=(30, 20), batch_size=None)
    plain, private = (fb.solve(full, algorithm=fb.FedBiO(eta=0.1), rounds=5, privacy=privacy) for privacy in (None, wide))
    np.testing.assert_allclose(private.x, plain.x, rtol=1e-6)


@pytest.mark.slow
def test_both_engines_draw_the_same_noise_from_the_same_keys():
    private = dataclasses.replace(task(sizes=(30, 20)).population, privacy=RowPrivacy(noise=1.0))
    algorithm, start = fb.SimFBO(share_batch=True), (jnp.zeros(3), jnp.zeros(3))
    key = jax.random.key(0)

    def two_steps(engine):
        state = engine.init(algorithm, *start, key).state
        return engine.step(algorithm, state, jax.random.fold_in(key, 1)).state

    simulated = jax.jit(lambda: two_steps(SimulatedEngine(private, Everyone())))()
    messages = two_steps(deployed(algorithm, private, Everyone(), start)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), simulated, messages)


def weighed():
    """A population whose x has a weight for each row."""

    def loss(x, y, rows):
        return jnp.mean(x[rows["place"]] * jnp.sum((y - rows["at"]) ** 2, 1))

    rows = {"place": np.arange(6), "at": np.ones((6, 2))}
    return Population.build(Problem(loss, loss), [rows], [rows])


def owned():
    """A task whose clients have an x of their own each."""
    rows = private_rows.some_rows([9, 9])
    return Task.of(private_rows.f, private_rows.g, np.zeros(3), np.zeros(3), lower=rows, upper=rows, own_x=True)


def median(x, y, rows):
    return jnp.median(jnp.sum((y - rows) ** 2, 1)) + jnp.sum(x**2)


def varying(client, x):
    batch = client.batch()
    return jax.lax.cond(x[0] > 0, lambda: client.problem.fx(x, x, batch), lambda: x)


def batched(client, x):
    return jax.vmap(lambda k: client.problem.fx(x + k, x, client.whole()))(jnp.arange(3.0))


def chunked(client, x):
    return jax.lax.map(lambda k: client.problem.gyy(x, x, client.whole(), x * k), jnp.arange(4.0), batch_size=2)


def drawing(client, x):
    return jax.vmap(lambda k: client.problem.fx(x, x, client.batch(k)))(jnp.arange(3))


def without_end(client, x):
    def again(x, k):
        return jax.lax.scan(lambda x, j: (client.problem.fx(x, x, client.batch(k * j)), None), x, jnp.arange(10**5))

    return jax.lax.scan(again, x, jnp.arange(10**5))[0]


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (
            lambda: simulation(task(), fb.FedPace(), rounds=9, privacy="rows(epsilon=8)"),
            "FedPace: .*differentiates what clients",
        ),
        (lambda: require_private(weighed(), np.ones(6), np.zeros(2)), "x has entries of its own for single rows"),
        (
            lambda: simulation(
                owned(), ALGORITHMS["fedpace-own"].configure("fedpace-own", {}), rounds=9, privacy="rows(epsilon=8)"
            ),
            "an x of its own",
        ),
        (lambda: require_private(owned().population, np.zeros(3), np.zeros(3)), "an x of its own"),
        (
            lambda: fb.solve(
                median,
                median,
                np.zeros(3),
                np.zeros(3),
                lower=private_rows.some_rows([9]),
                rounds=9,
                algorithm="fedbio",
                privacy=RowPrivacy(epsilon=1),
            ),
            "must be a mean over its rows",
        ),
        (
            lambda: simulation(task(), ALGORITHMS["stocbio"].configure("stocbio", {}), rounds=9, privacy="rows(epsilon=8)"),
            "pools all rows",
        ),
        (lambda: releases_of(varying, (jnp.zeros(3),), 0, False), "varying asks of a client's rows depends on numbers"),
        *((lambda of=of: releases_of(of, (jnp.zeros(3),), 0, False), "in jax.vmap") for of in (batched, chunked, drawing)),
        (lambda: releases_of(without_end, (jnp.zeros(3),), 0, False), "without_end may take 100,000 operations, and here"),
        (lambda: population(noise=1.0).client(0, jax.random.key(0)).problem.upper_loss(*POINT, Batch(0, 0)), "f itself"),
        (lambda: RowPrivacy(epsilon=1, noise=1), "give either epsilon"),
        (lambda: RowPrivacy(noise=1e5), "noise must be a number above 0 and at most 10000; given: 100000"),
        (lambda: RowPrivacy(noise=1, metric_noise=1e31), "metric_noise must be a number above 0 and at most 10000"),
        (lambda: RowPrivacy(noise=1, clip_products=1e-7), "clip_products must be a number of at least 1e-06"),
        (
            lambda: calibrated_noise(0.01, 1e-5, lambda z: Counter({Event(1.0, z): 1, Event(1.0, 30.0): 2})),
            "metrics alone cost more",
        ),
        (lambda: simulation(task(), fb.SimFBO(), rounds=9, privacy="columns(epsilon=1)"), "privacy must be rows"),
    ],
)
def test_what_cannot_be_private_is_refused_with_a_line(build, line):
    with pytest.raises(InputError, match=line):
        build()


def claimed(privacy, delta, q=1.0):
    return epsilon(Counter({Event(q, privacy.multiplier / np.sqrt(2)): 1}), delta)


MISTAKES = {
    "noise halved": ("gaussian", lambda key, like, right=mechanism.gaussian: right(key, like) / 2),
    "clipping left out": ("clipped", lambda v, bound: v),
    "noise reused": ("_key_of", lambda key, name, point: key),
}


def test_an_audit_finds_no_more_than_is_claimed():
    privacy = RowPrivacy(noise=1.4, clip_g=1.0)
    assert 0.8 < audited(privacy, 0.01, 8000) < claimed(privacy, 0.01)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_audit_finds_mistakes(mistake, monkeypatch):
    monkeypatch.setattr(mechanism, *MISTAKES[mistake])
    privacy = RowPrivacy(noise=1.4, clip_g=1.0)
    assert audited(privacy, 0.01, 8000) > claimed(privacy, 0.01)


@pytest.mark.slow
def test_a_large_audit_of_minibatches_finds_no_more_than_is_claimed(monkeypatch):
    privacy, how = RowPrivacy(noise=1.2, clip_g=1.0), dict(delta=0.002, trials=200_000, batch_size=2)
    found, most = audited(privacy, **how), claimed(privacy, 0.002, rate(8, 2))
    assert 0.5 * most < found < most
    monkeypatch.setattr(
        mechanism, "product", lambda words, size: jnp.zeros((2, *words.shape), jnp.uint32)
    )  # every row is drawn
    assert audited(privacy, **how) > most


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e25, np.inf, np.nan])
def test_nothing_is_longer_than_the_bound_however_small_or_large_its_entries(size):
    v = jnp.asarray([size, -size, size], jnp.float32)
    for bound in (0.5 * size, 1e-3 * size, 0.0):
        length = np.linalg.norm(np.asarray(mechanism.clipped(v, jnp.float32(bound)), np.float64))
        assert length <= bound * (1 + 1e-6) or (length == 0 and not np.isfinite(size))


def test_metrics_at_a_site_are_clipped_and_have_their_noise():
    seven, nine = private_rows.some_rows([7, 9])
    losses = (private_rows.f, seven), (private_rows.g, nine)
    told = jax.jit(jax.vmap(lambda key: mechanism.private_metrics(losses, *POINT, RowPrivacy(noise=1.0, metric_clip=2.0), key)))
    found = np.asarray(told(jax.random.split(jax.random.key(0), 4000)))
    deviation = 30 * np.sqrt(2) * 2.0 / np.asarray([7, 9])
    want = [np.mean([np.clip(loss(*POINT, row[None]), -2, 2) for row in rows]) for loss, rows in losses]
    np.testing.assert_allclose(found.std(0), deviation, rtol=0.05)
    assert np.all(np.abs(found.mean(0) - want) < 5 * deviation / np.sqrt(4000))
    assert of_evaluations(RowPrivacy(noise=1.0), 3) == Counter({Event(1.0, 30.0): 3})


def test_metrics_at_a_site_are_all_that_the_server_expects_in_its_order():
    upper, lower, held_out = private_rows.some_rows([7, 9, 5])

    def first(x, y, rows):
        return jnp.mean(rows[:, 0])

    problem = Problem(
        private_rows.f, private_rows.g, metrics=(("a", first),), lower_metrics=(("b", first),), tests=(("c", first),)
    )
    one = Population.build(problem, [upper], [lower], test=[held_out])
    x, y = POINT
    silent = RowPrivacy(noise=1.0, metric_clip=1e3, metric_noise=1e-12)
    for test, tested in ((None, []), (held_out, [held_out[:, 0].mean()])):
        asked = mechanism.of_metrics(problem, upper, lower, test)
        told = mechanism.private_metrics(asked, x, y, silent, jax.random.key(0))
        np.testing.assert_allclose(told, [*problem.evaluate(x, y, one.whole(0)), *tested], rtol=1e-6)
