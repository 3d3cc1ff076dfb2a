"""FedPace-Own: the x of FedPace in parts that stay at their clients, in both engines and in every message."""

from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import MemoryStore, deployed, trajectory

import fedbilevel as fb
from fedbilevel.algorithms import fedpace
from fedbilevel.algorithms.fedpace_own import Own
from fedbilevel.core.participation import Dropouts, Everyone, Uniform
from fedbilevel.core.sets import EVERYWHERE, Box
from fedbilevel.engines import wire
from fedbilevel.engines.messages import EXPRESSIONS, Call, Encode, Evaluate, Kept, Part, Request, Save, Saved, Store
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.runs.derivative_counts import Tally
from fedbilevel.runs.simulation import simulation

SIZES, WIDTH = (7, 4, 5), 3
LONGEST, CLIENTS = max(SIZES), len(SIZES)
LOOK, NAMED = 10**6, wire.named_tuples(fb.FedPaceOwn)  # a step under which nothing else is saved, and the types of values
OWN, WHOLE = fb.FedPaceOwn(minibatches=2), fb.FedPace(minibatches=2)


def cleaning(own, within=EVERYWHERE, weights=None, bent=0.0, batch_size=None, width=WIDTH):
    """Weighted regressions; x is the clients' own parts, or these in one vector. With `bent` y's problem is not convex."""

    def losses(y, rows):
        return jnp.log1p((rows["inputs"] @ y - rows["target"]) ** 2) if bent else (rows["inputs"] @ y - rows["target"]) ** 2

    def f(x, y, rows):
        part = jax.lax.dynamic_slice(x, rows["place"][:1] // LONGEST * LONGEST, (LONGEST,))
        return losses(y, rows).mean() + 1e-3 * jnp.sum(part**2)

    def g(x, y, rows):
        weight = jax.nn.sigmoid(x[rows["place"]])
        return (weight * losses(y, rows)).mean() + 0.05 * jnp.sum(y**2) + bent * jnp.sum(jnp.cos(y))

    rng = np.random.default_rng(0)

    def rows(m, n):
        inputs = rng.standard_normal((n, width))
        place = np.arange(n, dtype=np.int32) + (0 if own else m * LONGEST)
        return {"inputs": inputs, "target": inputs @ np.ones(width) + rng.standard_normal(n) * (1 + m), "place": place}

    lower, upper = ([rows(m, n) for m, n in enumerate(SIZES)] for _ in range(2))
    start = jnp.zeros(LONGEST if own else LONGEST * CLIENTS), jnp.full(width, 0.3)
    return fb.Task.of(f, g, *start, lower=lower, upper=upper, x_set=within, weights=weights, own_x=own, batch_size=batch_size)


def end(algorithm, task, steps=60, participation=None):
    engine = SimulatedEngine(task.population, participation or Everyone())
    found = trajectory(algorithm, engine, task.x, task.y, steps)
    return jax.tree.map(lambda v: v[-1], found)


@pytest.mark.parametrize("case", [{"weights": [3, 1, 2], "batch_size": 4}, {"bent": 0.8, "within": Box(-0.01, 0.01)}], ids=str)
def test_parts_at_clients_move_as_one_vector_at_the_server(case):
    whole, own = end(WHOLE, cleaning(False, **case)), end(OWN, cleaning(True, **case))
    assert np.ptp(whole.z.x) > 5e-3 and (whole.delta > 0) == ("bent" in case)
    parts = np.concatenate(np.asarray(own.x.rows))
    np.testing.assert_allclose(own.y, whole.y, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(own.server.z.u, whole.z.u, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(own.server.pace.p, whole.pace.p, rtol=1e-12)
    np.testing.assert_allclose(parts, whole.x, rtol=1e-7, atol=1e-10)


def run(engine, task, steps):
    """The states of some steps, and the traffic of each."""
    key, step = jax.random.key(4), jax.jit(engine.step) if isinstance(engine, SimulatedEngine) else engine.step
    first = engine.init(OWN, task.x, task.y, jax.random.fold_in(key, 0))
    states, traffic = [first.state], [first.traffic]
    for t in range(1, steps + 1):
        made = step(OWN, states[-1], jax.random.fold_in(key, t))
        states.append(made.state)
        traffic.append(made.traffic)
    return states, traffic


def parts(engine, stores, state):
    """What every client keeps, from what it puts on its own disk."""
    for m in range(CLIENTS):
        engine.exchange.ask({m: (Save(LOOK, [state.own.at(m).expression([])], LOOK), [])}, reply=False, types={})
    return [wire.decode(store.saved[LOOK], NAMED)[0] for store in stores]


@pytest.mark.slow
@pytest.mark.parametrize("participation", [Uniform(2), Dropouts(Everyone(), 0.4)], ids=str)
def test_both_engines_agree_and_whoever_is_absent_keeps_its_x(participation):
    task, steps = cleaning(True, weights=[3, 1, 2], batch_size=4), 8
    stores = [MemoryStore() for _ in SIZES]
    engine, _ = deployed(OWN, task.population, participation, (task.x, task.y), stores)
    simulated, counted = run(SimulatedEngine(task.population, participation), task, steps)
    key, before = jax.random.key(4), engine.init(OWN, task.x, task.y, jax.random.fold_in(jax.random.key(4), 0)).state
    for t in range(1, steps + 1):
        old = parts(engine, stores, before)
        state, traffic, _ = engine.step(OWN, before, jax.random.fold_in(key, t))
        theirs = simulated[t]
        np.testing.assert_allclose(state.y, theirs.y, rtol=1e-12)
        for m, own in enumerate(parts(engine, stores, state)):
            took_part = own.t > old[m].t
            assert took_part or all(np.array_equal(a, b) for a, b in zip(own, old[m], strict=True))
            simulated_own = jax.tree.map(lambda r: r[m], theirs.own.rows)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-14), own, simulated_own)
        before = state
        assert traffic == traffic._replace(**{n: int(v[1]) for n, v in counted[t]._asdict().items() if n != "rounds"})
    absent = {int(own.t) for own in parts(engine, stores, before)} - {steps}
    assert absent
    ours, theirs = engine.evaluate(task, before), task.evaluate(simulated[-1].x.rows, simulated[-1].y)
    assert {name: pytest.approx(float(value), rel=1e-9) for name, value in theirs.items()} == {
        name: value for name, value in ours.items() if name != "absences"
    }


class Watched:
    """A transport that keeps all messages."""

    def __init__(self, transport):
        self.transport, self.messages = transport, []

    def ask(self, requests):
        replies, failures = self.transport.ask(requests)
        self.messages += [*requests.values(), *replies.values()]
        return replies, failures


def test_nothing_of_x_is_in_any_message():
    """Not at the start, in steps, evaluations or checkpoints, nor when the clients' processes start anew."""
    task, stores, seen = cleaning(True), [MemoryStore() for _ in SIZES], set()
    engine, _ = deployed(OWN, task.population, Everyone(), (task.x, task.y), stores)
    watched = engine.exchange.transport = Watched(engine.exchange.transport)
    states, traffic = run(engine, task, 30)
    engine.evaluate(task, states[-1])
    saved = engine.save(states[-1], 30)
    engine, _ = deployed(OWN, task.population, Everyone(), (task.x, task.y), stores)
    engine.exchange.transport, watched.transport = watched, engine.exchange.transport
    state = engine.restore(saved, OWN, task.x, task.y, jax.random.key(0))
    engine.evaluate(task, state)
    state = engine.step(OWN, state, jax.random.key(1)).state
    named = EXPRESSIONS | NAMED
    for message in watched.messages:
        for leaf in jax.tree.leaves(wire.decode(message, named)):
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
                assert leaf.shape in ((), (WIDTH,), (len(task.metric_names()),))
                seen.update(leaf.ravel().tolist())
    own = {v for kept in parts(engine, stores, state) for part in kept[:4] for v in np.ravel(part).tolist()} - {0.0}
    assert len(own) > 4 * sum(SIZES) - 20 and not own & seen
    scalars = 2 * CLIENTS  # δ and whether there are secants
    for made in traffic[1:]:
        assert made.down == CLIENTS * (2 * WIDTH + 2) + scalars  # y, u; then x's step and whether f was never less
        assert made.up == CLIENTS * (2 * WIDTH + 6 + 3 * WIDTH + 1 + 3)  # D_y, D_u, what is measured, f, the heading


@pytest.mark.slow
def test_a_restarted_site_continues_with_its_x():
    task, stores = cleaning(True, batch_size=4), [MemoryStore() for _ in SIZES]
    engine, _ = deployed(OWN, task.population, Uniform(2), (task.x, task.y), stores)
    states, _ = run(engine, task, 6)
    saved = engine.save(states[4], 4)
    wanted = parts(engine, stores, states[-1])
    engine, _ = deployed(OWN, task.population, Uniform(2), (task.x, task.y), stores)
    state = engine.restore(saved, OWN, task.x, task.y, jax.random.fold_in(jax.random.key(4), 0))
    for t in (5, 6):
        state = engine.step(OWN, state, jax.random.fold_in(jax.random.key(4), t)).state
    jax.tree.map(np.testing.assert_array_equal, parts(engine, stores, state), wanted)


def test_a_server_can_neither_ask_for_x_nor_choose_it():
    task = cleaning(True)
    engine, runtimes = deployed(OWN, task.population, Everyone(), (task.x, task.y))
    engine.init(OWN, task.x, task.y, jax.random.key(0))
    key, x = np.asarray(jax.random.key_data(jax.random.key(0))), np.zeros(LONGEST)
    begun = Call("begin", key, (), 99)
    asked = Call("own_answer", key, (begun, np.zeros(WIDTH), np.zeros(WIDTH), np.float64(0), np.bool_(False)), None)
    for expression in (begun, asked, Encode(asked, [], None, key, 98)):
        with pytest.raises(InputError, match="what this client keeps to itself does not leave it"):
            runtimes[0].answer(wire.encode(Request(expression, True, [])))
    forged = Own(x, x, x, x, np.int32(0))
    for expression in (Store(forged, 97), Call("move", key, (forged, np.float64(0), np.bool_(False)), 96)):
        with pytest.raises(InputError, match="a message is damaged"):
            runtimes[0].answer(wire.encode(Request(expression, False, [])))
    chosen = x + 80.0
    for given in (chosen, Store(chosen, 95), Part(Store((chosen,), 94), (0,)), Part(Kept(94), (0,)), Part(Kept(94), ()), begun):
        with pytest.raises(InputError, match="metrics are computed at this client's own x alone: refused"):
            runtimes[0].answer(wire.encode(Request(Evaluate(given, np.zeros(WIDTH)), True, [94])))
    assert runtimes[0].answer(wire.encode(Request(Evaluate(Part(begun, (0,)), np.zeros(WIDTH)), True, [])))


KEY = np.zeros(2, np.uint32)


@pytest.fixture(scope="module")
def attacked():
    """A site that has taken part in a run where y is as long as x, what it keeps as the server names it, and y and u."""
    task, stores = cleaning(True, width=LONGEST), [MemoryStore() for _ in SIZES]
    engine, runtimes = deployed(OWN, task.population, Everyone(), (task.x, task.y), stores)
    states, _ = run(engine, task, 3)
    slot = states[-1].own.at(0).held.slot

    def ask(expression, reply=True):
        runtimes[0].answer(wire.encode(Request(Save(LOOK, [Kept(slot)], LOOK), False, [slot])))
        return wire.decode(runtimes[0].answer(wire.encode(Request(expression, reply, [slot]))), NAMED)

    yield ask, Kept(slot), np.asarray(states[-1].y)


def answered(own, y, u):
    """What a site would keep and send."""
    return Call("own_answer", KEY, (own, y, u, np.float64(0), np.bool_(False)), None)


@pytest.mark.parametrize("place", [0, 1, 2, 3, -1])
@pytest.mark.parametrize("saved", [False, True])
def test_no_part_of_what_a_site_keeps_to_itself_takes_the_place_of_what_the_server_sends(attacked, place, saved):
    """A y as long as x can be asked for: with u = x_m the site would answer with a linear map of x_m."""
    ask, kept, y = attacked
    own = Saved(LOOK, 0, 98) if saved else kept
    made = answered(own, y, y)
    for part in (Part(own, (place,)), Part(made, (0, place)), Part(Part(made, (0,)), (place,)), Part(made, (-2, place))):
        tried = [Call("look", KEY, (part,), None), Evaluate(Part(own, (0,)), part)]
        for asked in (answered(own, part, y), answered(own, y, part), answered(Part(made, (0,)), y, part)):
            share = Call("share", KEY, (asked,), None)
            tried += [share, Encode(share, [], None, KEY, 97), Encode(share, [], Part(asked, (1,)), KEY, 97)]
        tried.append(Encode(Call("look", KEY, ([part],), None), [0], part, KEY, 97))
        for expression in tried:
            with pytest.raises(InputError, match="refused"):
                ask(expression)
        for expression in (part, [part], Save(1, [part], -1), Call("move", KEY, (own, part, np.bool_(False)), 96)):
            with pytest.raises(InputError, match="refused"):
                ask(expression, reply=False)
    assert np.isfinite(ask(Call("share", KEY, (answered(own, y, y),), None)).u).all()


@pytest.mark.parametrize("place", [1, 2, 3, 4, -5, 5])
def test_metrics_are_at_x_and_at_nothing_else_that_is_as_long(attacked, place):
    ask, kept, y = attacked
    assert np.isfinite(ask(Evaluate(Part(kept, (0,)), y))).all()
    with pytest.raises(InputError, match="metrics are computed at this client's own x alone: refused"):
        ask(Evaluate(Part(kept, (place,)), y))


def test_a_value_that_a_site_has_takes_no_place_that_is_the_servers(attacked):
    """Even if it is not private: what is computed with it could tell what it is."""
    ask, kept, y = attacked
    sent = Part(answered(kept, y, y), (1, 0))
    for expression in (Call("look", KEY, (sent,), None), Call("share", KEY, (answered(kept, sent, y),), None)):
        with pytest.raises(InputError, match="is asked with values kept here where this algorithm sends them, or sent"):
            ask(expression)


def test_what_is_private_stays_so_on_the_disk_whatever_else_has_its_name(monkeypatch):
    monkeypatch.setattr(fedpace, "Own", namedtuple("Own", Own._fields), raising=False)
    task, stores = cleaning(True), [MemoryStore() for _ in SIZES]
    _, runtimes = deployed(OWN, task.population, Everyone(), (task.x, task.y), stores)
    for expression in (Save(1, [Call("begin", KEY, (), None)], -1), Saved(1, 0, 9)):
        runtimes[0].answer(wire.encode(Request(expression, False, [9])))
    assert runtimes[0].answer(wire.encode(Request(Evaluate(Part(Kept(9), (0,)), np.zeros(WIDTH)), True, [9])))


def test_the_work_at_clients_is_that_of_fedpace():
    ours, theirs = (Tally(simulation(cleaning(own), a, steps=3)).at([0, 1]) for own, a in ((True, OWN), (False, WHOLE)))
    assert ours == theirs and ours[1].gradients > 0


def test_the_kind_of_x_chooses_the_algorithm():
    own, whole = cleaning(True), cleaning(False)
    assert (own.default_algorithm, whole.default_algorithm) == ("fedpace-own", "fedpace")
    solution = fb.solve(own, rounds=30)
    assert solution.x.shape == (CLIENTS, LONGEST) and solution.history[-1]["upper_loss"] < solution.history[0]["upper_loss"]
    with pytest.raises(InputError, match="FedPace is for an x that all clients share, but the task has an x per client"):
        fb.solve(own, rounds=3, algorithm="fedpace")
    with pytest.raises(InputError, match=r"FedPaceOwn is for an x per client.*choose fedpace$"):
        fb.solve(whole, rounds=3, algorithm="fedpace-own")
    with pytest.raises(InputError, match="own_x is for a y that all clients share"):
        fb.Task.of(abs, abs, np.zeros(1), np.zeros(1), lower=[np.zeros(1)], own_x=True, lower_level="local")
