"""Compressed answers: what crosses, what is left out and sent later, and both engines with the same numbers and bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import AVERAGED, MemoryStore, deployed, weighted
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.aggregation import sent_down
from fedbilevel.core.participation import Dropouts, Uniform
from fedbilevel.core.traffic import Totals, Traffic, size_in_bytes
from fedbilevel.engines.call_shapes import Shape, check_message
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.tasks.quadratic import Quadratic

RULES = ["quantized(block=4)", "quantized(bits=4, block=6)", "top-k(one_in=3)", "random-k(one_in=3)"]


def sent(text, v, memory=0.0, key=0):
    """What the server makes of one vector, what the client remembers, and the message."""
    rule, key, like = configured(text), jax.random.key(key), jax.ShapeDtypeStruct(v.shape, v.dtype)
    message, left = rule.encode(key, jnp.asarray(v), jnp.zeros(v.shape) + memory)
    return np.asarray(rule.decode(key, message, like)), np.asarray(left), message


@pytest.mark.parametrize("text", RULES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([9, 16, 21]))
def test_what_is_sent_and_what_is_remembered_are_all_there_was(text, seed, size):
    v, memory = np.random.default_rng(seed).normal(size=(2, size))
    there, left, _ = sent(text, v, memory)
    np.testing.assert_allclose(there + left, v + memory, rtol=1e-9, atol=1e-12)
    assert np.linalg.norm(left) < np.linalg.norm(v + memory)  # a contraction, as error feedback needs


@pytest.mark.parametrize(("bits", "most", "packed"), [(8, 127, 21), (4, 7, 11)])
def test_quantized_numbers_are_within_half_a_step_of_their_blocks_scale(bits, most, packed):
    v = np.random.default_rng(0).normal(size=21) * np.repeat([1, 100, 0], 7)
    there, _, ((whole, scales),) = sent(f"quantized(bits={bits}, block=8)", v)
    step = np.repeat([np.abs(v[k : k + 8]).max() / most for k in (0, 8, 16)], 8)[:21]
    assert np.all(np.abs(there - v) <= step / 2 + 1e-12)
    assert whole.nbytes == packed and scales.size == 3


def test_top_k_sends_the_largest_and_random_k_the_same_places_for_all():
    v = np.random.default_rng(1).normal(size=30)
    there, _, ((values, places),) = sent("top-k(one_in=6)", v)
    assert set(np.asarray(places)) == set(np.argsort(-np.abs(v))[:5]) and places.dtype == np.uint16
    np.testing.assert_allclose(there[np.asarray(places)], np.asarray(values))
    first, second = (np.flatnonzero(sent("random-k(one_in=6)", u)[0]) for u in (v, -2 * v))
    other = np.flatnonzero(sent("random-k(one_in=6)", v, key=1)[0])
    assert len(first) == 5 and np.array_equal(first, second) and not np.array_equal(first, other)


def test_small_arrays_cross_as_they_are():
    tree = {"a": jnp.arange(3.0), "b": jnp.ones(())}
    rule = configured("top-k(one_in=100)")
    message, left = rule.encode(jax.random.key(0), tree, jax.tree.map(jnp.zeros_like, tree))
    decoded = rule.decode(jax.random.key(0), message, tree)
    assert size_in_bytes(message) == size_in_bytes(tree) and not any(map(np.any, jax.tree.leaves(left)))
    jax.tree.map(np.testing.assert_array_equal, decoded, tree)


init, step = jax.jit(SimulatedEngine.init), jax.jit(SimulatedEngine.step)


def steps(engine, algorithm, task, n=2):
    key, totals = jax.random.key(5), Totals()
    begin, go_on = (init, step) if isinstance(engine, SimulatedEngine) else (DeployedEngine.init, DeployedEngine.step)
    state, traffic, _ = begin(engine, algorithm, task.x, task.y, key)
    for t in range(1, n + 1):
        state, traffic, _ = go_on(engine, algorithm, state, jax.random.fold_in(key, t))
        totals = totals.plus(Traffic.of(traffic))
    return state, totals


BOTH_WAYS = "quantized(bits=4, block=6, down=8)"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fedbio", BOTH_WAYS),
        ("distbio", BOTH_WAYS),
        pytest.param("fedbioacc", RULES[2], marks=pytest.mark.slow),
        pytest.param("fedbio-local", RULES[3], marks=pytest.mark.slow),
        *(pytest.param(name, BOTH_WAYS, marks=pytest.mark.slow) for name in AVERAGED if name not in ("fedbio", "distbio")),
    ],
)
def test_both_engines_have_the_same_numbers_and_bytes(name, text):
    algorithm = ALGORITHMS[name].configure(name, {})
    task = Quadratic(clients=4, noise=0.3, x_dimension=20, y_dimension=15, lower_level=type(algorithm).lower_level).build()
    population = weighted(task.population, [1, 2, 3, 4])
    rule, stores = configured(text), [MemoryStore() for _ in range(4)]
    ours = SimulatedEngine(population, Uniform(3), aggregation=rule)
    theirs, _ = deployed(algorithm, population, Uniform(3), (task.x, task.y), stores, rule)
    (a, simulated), (b, counted) = steps(ours, algorithm, task), steps(theirs, algorithm, task)
    np.testing.assert_allclose(a.x, b.x, rtol=1e-8, atol=1e-12)
    assert simulated == counted


def test_a_lost_answer_leaves_what_its_client_remembers_as_it_was(monkeypatch):
    """Deployed clients that fail are simulated clients that drop out."""
    task, algorithm, rule = Quadratic(clients=3, x_dimension=20).build(), fb.FedBiO(), configured(RULES[2])
    population, key = task.population, jax.random.key(5)
    dropped = {1: 0, 2: 2}  # by step, who is absent

    class Absent(Dropouts):
        step = 0

        def draw(self, key, population):
            return jnp.arange(population), jnp.arange(population) != dropped.get(self.step, -1)

    there = Absent(Uniform(3), 0.5)
    ours = SimulatedEngine(population, there, aggregation=rule)
    theirs, _ = deployed(algorithm, population, Absent(Uniform(3), 0.5), (task.x, task.y), aggregation=rule)
    asked, fails = theirs.exchange.transport.ask, {}

    def ask(requests):
        replies, failures = asked(requests)
        lost = {m: Failure(Kind.LATE, "late") for m in replies if m in fails}
        return {m: r for m, r in replies.items() if m not in lost}, failures | lost

    monkeypatch.setattr(theirs.exchange.transport, "ask", ask)
    a, b = init(ours, algorithm, task.x, task.y, key).state, theirs.init(algorithm, task.x, task.y, key).state
    for t in range(1, 4):
        object.__setattr__(there, "step", t)
        fails = {dropped[t]} if t in dropped else set()
        a, b = (e.step(algorithm, s, jax.random.fold_in(key, t)).state for e, s in ((ours, a), (theirs, b)))
        np.testing.assert_allclose(a.x, b.x, rtol=1e-8)


def test_what_clients_remember_outlives_them_and_the_server():
    task, algorithm, rule = Quadratic(clients=3, x_dimension=20).build(), fb.SimFBO(), configured(BOTH_WAYS)
    stores, key = [MemoryStore() for _ in range(3)], jax.random.key(5)

    def engine():
        return deployed(algorithm, task.population, Uniform(3), (task.x, task.y), stores, rule)[0]

    whole, _ = steps(engine(), algorithm, task)
    first = engine()
    state = first.init(algorithm, task.x, task.y, key).state
    state = first.step(algorithm, state, jax.random.fold_in(key, 1)).state
    arrays, second = first.save(state, 1), engine()
    state = second.restore(arrays, algorithm, task.x, task.y, key)
    state = second.step(algorithm, state, jax.random.fold_in(key, 2)).state
    np.testing.assert_array_equal(state.x, whole.x)


def test_a_message_of_another_shape_is_refused():
    rule, answer = configured("top-k(one_in=3)"), Shape.of(jnp.zeros(12))
    known = {"f": frozenset([type("S", (), {"result": answer})()])}
    message, _ = rule.encode(jax.random.key(0), jnp.ones(12), jnp.zeros(12))
    check_message(known, "f", message, rule)
    with pytest.raises(InputError, match="f was encoded as"):
        check_message(known, "f", [message[0][:1]], rule)


def test_compressed_runs_reach_the_solution_with_far_fewer_bytes():
    task = Quadratic(clients=5, x_dimension=40, y_dimension=40).build()

    def end(rule):
        solution = fb.solve(task, algorithm=fb.SimFBO(), rounds=200, every=200, aggregation=rule)
        last = solution.history[-1]
        return last["x_error"], (last["bytes_up"], last["bytes_down"])

    (exact, much), (near, little) = end("mean"), end("quantized(bits=4, down=8)")
    assert abs(near - exact) < 0.05 * exact
    assert little[0] < 0.2 * much[0] and little[1] < 0.3 * much[1]  # of a block's numbers half a byte or one each, and a scale


def test_what_the_server_leaves_out_is_sent_later():
    rule, rng = configured("quantized(down=4)"), np.random.default_rng(0)
    z, left, received = rng.normal(size=(3, 7)), [jnp.zeros((3, 7))], []
    for _ in range(50):
        made = sent_down(rule, [jnp.asarray(z)], left)
        received, left = [*received, made.received[0]], made.left
        np.testing.assert_allclose(np.sum(received, 0) + left[0], len(received) * z, atol=1e-9)
    assert np.abs(np.mean(received, 0) - z).max() < 0.1 * np.abs(received[0] - z).max()
    assert rule.shrinks(jnp.zeros(9)) and not rule.shrinks(jnp.zeros(8)) and not rule.shrinks(jnp.zeros(9, jnp.int32))
    assert not configured("quantized").shrinks(jnp.zeros(9))


def test_a_block_to_which_every_array_is_padded_is_bounded():
    assert configured("quantized(block=65535)").block == 65535
    with pytest.raises(InputError, match="block must be a whole number of at least 2"):
        configured("quantized(block=65536)")
