"""What the engines promise beyond the table of algorithms: counts, draws, messages, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import deployed, weighted
from jax import lax

import fedbilevel as fb
from fedbilevel.core.participation import Bernoulli, Dropouts, Everyone, Uniform, without_replacement
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Pair, Point
from fedbilevel.core.traffic import Totals, Traffic, exact, product, total
from fedbilevel.engines import client_runtime, wire
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.engines.messages import Call, Request
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.tasks.quadratic import PROBLEM, Quadratic


@pytest.mark.parametrize(("n", "m"), [(0, 0), (3, 5), (65_535, 65_537), (2**31 - 1, 2**32 - 1), (10**6, 157_000)])
def test_products_are_exact_beyond_32_bits(n, m):
    assert exact(product(n, m)) == n * m


def test_sums_carry():
    a, b = product(2**31 - 1, 2**32 - 1), product(10**6, 157_000)
    assert exact(total(a, b)) == (2**31 - 1) * (2**32 - 1) + 157 * 10**9


def test_totals_do_not_overflow_in_a_long_run():
    pairs = product(10**9, 10**6), product(2**30, 2**30), product(4 * 10**9, 10**6), product(2**31, 2**31)
    traffic, totals = Traffic.zero().plus(Traffic(jnp.int32(3), *pairs)), Totals()
    for _ in range(100):
        totals = totals.plus(traffic)
    assert totals == Totals(300, 10**17, 100 * 2**60, 4 * 10**17, 100 * 2**62)


@pytest.mark.parametrize(("population", "size"), [(10, 10), (10, 4), (1000, 3), (200, 6)])
def test_draws_are_uniform_in_every_place(population, size):
    draws = np.asarray(jax.vmap(lambda k: without_replacement(k, population, size))(jax.random.split(jax.random.key(0), 4000)))
    assert all(len(set(row)) == size for row in draws)
    edges = np.linspace(0, population, 6)
    for place in range(size):
        counts = np.histogram(draws[:, place], edges)[0]
        assert np.all(np.abs(counts - 800) < 5 * np.sqrt(800))


def test_bernoulli_and_dropouts_take_part_as_often_as_they_should():
    keys = jax.random.split(jax.random.key(1), 3000)
    for participation, share in [(Bernoulli(0.3), 0.3), (Dropouts(Everyone(), 0.4), 0.6), (Dropouts(Uniform(10), 0.4), 0.3)]:
        ids, active = jax.vmap(lambda k, p=participation: p.draw(k, 20))(keys)
        present = np.zeros(20)
        np.add.at(present, np.asarray(ids).ravel(), np.asarray(active).ravel())
        np.testing.assert_allclose(present / 3000, share, atol=5 * np.sqrt(share * (1 - share) / 3000))


def test_a_cohort_is_never_empty():
    for participation in (Bernoulli(1e-9), Dropouts(Uniform(3), 0.999999), Dropouts(Bernoulli(0.01), 0.99)):
        for k in range(20):
            _, active = participation.draw(jax.random.key(k), 5)
            assert active.sum() >= 1


@pytest.mark.parametrize(
    ("participation", "message"),
    [
        (lambda: Uniform(7).capacity(6), "clients per round"),
        (lambda: Uniform(0), "size must be a whole number of at least 1"),
        (lambda: Bernoulli(0), "probability must be a number above 0 and at most 1"),
        (lambda: Dropouts(Everyone(), 1), "probability must be a number of at least 0 and below 1"),
    ],
)
def test_impossible_participation_is_refused(participation, message):
    with pytest.raises(InputError, match=message):
        participation()


@pytest.mark.parametrize("participation", [Uniform(7), Dropouts(Uniform(7), 0.5)])
def test_more_participants_than_clients_are_refused(participation):
    with pytest.raises(InputError, match="clients per round must be between 1 and the number of clients, 6; given: 7"):
        participation.capacity(6)


def test_unbiased_mean_is_unbiased_for_unequal_weights():
    task = Quadratic(clients=5).build()
    population = weighted(task.population, [0.5, 0.2, 0.15, 0.1, 0.05])
    simulator, algorithm = SimulatedEngine(population, Uniform(2)), fb.SimFBO(gamma_x=1.0, gamma_y=1.0, gamma_u=1.0)
    step = jax.jit(SimulatedEngine(population, Everyone()).step)
    full, *_ = step(algorithm, Point(task.x, task.y, task.y), jax.random.key(0))

    def drawn(key):
        return simulator.step(algorithm, Point(task.x, task.y, task.y), key)[0].y

    ys = np.asarray(jax.jit(jax.vmap(drawn))(jax.random.split(jax.random.key(1), 4000)))
    np.testing.assert_array_less(np.abs(ys.mean(0) - full.y), 4 * ys.std(0) / np.sqrt(4000) + 1e-12)


def test_a_loop_of_jax_around_communication_says_what_to_use():
    class Bare(fb.FedAvg):
        def step(self, state, clients, key):
            y = lax.fori_loop(0, 3, lambda _, y: clients.draw().mean(self.local_y, state.x, y), state.y)
            return Pair(state.x, y)

    task = Quadratic(clients=3).build()
    algorithm = jax.tree_util.register_dataclass(Bare, ["gamma"], ["local_steps"])()
    with pytest.raises(TypeError, match=r"clients\.loop"):
        jax.jit(SimulatedEngine(task.population, Everyone()).step)(algorithm, Pair(task.x, task.y), jax.random.key(0))


def test_messages_come_back_as_they_went():
    tree = {"a": [1, 2.5, None, True, "β"], "b": (np.arange(6, dtype=np.int8).reshape(2, 3), Point(*np.eye(3)))}
    tree["c"] = jnp.array([1.5, -2], jnp.bfloat16)
    tree["d"] = np.float32(3)
    back = wire.decode(wire.encode(tree), {"Point": Point})
    assert back["a"] == tree["a"] and isinstance(back["b"], tuple) and isinstance(back["b"][1], Point)
    np.testing.assert_array_equal(back["b"][0], tree["b"][0])
    assert back["b"][0].dtype == np.int8 and back["c"].dtype == jnp.bfloat16 and back["d"].shape == ()


@pytest.mark.parametrize(
    "damage", [lambda b: b[:5], lambda b: b[:-1], lambda b: b + b"x", lambda b: b"\xff" * len(b), lambda b: b""]
)
def test_damaged_messages_are_refused(damage):
    with pytest.raises(InputError, match="message"):
        wire.decode(damage(wire.encode({"a": np.ones(3)})))


def test_unknown_types_and_objects_do_not_travel():
    with pytest.raises(InputError, match="damaged or not a fedbilevel message"):
        wire.decode(wire.encode(Point(1.0, 2.0, 3.0)))
    with pytest.raises(TypeError, match="cannot send"):
        wire.encode(object())


def test_only_client_functions_can_be_called_over_the_wire():
    task = Quadratic(clients=2).build()
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone())
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    for name in ("step", "init", "__post_init__", "no_such"):
        with pytest.raises(InputError, match="not a client function of FedAvg: refused"):
            runtimes[0].answer(wire.encode(Request(Call(name, key, (), None), True, [])))


class Unreliable:
    """A transport whose client 1 never answers."""

    def __init__(self, transport):
        self.transport = transport

    def ask(self, requests):
        replies, errors = self.transport.ask({m: r for m, r in requests.items() if m != 1})
        return replies, errors | {m: Failure(Kind.LATE, "timed out") for m in requests if m == 1}


def test_a_silent_client_is_left_out_and_weights_are_renormalised():
    task = Quadratic(clients=3).build()
    algorithm = fb.FedBiOAcc(local_steps=2)
    federation, _ = deployed(algorithm, task.population, Everyone())
    federation.exchange.transport = Unreliable(federation.exchange.transport)
    kept = [0, 2]
    parts = [
        [jax.tree.map(lambda a: np.asarray(a[m : m + 1]), s.rows) for m in kept]
        for s in (task.population.upper, task.population.lower)
    ]
    two = SimulatedEngine(Population.build(PROBLEM, *parts), Everyone())
    ours, *_ = federation.init(algorithm, task.x, task.y, jax.random.key(0))
    step = jax.jit(two.step)
    theirs, *_ = jax.jit(two.init)(algorithm, task.x, task.y, jax.random.key(0))
    for k in range(2):
        ours, *_ = federation.step(algorithm, ours, jax.random.key(k))
        theirs, *_ = step(algorithm, theirs, jax.random.key(k))
    np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-9)


def test_a_federation_where_nobody_answers_says_why():
    task = Quadratic(clients=2).build()
    federation, runtimes = deployed(fb.FedAvg(), task.population, Everyone())
    runtimes.clear()
    with pytest.raises(RuntimeError, match=r"none of 2 clients answered; client \d: KeyError"):
        federation.step(fb.FedAvg(), Pair(task.x, task.y), jax.random.key(0))


def test_clients_forget_what_the_server_no_longer_needs(monkeypatch):
    monkeypatch.setattr(client_runtime, "MOST_KEPT", 2)  # beyond that a client refuses
    algorithm = fb.FedBiOLocal(local_steps=1)
    task = Quadratic(clients=3, lower_level="local").build()
    federation, _ = deployed(algorithm, task.population, Everyone())
    state, *_ = federation.init(algorithm, task.x, task.y, jax.random.key(0))
    for k in range(5):
        state, *_ = federation.step(algorithm, state, jax.random.key(k))
    assert federation.exchange.absences == 0
