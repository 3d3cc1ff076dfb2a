"""Secure sums: exact through dropouts at every moment, refusals of every second chance, and nothing to see for the server."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from federations import deployed
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.aggregations.secure import TOO_LARGE
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.participation import Dropouts, Everyone, Uniform
from fedbilevel.engines import wire
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.engines.messages import EXPRESSIONS, Advertise, Call, Evaluate, Masked, Request, Store, Unmask
from fedbilevel.engines.secure_exchange import SecureExchange
from fedbilevel.engines.secure_sum import Collector, Participant, Shares, to_sign
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import Diverged, InputError, NotFinite
from fedbilevel.tasks.quadratic import Quadratic

ABOUT = b"run ab, sum 7"


class Keys:
    """Everybody's signing keys."""

    def __init__(self, clients):
        self.private = {m: Ed25519PrivateKey.generate() for m in range(clients)}


class Signer:
    def __init__(self, keys, number):
        self.keys, self.number = keys, number

    def sign(self, message):
        return self.keys.private[self.number].sign(message)

    def verify(self, client, message, signature):
        try:
            self.keys.private[client].public_key().verify(signature, message)
        except InvalidSignature:
            raise InputError(f"client {client} has not signed this: refused") from None


class Sum:
    """One sum, with the stage after which each client falls silent."""

    def __init__(self, values, least, silent_after=None, about=ABOUT):
        keys = Keys(len(values))
        self.values, self.silent = values, silent_after or {}
        self.clients = {m: Participant(m, least, about, Signer(keys, m)) for m in range(len(values))}
        self.server = Collector(least, about, Signer(keys, 0))
        self.keys = keys
        self.adverts, self.shares, self.masked, self.unmasking = {}, {}, {}, {}

    def there(self, stage, among):
        return [m for m in among if self.silent.get(m, 9) >= stage]

    def masks(self):
        self.adverts = {m: self.clients[m].advertise() for m in self.there(1, self.clients)}
        everyone = self.server.to_share(self.adverts)
        self.shares = {m: self.clients[m].share(everyone) for m in self.there(2, self.adverts)}
        handed = self.server.to_mask(self.shares)
        self.masked = {m: self.clients[m].mask(handed[m], self.values[m]) for m in self.there(3, handed)}
        return self.masked

    def total(self):
        self.masks()
        self.unmasking = {m: self.clients[m].unmask(self.masked) for m in self.there(4, self.masked)}
        return self.server.total(self.masked, self.unmasking)


def values(clients, size=5, seed=0):
    return list(np.random.default_rng(seed).integers(0, 2**32, (clients, size), dtype=np.uint32))


def test_the_sum_is_exact_modulo_two_to_the_32():
    given = values(5)
    np.testing.assert_array_equal(Sum(given, 3).total(), np.sum(given, 0, dtype=np.uint32))


@pytest.mark.parametrize("stages", list(itertools.product([0, 1, 2, 3, 9], repeat=2)))
def test_whoever_drops_out_at_whatever_moment_the_sum_is_that_of_the_others(stages):
    given, silent = values(5), {1: stages[0], 4: stages[1]}
    ours = Sum(given, 3, silent)
    total = ours.total()
    assert set(ours.masked) == {m for m in range(5) if silent.get(m, 9) >= 3}
    np.testing.assert_array_equal(total, np.sum([given[m] for m in ours.masked], 0, dtype=np.uint32))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(3, 7), data=st.data())
def test_any_dropouts_that_leave_enough_are_recovered(seed, n, data):
    least = data.draw(st.integers(2, n - 1))
    lost = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n - least))
    silent = {m: data.draw(st.integers(0, 3)) for m in lost}
    given = values(n, seed=seed)
    ours = Sum(given, least, silent)
    np.testing.assert_array_equal(ours.total(), np.sum([given[m] for m in ours.masked], 0, dtype=np.uint32))


def test_too_few_clients_are_refused_at_every_stage():
    for stage in (0, 1, 2):
        with pytest.raises(InputError, match="this one insists on 3"):
            Sum(values(4), 3, {0: stage, 1: stage}).total()
    with pytest.raises(RuntimeError, match="2 clients helped to unmask a secure sum, and 3 must"):
        Sum(values(4), 3, {0: 3, 1: 3}).total()
    with pytest.raises(InputError, match="fewer than 2 clients hides nothing"):
        Participant(0, 1, ABOUT, None)


def test_a_late_answer_is_never_unmasked():
    """The server says that client 2 dropped out, gets the shares of its key, and then cannot have those of its seed."""
    ours = Sum(values(4), 3)
    masked = ours.masks()
    without = [m for m in masked if m != 2]
    shares = {m: ours.clients[m].unmask(without) for m in without}
    assert all(2 in s.keys and 2 not in s.seeds for s in shares.values())
    for m in without:
        with pytest.raises(InputError, match="out of order, or one is repeated"):
            ours.clients[m].unmask(masked)
    with pytest.raises(RuntimeError, match="0 clients helped to unmask"):  # nobody gave it a share of that seed
        ours.server.total(masked, shares)


def test_shares_of_a_key_and_of_a_seed_are_never_both_given():
    ours = Sum(values(5), 3, {3: 2})
    ours.total()
    for shares in ours.unmasking.values():
        assert not shares.seeds.keys() & shares.keys.keys()
        assert shares.keys.keys() == {3} and shares.seeds.keys() == {0, 1, 2, 4}


def test_masked_values_look_uniform_and_unlike_each_time():
    given = [np.zeros(20_000, np.uint32) for _ in range(3)]
    first, second = Sum(given, 2).masks(), Sum(given, 2).masks()
    for m in first:
        bits = np.unpackbits(first[m].view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)
        counts = np.bincount(first[m].view(np.uint8), minlength=256)
        assert ((counts - 312.5) ** 2 / 312.5).sum() < 400  # χ² of 255 degrees: above it once in 10⁸
        assert (first[m] != second[m]).mean() > 0.999
    for a, b in itertools.combinations(first, 2):
        assert abs(np.corrcoef(first[a].astype(float), first[b].astype(float))[0, 1]) < 0.05


def forged(ours, helpers, share=bytes(32)):
    """What clients hand out to unmask a sum, if these forge their shares of whatever they hold."""
    false = {m: Shares(*({u: share for u in kind} for kind in ours.unmasking[m])) for m in helpers}
    return ours.unmasking | false


def test_what_fewer_than_the_threshold_know_together_does_not_unmask():
    """With t - 1 shares of a seed every guess of the missing one is as good, and a wrong one is noticed."""
    ours = Sum(values(4), 3)
    ours.total()
    with pytest.raises(RuntimeError, match="the shares of client 0's seed do not make its seed"):
        ours.server.total(ours.masked, forged(ours, [0, 1]))
    ours = Sum(values(5), 3, {4: 2})
    ours.total()
    seeds = {m: s.seeds for m, s in ours.unmasking.items()}
    false_keys = {m: Shares(seeds[m], s.keys) for m, s in forged(ours, [0, 1]).items()}
    with pytest.raises(RuntimeError, match="the shares of client 4's key do not make its key"):
        ours.server.total(ours.masked, false_keys)


@pytest.mark.parametrize("share", [bytes(32), b"short"])
@pytest.mark.parametrize("helpers", [[0], [0, 2], [1, 3]])
def test_false_shares_are_got_round_while_enough_are_right(helpers, share):
    given = values(6)
    ours = Sum(given, 3, {5: 2})
    ours.total()
    total = ours.server.total(ours.masked, forged(ours, helpers, share))
    np.testing.assert_array_equal(total, np.sum(given[:5], 0, dtype=np.uint32))


def test_keys_that_other_clients_would_refuse_are_not_handed_on():
    """Each of them would have every honest client refuse the sum."""
    ours = Sum(values(4), 2)
    honest = {m: c.advertise() for m, c in ours.clients.items()}

    def signed(**change):
        advert = honest[0]._replace(**change)
        return advert._replace(signature=ours.keys.private[0].sign(to_sign(ABOUT, 0, *advert[:3])))

    assert set(ours.server.to_share(honest | {0: signed()})) == {0, 1, 2, 3}
    for false in (
        honest[0]._replace(signature=honest[1].signature),
        honest[0]._replace(signature=b""),
        signed(cipher_key=bytes(32)),  # of low order: no secret can be agreed with it
        signed(mask_key=bytes(32)),
        signed(cipher_key=honest[0].mask_key),
    ):
        assert set(ours.server.to_share(honest | {0: false})) == {1, 2, 3}


def test_clients_that_send_something_else_have_dropped_out():
    given = values(5)
    ours = Sum(given, 3)
    adverts = {m: c.advertise() for m, c in ours.clients.items()}
    everyone = ours.server.to_share(adverts | {4: adverts[4]._replace(mask_key=b"short")})
    assert set(everyone) == {0, 1, 2, 3}
    shares = {m: ours.clients[m].share(everyone) for m in everyone}
    handed = ours.server.to_mask(shares | {3: {0: b"for one alone"}})
    assert set(handed) == {0, 1, 2}
    masked = {m: ours.clients[m].mask(handed[m], given[m]) for m in handed}
    helped = {m: ours.clients[m].unmask(masked) for m in masked}
    np.testing.assert_array_equal(ours.server.total(masked, helped), np.sum(given[:3], 0, dtype=np.uint32))
    with pytest.raises(RuntimeError, match="2 clients helped to unmask"):
        ours.server.total(masked, helped | {1: Shares({}, {})})


def test_keys_that_the_server_swapped_are_refused():
    ours, theirs = Sum(values(3), 2), Sum(values(3), 2)
    adverts = {m: c.advertise() for m, c in ours.clients.items()}
    other = {m: c.advertise() for m, c in theirs.clients.items()}
    with pytest.raises(InputError, match="client 1 has not signed this"):
        ours.clients[0].share({**adverts, 1: other[1]})
    with pytest.raises(InputError, match="client 2 has not signed this"):
        ours.clients[1].share({**adverts, 2: adverts[2]._replace(cipher_key=other[2].cipher_key)})
    with pytest.raises(InputError, match="lack this client's own or hold one twice"):
        ours.clients[2].share({**adverts, 0: adverts[1]})


def test_keys_of_another_sum_are_refused():
    keys = Keys(3)
    old, new = ({m: Participant(m, 2, about, Signer(keys, m)) for m in range(3)} for about in (b"sum 6", b"sum 7"))
    before, now = ({m: c.advertise() for m, c in each.items()} for each in (old, new))
    with pytest.raises(InputError, match="client 1 has not signed this"):
        new[0].share({**now, 1: before[1]})


def test_shares_that_were_changed_or_sent_to_another_are_refused():
    for change in (lambda s, m: bytes([s[1][m][0] ^ 1]) + s[1][m][1:], lambda s, m: s[1][2 if m == 0 else 0]):
        ours = Sum(values(3), 2)
        adverts = {m: c.advertise() for m, c in ours.clients.items()}
        shares = {m: c.share(adverts) for m, c in ours.clients.items()}
        with pytest.raises(InputError, match="client 1 sent for a secure sum were changed on the way"):
            ours.clients[0].mask({1: change(shares, 0), 2: shares[2][0]}, ours.values[0])


def test_exchanges_out_of_order_are_refused():
    client = Participant(0, 2, ABOUT, Signer(Keys(2), 0))
    with pytest.raises(InputError, match="out of order"):
        client.mask({}, values(1)[0])
    client.advertise()
    with pytest.raises(InputError, match="out of order"):
        client.advertise()


RULE = "secure-sum(at_least=2, bound=50)"


def federation(algorithm, task, participation, rule=RULE):
    """Both engines with secure sums."""
    keys, rule = Keys(task.population.size), configured(rule)
    signers = [Signer(keys, m) for m in range(task.population.size)]
    ours = SimulatedEngine(task.population, participation, aggregation=rule)
    theirs, runtimes = deployed(algorithm, task.population, participation, (task.x, task.y), None, rule, signers)
    return ours, theirs, runtimes


@pytest.mark.parametrize(
    ("name", "weights"),
    [("fedbio", "1,2,3,4"), *(pytest.param(name, "equal", marks=pytest.mark.slow) for name in ("fedbio", "fedbio-local"))],
)
def test_simulation_and_federation_add_up_the_same_numbers(name, weights):
    algorithm, key = ALGORITHMS[name].configure(name, {}), jax.random.key(5)
    task = Quadratic(clients=4, noise=0.3, lower_level=type(algorithm).lower_level).build()
    task = dataclasses.replace(task, population=task.population.weighted(weights))
    ours, theirs, _ = federation(algorithm, task, Uniform(3))
    plain, _ = deployed(algorithm, task.population, Uniform(3))
    a, b, c = (
        e.step(algorithm, e.init(algorithm, task.x, task.y, key).state, jax.random.fold_in(key, 1))
        for e in (ours, theirs, plain)
    )
    np.testing.assert_allclose(a.state.x, b.state.x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(a.state.x, c.state.x, atol=1e-6)  # up to a step
    assert np.isnan(a.reported["drift"]) and np.isnan(b.reported["drift"])
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
        (Advertise, lambda advert: (*advert[:3], advert[3][::-1]), False),
        (Advertise, lambda advert: [np.asarray([np.nan])] * 4, False),
        (Masked, not_finite, False),
        (Unmask, not_finite, True),
        (Unmask, lambda shares: [{m: s[::-1] for m, s in kind.items()} for kind in shares], True),
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


def test_clients_refuse_a_sum_for_which_they_are_not_all_asked_the_same(monkeypatch):
    """A server that asks client 0 at another point than the others would read its answer out of the sum."""
    algorithm, task, key = fb.FedAvg(), Quadratic(clients=4).build(), jax.random.key(0)
    _, theirs, _ = federation(algorithm, task, Everyone())
    state = theirs.init(algorithm, task.x, task.y, key).state
    asked, lies = theirs.exchange.transport.ask, []

    def lying(masked):
        """Another start of y, a held one that may be anything, another point, another key."""
        (encode, call), other = (masked.expression, masked.expression.call), np.asarray(task.y) + 1
        return [
            encode._replace(call=call._replace(args=(call.args[0], other))),
            encode._replace(call=call._replace(args=(call.args[0], Store(other, 77)))),
            encode._replace(call=call._replace(args=(call.args[0], [Store(other, 77)]))),
            encode._replace(around=[other]),
            encode._replace(call=call._replace(key=call.key + np.uint32(1))),
        ]

    def ask(requests):
        first = wire.decode(next(iter(requests.values())), EXPRESSIONS)
        if isinstance(first.expression, Masked):
            false = first._replace(expression=first.expression._replace(expression=lying(first.expression)[lies.pop()]))
            requests = {**requests, 0: wire.encode(false)}
            replies, failures = asked(requests)
            assert "asks for something else than its clients have signed" in str(failures[0]) and len(replies) == 3
            return replies, failures
        return asked(requests)

    monkeypatch.setattr(theirs.exchange.transport, "ask", ask)
    for lie in range(5):
        lies.append(lie)
        theirs.step(algorithm, state, key)
        assert not lies and theirs.exchange.absences == lie + 1


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
    with pytest.raises(RuntimeError, match="local_y is asked with values kept here where this algorithm sends them: refused"):
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
