"""Secure sums in a federation: the simulation's numbers, in two exchanges, from clients that are all asked the same."""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import AVERAGED, deployed
from hypothesis import given, settings
from hypothesis import strategies as st
from signing import Keys, Signer

import fedbilevel as fb
from fedbilevel.aggregations import configured, text_of
from fedbilevel.aggregations.secure import TOO_LARGE
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.participation import Dropouts, Everyone, Uniform
from fedbilevel.engines import wire
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.exchange import Exchange
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.engines.messages import EXPRESSIONS, Advertise, Call, Evaluate, Masked, Request, ShareKeys, Store, Unmask
from fedbilevel.engines.secure_exchange import SecureClient, SecureExchange
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import Diverged, InputError, NotFinite
from fedbilevel.tasks.quadratic import Quadratic

RULE = "secure-sum(at_least=2, bound=50)"


def federation(algorithm, task, participation, rule=RULE, keys=None):
    """Both engines with secure sums."""
    keys, rule = keys or Keys(task.population.size), configured(rule)
    signers = [Signer(keys, m) for m in range(task.population.size)]
    ours = SimulatedEngine(task.population, participation, aggregation=rule)
    theirs, runtimes = deployed(algorithm, task.population, participation, (task.x, task.y), None, rule, signers)
    return ours, theirs, runtimes


@pytest.mark.parametrize(
    ("name", "weights"),
    [("fedbio", "1,2,3,4"), *(pytest.param(name, "equal", marks=pytest.mark.slow) for name in AVERAGED)],
)
def test_simulation_and_federation_add_up_the_same_numbers(name, weights):
    algorithm, key = ALGORITHMS[name].configure(name, {}), jax.random.key(5)
    task = Quadratic(clients=4, noise=0.3, lower_level=type(algorithm).lower_level).build()
    task = dataclasses.replace(task, population=task.population.weighted(weights))
    rule = configured("secure-sum(at_least=2, bound=200)" if name == "fedpace-local" else RULE)
    ours, theirs, _ = federation(algorithm, task, Uniform(3), text_of(rule))
    plain, _ = deployed(algorithm, task.population, Uniform(3))
    a, b, c = (
        e.step(algorithm, e.init(algorithm, task.x, task.y, key).state, jax.random.fold_in(key, 1))
        for e in (ours, theirs, plain)
    )
    np.testing.assert_allclose(a.state.x, b.state.x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(a.state.x, c.state.x, atol=3 * rule.step)
    assert all(np.isnan(step.reported.get("drift", np.nan)) for step in (a, b))
    assert tuple(np.asarray(getattr(a.traffic, n))[1] for n in ("bytes_up", "bytes_down")) == b.traffic[3:]
    metrics = theirs.evaluate(task, b.state), SimulatedEngine.evaluate(ours, task, a.state)
    np.testing.assert_allclose(metrics[0]["upper_loss"], metrics[1]["upper_loss"], atol=1e-5)


def without(absent):
    """Everyone but one client."""

    class Without(Dropouts):
        def draw(self, key, population):
            return jnp.arange(population), jnp.arange(population) != absent

    return Without(Everyone(), 0.5)


def test_a_client_that_fails_in_the_middle_is_one_that_dropped_out(monkeypatch):
    algorithm, key = fb.FedAvg(), jax.random.key(5)
    task = Quadratic(clients=4).build()
    _, theirs, _ = federation(algorithm, task, Everyone())
    state = theirs.init(algorithm, task.x, task.y, key).state
    asked, number = theirs.exchange.transport.ask, itertools.count()

    def ask(requests):
        replies, failures = asked(requests)
        if next(number) == 2 and 1 in replies:  # its masked numbers are lost
            del replies[1]
            failures[1] = Failure(Kind.LATE, "late")
        return replies, failures

    monkeypatch.setattr(theirs.exchange.transport, "ask", ask)
    after = theirs.step(algorithm, state, jax.random.fold_in(key, 1)).state
    ours = SimulatedEngine(task.population, without(1), aggregation=configured(RULE))
    state = ours.init(algorithm, task.x, task.y, key).state
    np.testing.assert_allclose(ours.step(algorithm, state, jax.random.fold_in(key, 1)).state.y, after.y, rtol=1e-12)


def not_finite(reply):
    raise NotFinite("this one diverged")


@pytest.mark.parametrize(
    ("stage", "lie", "counts"),
    [
        (Advertise, lambda advert: [[300]] * 4, False),
        (Advertise, lambda advert: advert[::-1], False),
        (Advertise, lambda advert: np.asarray([np.nan]), False),
        (ShareKeys, lambda shares: [shares[0], shares[1][:1]], False),
        (ShareKeys, lambda shares: None, False),
        (Masked, not_finite, False),
        (Masked, lambda sent: sent[0], False),
        (Masked, lambda sent: (sent[0][1:], sent[1]), False),
        (Masked, lambda sent: (sent[0], sent[1][::-1]), False),
        (Unmask, not_finite, True),
        (Unmask, lambda sent: [(clients, texts[:, ::-1]) for clients, texts in sent], True),
        (Unmask, lambda sent: sent[:2], True),
    ],
)
def test_one_client_that_lies_does_not_end_the_sum(stage, lie, counts):
    algorithm, key, task = fb.FedAvg(), jax.random.key(5), Quadratic(clients=4).build()
    ours, theirs, runtimes = federation(algorithm, task, Everyone() if counts else without(0))
    theirs.participation = Everyone()
    honest = runtimes[0].answer

    def answer(data):
        told = isinstance(wire.decode(data, EXPRESSIONS).expression, stage)
        return wire.encode(lie(wire.decode(honest(data)))) if told else honest(data)

    runtimes[0].answer = answer
    a, b = (e.step(algorithm, e.init(algorithm, task.x, task.y, key).state, jax.random.fold_in(key, 1)) for e in (ours, theirs))
    np.testing.assert_allclose(a.state.y, b.state.y, rtol=1e-12)
    assert theirs.exchange.absences == (0 if counts and lie is not not_finite else 1)


def test_too_large_numbers_and_too_few_clients_are_errors_and_never_wrong_sums():
    algorithm, task = fb.FedAvg(), Quadratic(clients=4).build()
    ours, theirs, runtimes = federation(algorithm, task, Everyone(), "secure-sum(bound=0.001)")
    key = jax.random.key(0)
    with pytest.raises(NotFinite, match="too large for secure sums: raise bound"):
        theirs.step(algorithm, theirs.init(algorithm, task.x, task.y, key).state, key)
    assert np.isnan(ours.step(algorithm, ours.init(algorithm, task.x, task.y, key).state, key).state.y).all()
    _, theirs, runtimes = federation(algorithm, task, Everyone(), "secure-sum(at_least=3)")
    for m in (0, 1):
        del runtimes[m]
    with pytest.raises(RuntimeError, match="a secure sum needs 3 clients, and 2 answered"):
        theirs.step(algorithm, theirs.init(algorithm, task.x, task.y, key).state, key)


def test_only_the_sum_tells_that_a_number_is_too_large(monkeypatch):
    """Every client answers every request; the one beyond the bound cannot be told from the others."""
    algorithm, task, key = fb.FedAvg(), Quadratic(clients=4).build(), jax.random.key(0)
    task = dataclasses.replace(task, population=task.population.weighted("1,1,1000000,1"))
    _, theirs, _ = federation(algorithm, task, Everyone(), "secure-sum(bound=0.001)")
    state = theirs.init(algorithm, task.x, task.y, key).state
    asked, failed = theirs.exchange.transport.ask, []

    def ask(requests):
        replies, failures = asked(requests)
        failed.append((len(replies), failures))
        return replies, failures

    monkeypatch.setattr(theirs.exchange.transport, "ask", ask)
    with pytest.raises(NotFinite, match="too large for secure sums: raise bound"):
        theirs.step(algorithm, state, key)
    assert failed == [(4, {})] * 4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_numbers_at_the_bound_are_exact_or_too_large_and_add_up_in_32_bits(dtype):
    rule = configured("secure-sum(cohort=16)")
    change = jnp.asarray([-1, 1 - 2**-20, 1, 1 + 2**-20, jnp.inf, jnp.nan, 0.3], dtype) * rule.bound
    message = np.asarray(rule.encode(None, change, jnp.zeros_like(change))[0], np.int64)
    too_large = message == TOO_LARGE
    assert too_large[3:6].all() and not too_large[[1, 6]].any()
    assert (np.abs(message[~too_large]) * rule.cohort < 2**31).all()
    np.testing.assert_allclose(message[[1, 6]] * rule.step, np.asarray(change, float)[[1, 6]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_what_was_left_out_before_counts_for_no_more_than_rounding_leaves_out(dtype):
    """So a server that names a false one does not move a number towards the bound."""
    rule, draw = configured("secure-sum"), np.random.default_rng(0)
    change = jnp.asarray(draw.uniform(-999, 999, 1000), dtype)
    message, left = rule.encode(None, change, jnp.zeros_like(change))
    again, _ = rule.encode(None, change, left)
    expected = jnp.round((change + left) / rule.step).astype(jnp.int32)
    np.testing.assert_array_equal(again, expected)  # honest memory is used as it is
    false, _ = rule.encode(None, change, jnp.full_like(change, 500))
    assert np.abs((false - message) * rule.step).max() < (1e-4 if dtype == jnp.float64 else 1e-2)


def read(request):
    return wire.decode(request, EXPRESSIONS).expression


def edited(request, change):
    """A request with another expression."""
    whole = wire.decode(request, EXPRESSIONS)
    return wire.encode(whole._replace(expression=change(whole.expression)))


@pytest.mark.parametrize("lie", range(5))
def test_clients_refuse_to_unmask_a_sum_for_which_they_are_not_all_asked_the_same(monkeypatch, lie):
    """A server that asks client 0 at another point than the others would read its answer out of the sum."""
    algorithm, task, key = fb.FedAvg(), Quadratic(clients=4).build(), jax.random.key(0)
    _, theirs, _ = federation(algorithm, task, Everyone())
    state = theirs.init(algorithm, task.x, task.y, key).state
    asked, refused = theirs.exchange.transport.ask, {}

    def lying(masked):
        """Another start of y, a held one that may be anything, another point, another key."""
        (encode, call), other = (masked.expression, masked.expression.call), np.asarray(task.y) + 1
        return masked._replace(expression=[
            encode._replace(call=call._replace(args=(call.args[0], other))),
            encode._replace(call=call._replace(args=(call.args[0], Store(other, 77)))),
            encode._replace(call=call._replace(args=(call.args[0], [Store(other, 77)]))),
            encode._replace(around=[other]),
            encode._replace(call=call._replace(key=call.key + np.uint32(1))),
        ][lie])  # fmt: skip

    def ask(requests):
        if isinstance(read(requests[1]), Masked):
            return asked({**requests, 0: edited(requests[0], lying)})
        if isinstance(read(requests[1]), Unmask) and 0 in requests:  # an honest server would leave client 0 out
            replies, failures = asked({m: edited(r, with_client_0) for m, r in requests.items() if m != 0})
            refused.update(failures)
            return replies, failures
        return asked(requests)

    def with_client_0(unmask):
        return unmask._replace(arrived=[0, *unmask.arrived])

    monkeypatch.setattr(theirs.exchange.transport, "ask", ask)
    if lie in (1, 2):  # client 0 does not even compute that
        theirs.step(algorithm, state, key)
        assert theirs.exchange.absences == 1 and not refused
    else:
        with pytest.raises(RuntimeError, match="0 clients helped to unmask"):
            theirs.step(algorithm, state, key)
        assert refused.keys() == {1, 2, 3}
        assert all("client 0 has not signed that it is in the same secure sum" in str(why) for why in refused.values())


def watched(monkeypatch, engine):
    """The requests of an engine from now on: for each exchange, the kinds of all its requests and to how many clients."""
    asked, seen = engine.exchange.transport.ask, []

    def ask(requests):
        seen.append({m: type(read(r)) for m, r in requests.items()})
        return asked(requests)

    monkeypatch.setattr(engine.exchange.transport, "ask", ask)
    return seen


def test_a_sum_takes_two_exchanges_once_there_are_keys_whoever_is_in_it(monkeypatch):
    algorithm, task, key = fb.FedAvg(), Quadratic(clients=4).build(), jax.random.key(0)
    _, theirs, _ = federation(algorithm, task, Uniform(2))
    state = theirs.init(algorithm, task.x, task.y, key).state
    seen, cohorts = watched(monkeypatch, theirs), set()
    for t in range(6):
        state = theirs.step(algorithm, state, jax.random.fold_in(key, t)).state
        *_, masking, unmasking = seen
        members = {m for m, kind in masking.items() if kind is Masked}
        cohorts.add(tuple(members))
        assert len(members) == 2 and members == {m for m, kind in unmasking.items() if kind is Unmask}
    theirs.evaluate(task, state)
    assert len(cohorts) > 2 and len(seen) == 4 + 5 * 2 + 2
    assert theirs.exchange.absences == 0


def test_a_client_that_is_back_is_in_the_next_sum_and_one_that_stays_away_costs_the_others_nothing(monkeypatch):
    algorithm, task, key = fb.FedAvg(), Quadratic(clients=4).build(), jax.random.key(0)
    _, theirs, runtimes = federation(algorithm, task, Everyone())
    state = theirs.init(algorithm, task.x, task.y, key).state
    theirs.step(algorithm, state, key)
    seen, away = watched(monkeypatch, theirs), runtimes.pop(2)

    def asked():
        seen.clear()
        theirs.exchange.absences = 0
        theirs.step(algorithm, state, key)
        return [len(requests) for requests in seen], theirs.exchange.absences

    assert asked() == ([4, 3], 1)  # it has keys, and drops out
    assert asked() == ([1, 3, 3], 1)  # it is asked for keys first, alone
    runtimes[2] = away
    assert asked() == ([1, 3, 4, 4, 4], 0)
    assert asked() == ([4, 4], 0)


def test_a_server_that_begins_again_in_the_middle_of_a_sum_has_the_same_result_with_other_keys(monkeypatch):
    """Two messages that one key hides would show their difference."""
    algorithm, task, key, keys = fb.FedAvg(), Quadratic(clients=4).build(), jax.random.key(0), Keys(4)
    ours, theirs, _ = federation(algorithm, task, Everyone(), keys=keys)
    transport, adverts, masked, stop = theirs.exchange.transport, [], [], [True]
    asked = transport.ask

    def ask(requests):
        if isinstance(read(requests[0]), Unmask) and stop:
            raise KeyboardInterrupt
        replies, failures = asked(requests)
        for m, reply in replies.items():
            match read(requests[m]), wire.decode(reply):
                case Masked(), (numbers, advert):
                    masked.append(numbers)
                    adverts.append(advert)
                case Advertise(), advert:
                    adverts.append(advert)
        return replies, failures

    monkeypatch.setattr(transport, "ask", ask)
    state = theirs.init(algorithm, task.x, task.y, key).state
    with pytest.raises(KeyboardInterrupt):
        theirs.step(algorithm, state, key)
    stop.clear()
    again = DeployedEngine(transport, task.population, Everyone(), None, None, configured(RULE), signatures=Signer(keys, 0))
    a = again.step(algorithm, again.init(algorithm, task.x, task.y, key).state, key)
    b = ours.step(algorithm, ours.init(algorithm, task.x, task.y, key).state, key)
    np.testing.assert_allclose(a.state.y, b.state.y, rtol=1e-12)
    shown = {bytes(advert[start : start + 32]) for advert in adverts for start in (0, 32, 64)}
    assert len(masked) == 8 and len(adverts) == 16 and len(shown) == 3 * 16
    for one, other in itertools.combinations(masked, 2):
        assert (one != other).all()


def test_requests_that_the_server_repeats_are_refused(monkeypatch):
    """All but that for fresh keys: at once, and those of one sum after the next."""
    algorithm, task, key = fb.FedAvg(), Quadratic(clients=3).build(), jax.random.key(0)
    _, theirs, runtimes = federation(algorithm, task, Everyone())
    state = theirs.init(algorithm, task.x, task.y, key).state
    asked, sent = theirs.exchange.transport.ask, []

    def ask(requests):
        replies, failures = asked(requests)
        for m, request in requests.items():
            if not isinstance(read(request), Advertise):
                sent.append((m, request))
                with pytest.raises(InputError, match="out of order, or one is repeated"):
                    runtimes[m].answer(request)
        return replies, failures

    monkeypatch.setattr(theirs.exchange.transport, "ask", ask)
    for _ in range(2):
        theirs.evaluate(task, state)
    kinds = ShareKeys, Masked, Unmask, Masked, Unmask
    assert [type(read(request)) for _, request in sent] == [kind for kind in kinds for _ in range(3)]
    for m, request in sent[:9]:
        with pytest.raises(InputError, match="refused"):
            runtimes[m].answer(request)


class Unreliable:
    """A transport that loses requests and replies, to clients that are restarted now and then."""

    def __init__(self, clients, least, rng):
        self.rng, self.faults, self.rule = rng, 0.1, configured(f"secure-sum(at_least={least})")
        self.keys, self.exchanges, self.adverts = Keys(clients), 0, []
        self.values = rng.integers(-1000, 1000, (clients, 5)).astype(np.int32)
        self.clients = {m: self.started(m) for m in range(clients)}

    def started(self, m):
        return SecureClient(m, self.rule, Signer(self.keys, m))

    def server(self):
        return SecureExchange(Exchange(self, len(self.clients), 2), self.rule, Signer(self.keys, 0), len(self.clients))

    def happens(self):
        return self.rng.random() < self.faults

    def ask(self, requests):
        self.exchanges += 1
        replies, failures = {}, {}
        for m, request in requests.items():
            if self.happens():
                self.clients[m] = self.started(m)
            try:
                assert not self.happens(), "the request was lost"
                reply = self.clients[m].answer(read(request), [self.values[m]])
                self.adverts += {Advertise: [reply], Masked: reply[1:]}.get(type(read(request)), [])
                assert not self.happens(), "the reply was lost"
                replies[m] = wire.encode(reply)
            except (InputError, AssertionError) as error:
                failures[m] = Failure.of(error)
        return replies, failures


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), clients=st.integers(3, 6), data=st.data())
def test_whatever_is_lost_or_restarted_a_sum_is_exact_or_fails_and_no_keys_are_used_again(seed, clients, data):
    least, rng = data.draw(st.integers(2, clients - 1)), np.random.default_rng(seed)
    network = Unreliable(clients, least, rng)
    server = network.server()

    def summed(server):
        cohort = sorted(rng.choice(clients, rng.integers(least, clients + 1), replace=False).tolist())
        asked = Evaluate(rng.random(3), None)
        total, members, failures = server.total({m: (asked, []) for m in cohort}, 5)
        np.testing.assert_array_equal(total, network.values[members].sum(0))
        assert least <= len(members) and set(members) <= set(cohort)
        assert set(cohort) - set(members) <= failures.keys() <= set(cohort)  # whoever is missing is missing for a reason
        return members == cohort and not failures

    for _ in range(6):
        server = network.server() if network.happens() else server
        with contextlib.suppress(RuntimeError):
            summed(server)
    network.faults = 0
    for _ in range(2):
        assert summed(server)
    before = network.exchanges
    assert summed(server) and network.exchanges == before + 2
    shown = {bytes(advert[start : start + 32]) for advert in network.adverts for start in (0, 32, 64)}
    assert len(shown) == 3 * len(network.adverts)


def test_a_server_cannot_ask_all_clients_for_values_of_its_own_choice(monkeypatch):
    """Asked with `Store` for an argument that the algorithm sends, clients could be given one each, and have signed none."""
    algorithm, task, key = fb.FedAvg(), Quadratic(clients=3).build(), jax.random.key(0)
    _, theirs, _ = federation(algorithm, task, Everyone())
    state = theirs.init(algorithm, task.x, task.y, key).state
    total = SecureExchange.total

    def stored(self, wanted, size):
        def told(m, encode):
            x, y = encode.call.args
            return encode._replace(call=encode.call._replace(args=(x, Store(np.asarray(y) + m, 77))), around=[np.asarray(y)])

        return total(self, {m: (told(m, e), computed) for m, (e, computed) in wanted.items()}, size)

    monkeypatch.setattr(SecureExchange, "total", stored)
    with pytest.raises(RuntimeError, match="local_y is asked with values kept here where this algorithm sends them"):
        theirs.step(algorithm, state, key)


def test_a_simulation_says_what_was_too_large_and_what_to_set():
    task = Quadratic(clients=4).build()
    with pytest.raises(
        Diverged, match=r"client \d answered local_y with a change of .*, and secure sums hold entries up to bound = 0.01"
    ):
        fb.solve(task, algorithm="fedavg", rounds=20, aggregation="secure-sum(bound=0.01)")
    solved = fb.solve(task, algorithm="fedavg", rounds=20, aggregation="secure-sum(bound=10)")
    assert np.isfinite(solved.y).all()


def test_nothing_leaves_a_client_but_in_sums():
    task, algorithm = Quadratic(clients=3).build(), fb.FedAvg()
    _, _, runtimes = federation(algorithm, task, Everyone())
    call = Call("local_y", np.asarray(jax.random.key_data(jax.random.key(0))), (task.x, task.y), None)
    for expression in (call, Evaluate(task.x, task.y)):
        with pytest.raises(InputError, match="leaves it in secure sums alone"):
            runtimes[0].answer(wire.encode(Request(expression, True, [])))


def test_what_secure_sums_cannot_do_is_refused_before_a_run():
    task = Quadratic(clients=4).build()
    for algorithm, rule, line in (
        (fb.FedMBO(), RULE, "FedMBO needs single answers, which SecureSum hides"),
        (fb.FedAvg(), "secure-sum(at_least=5)", "at_least must be at most the 4 clients of a round; given: 5"),
        (fb.FedAvg(), "secure-sum(cohort=3)", "cohort must be at least the number of clients, 4; given: 3"),
    ):
        with pytest.raises(InputError, match=line):
            SimulatedEngine(task.population, Everyone(), aggregation=configured(rule)).require(task, algorithm)
        engine = DeployedEngine(None, task.population, Everyone(), aggregation=configured(rule))
        with pytest.raises(InputError, match=line):
            engine.require(task, algorithm)
