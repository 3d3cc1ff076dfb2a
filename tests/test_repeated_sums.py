"""Steps that are repeated after a restart: no server has the same secure sum of two cohorts, and no run stops for that."""

import contextlib
import itertools

import jax
import numpy as np
import pytest
from federations import MemoryStore, ServersKeys, deployed
from hypothesis import given, settings
from hypothesis import strategies as st
from signing import Keys, Signer

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.core.participation import Everyone
from fedbilevel.engines import wire
from fedbilevel.engines.engine import Limits
from fedbilevel.engines.exchange import Exchange
from fedbilevel.engines.failure import Failure
from fedbilevel.engines.messages import EXPRESSIONS, Evaluate, Masked, Unmask, in_common
from fedbilevel.engines.secure_exchange import Opened, SecureClient, SecureExchange
from fedbilevel.errors import InputError
from fedbilevel.federation.answered_sums import AnsweredSumsFile
from fedbilevel.federation.opened_sums import OpenedSumsFile
from fedbilevel.tasks.quadratic import Quadratic

RULE, KEY, NAMES = "secure-sum(at_least=3, bound=50)", jax.random.key(5), ("a", "b", "c", "d", "e", "f")


class Runs:
    """A run whose server and clients are started again and again, with what they have on their disks."""

    def __init__(self, folder, algorithm, clients=4, rule=RULE, remembers=True):
        self.folder, self.algorithm, self.rule, self.remembers = folder, algorithm, configured(rule), remembers
        self.task = Quadratic(clients=clients, lower_level=algorithm.lower_level).build()
        self.stores = {m: MemoryStore() for m in range(clients)}
        self.asked, self.opened = [], {}  # the kinds of requests by exchange; by question, over whom its sums were and what

    def started(self, *away, stop=lambda requests: False):
        """A new server, and clients but for those that are away; it is killed when requests are to `stop` it."""
        clients = self.task.population.size
        keys = Keys(clients)
        signers = [Signer(keys, m) for m in range(clients)]
        answered = None
        if not self.rule.clients_add_noise:
            answered = [AnsweredSumsFile(self.folder / f"site-{m}", "ab", NAMES) for m in range(clients)]
        journal = OpenedSumsFile(self.folder / "sums", "ab") if self.remembers else None
        where = self.algorithm, self.task.population, Everyone(), (self.task.x, self.task.y)
        engine, runtimes = deployed(*where, self.stores, self.rule, signers, journal, answered)
        for m in away:
            del runtimes[m]
        exchanged, made = engine.exchange.transport.ask, engine.secure.make
        types = EXPRESSIONS | wire.named_tuples(type(self.algorithm))

        def ask(requests):
            read = {m: wire.decode(r, types).expression for m, r in requests.items()}
            self.asked.append({m: type(expression) for m, expression in read.items()})
            replies = exchanged(requests)
            if stop(read):
                raise KeyboardInterrupt
            return replies

        def seen(wanted, *arguments):
            sum_ = made(wanted, *arguments)
            self.opened.setdefault(wire.encode(in_common(wanted[0][0])), []).append(sum_)
            return sum_

        engine.exchange.transport.ask, engine.secure.make = ask, seen
        return engine

    def begin(self, engine):
        return engine.init(self.algorithm, self.task.x, self.task.y, KEY).state

    def step(self, engine, state, t):
        return engine.step(self.algorithm, state, jax.random.fold_in(KEY, t))

    def restored(self, engine, arrays):
        return engine.restore(arrays, self.algorithm, self.task.x, self.task.y, KEY)

    def cohorts(self):
        return [[sum_.members for sum_ in sums] for sums in self.opened.values()]


def test_a_step_that_is_repeated_with_a_site_that_is_back_has_the_sums_that_the_server_has_already(tmp_path):
    runs = Runs(tmp_path, fb.FedBiO())
    first = runs.started()
    arrays = first.save(runs.step(first, runs.begin(first), 1).state, 1)
    without = runs.started(1)
    before = [runs.step(without, runs.restored(without, arrays), 2)]
    before.append(runs.step(without, before[0].state, 3))
    runs.asked.clear()
    back = runs.started()
    after = [runs.step(back, runs.restored(back, arrays), 2)]
    after.append(runs.step(back, after[0].state, 3))
    assert not any(kind in (Masked, Unmask) for kinds in runs.asked for kind in kinds.values())
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a.state.x, b.state.x)
        assert a.traffic == b.traffic
    assert without.exchange.absences == back.exchange.absences > 0
    assert all(len(sums) == 1 for sums in runs.opened.values())
    last = runs.step(back, after[1].state, 4)
    assert runs.cohorts()[-1] == [[0, 1, 2, 3]] and np.isfinite(last.state.x).all()


def test_without_an_absence_a_repeated_run_has_the_numbers_of_one_that_was_not_stopped(tmp_path):
    runs, straight = Runs(tmp_path / "a", fb.FedBiOAcc()), Runs(tmp_path / "b", fb.FedBiOAcc())
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    one = straight.started()
    expected = straight.begin(one)
    for t in range(1, 6):
        expected = straight.step(one, expected, t).state
    first = runs.started()
    state = runs.step(first, runs.begin(first), 1).state
    arrays = first.save(state, 1)
    for t in (2, 3):
        state = runs.step(first, state, t).state
    second = runs.started()
    state = runs.restored(second, arrays)
    for t in (2, 3, 4, 5):
        state = runs.step(second, state, t).state
    np.testing.assert_array_equal(state.x, expected.x)
    np.testing.assert_array_equal(state.y, expected.y)


def killed(runs, *away):
    """A run's first step, whose server is killed once sites have handed out what unmasks the first sum."""
    engine = runs.started(*away, stop=lambda requests: any(isinstance(r, Unmask) for r in requests.values()))
    with pytest.raises(KeyboardInterrupt):
        runs.step(engine, runs.begin(engine), 1)


def test_a_sum_that_was_perhaps_opened_is_made_again_over_the_same_sites(tmp_path):
    runs = Runs(tmp_path, fb.FedAvg())
    killed(runs, 1)
    back = runs.started()
    state = runs.step(back, runs.begin(back), 1).state
    assert next(iter(runs.opened.values()))[0].members == [0, 2, 3] and back.exchange.absences == 1
    runs.step(back, state, 2)
    assert runs.cohorts()[-1] == [[0, 1, 2, 3]]


def test_a_site_that_is_missing_for_that_is_named_and_the_run_goes_on_when_it_is_back(tmp_path):
    runs = Runs(tmp_path, fb.FedAvg())
    killed(runs)
    without = runs.started(2)
    line = "must not be opened again over other clients, and client 2 is missing: "
    with pytest.raises(RuntimeError, match=line):
        runs.step(without, runs.begin(without), 1)
    back = runs.started()
    runs.step(back, runs.begin(back), 1)
    assert runs.cohorts() == [[[0, 1, 2, 3]]]


def test_nobody_is_asked_to_open_it_if_one_of_these_sites_is_lost_in_between(tmp_path):
    runs = Runs(tmp_path, fb.FedAvg())
    killed(runs)
    runs.asked.clear()
    engine = runs.started()
    ask = engine.exchange.transport.ask

    def losing(requests):
        replies, failures = ask(requests)
        if any(kind is Masked for kind in runs.asked[-1].values()):
            failures[2] = Failure("late", "late")
            del replies[2]
        return replies, failures

    engine.exchange.transport.ask = losing
    with pytest.raises(RuntimeError, match="client 2 is missing: late"):
        runs.step(engine, runs.begin(engine), 1)
    assert not any(kind is Unmask for kinds in runs.asked for kind in kinds.values())
    back = runs.started()
    runs.step(back, runs.begin(back), 1)
    assert runs.cohorts() == [[[0, 1, 2, 3]]]


def test_sites_refuse_the_same_question_for_another_cohort_also_after_they_were_restarted(tmp_path):
    """Whatever the server remembers."""
    runs = Runs(tmp_path, fb.FedAvg(), remembers=False)
    first = runs.started(1)
    expected = runs.step(first, runs.begin(first), 1).state
    again = runs.started()
    with pytest.raises(RuntimeError, match=r"this site has answered the same in a sum over other sites, .*: refused"):
        runs.step(again, runs.begin(again), 1)
    same = runs.started(1)
    np.testing.assert_array_equal(runs.step(same, runs.begin(same), 1).state.y, expected.y)
    state = runs.begin(again := runs.started())
    runs.step(again, state, 2)  # which is another question
    assert runs.cohorts()[-1] == [[0, 1, 2, 3]]


def test_a_question_that_is_refused_does_not_take_the_place_of_the_one_that_is_opened(tmp_path):
    """A server that lies asks for something else between a site's numbers and what unmasks them."""
    runs = Runs(tmp_path, fb.FedAvg(), remembers=False)
    first = runs.started()
    ask, types, masked = first.exchange.transport.ask, EXPRESSIONS | wire.named_tuples(fb.FedAvg), {}

    def lying(requests):
        read = {m: wire.decode(r, types) for m, r in requests.items()}
        if any(isinstance(r.expression, Unmask) for r in read.values()):
            refused, why = ask(masked)
            assert not refused and len(why) == 4
        masked.clear()
        for m, request in read.items():
            match request.expression:
                case Masked(expression=inside):
                    other = inside._replace(call=inside.call._replace(key=inside.call.key + 1))
                    masked[m] = wire.encode(request._replace(expression=request.expression._replace(expression=other)))
        return ask(requests)

    first.exchange.transport.ask = lying
    runs.step(first, runs.begin(first), 1)
    again = runs.started(1)
    with pytest.raises(RuntimeError, match="needs 3 clients, and 0 answered"):
        runs.step(again, runs.begin(again), 1)


def test_metrics_are_not_summed_twice_over_other_sites_either(tmp_path):
    runs = Runs(tmp_path, fb.FedAvg())
    first = runs.started(1)
    measured = first.evaluate(runs.task, runs.begin(first))
    again = runs.started()
    assert again.evaluate(runs.task, runs.begin(again)) == measured
    again.save(runs.begin(again), 0)
    again.save(runs.begin(again), 0)
    third = runs.started()
    assert third.evaluate(runs.task, runs.begin(third)) == measured
    assert runs.cohorts() == [[[0, 2, 3]]]
    careless = Runs(tmp_path, fb.FedAvg(), remembers=False)
    with pytest.raises(RuntimeError, match="answered the same in a sum over other sites"):
        (engine := careless.started()).evaluate(runs.task, careless.begin(engine))


def test_metrics_of_what_sites_keep_are_measured_anew_at_each_step(tmp_path):
    """Nothing in the question says that it is about other values."""
    runs = Runs(tmp_path, fb.FedBiOLocal())
    engine = runs.started()
    state, losses = runs.begin(engine), []
    for t in range(3):
        made = engine.advance(runs.algorithm, state, t, KEY, Limits(9, 9, t + 1, 9))
        state = made.state._replace(state=made.state.state._replace(x=runs.task.x)) if t else made.state
        losses.append(engine.evaluate(runs.task, state)["upper_loss"])
    assert len(set(losses)) == 3


def test_a_site_that_joins_a_run_later_begins_with_the_sums_of_the_others(tmp_path):
    runs = Runs(tmp_path, fb.FedBiOAcc())
    first = runs.started(1)
    state = runs.begin(first)
    for t in (1, 2, 3):
        state = runs.step(first, state, t).state
        arrays = first.save(state, t)
    begun = runs.cohorts()
    joined = runs.started()
    state = runs.restored(joined, arrays)
    assert runs.cohorts() == begun  # nothing was opened for that
    runs.step(joined, state, 4)
    assert runs.cohorts()[-1] == [[0, 1, 2, 3]]


def test_sums_with_the_sites_own_noise_are_not_paid_for_again_when_the_server_has_them(tmp_path, monkeypatch):
    paid, key = [], ServersKeys.key
    monkeypatch.setattr(ServersKeys, "key", lambda self, name, *question: paid.append(name) or key(self, name, *question))
    runs = Runs(tmp_path, fb.FedAvg(), rule="private-sum(at_least=3, noise=1)")
    first = runs.started()
    state = runs.begin(first)
    before = runs.step(first, state, 1).state
    assert len(paid) == 4
    again = runs.started()
    np.testing.assert_array_equal(runs.step(again, runs.begin(again), 1).state.y, before.y)
    assert len(paid) == 4
    runs.remembers = False
    third = runs.started(1)
    runs.step(third, runs.begin(third), 1)  # over other sites, with other noise
    assert len(paid) == 7


def test_what_is_left_of_a_damaged_file_counts(tmp_path):
    sums = OpenedSumsFile(tmp_path / "sums", "ab")
    one = Opened([0, 2], np.arange(3, dtype=np.int32), {1: Failure("late", "late", False)})
    sums.add(b"1", one, lasts=False)
    sums.add(b"2", Opened([0, 1, 2]), lasts=False)
    whole = (tmp_path / "sums").read_bytes()
    sums.add(b"2", one, lasts=True)
    (tmp_path / "sums").write_bytes((tmp_path / "sums").read_bytes()[:-1])
    again = OpenedSumsFile(tmp_path / "sums", "ab")
    assert again.found(b"2") == Opened([0, 1, 2]) and again.found(b"3") is None
    np.testing.assert_array_equal(again.found(b"1").total, one.total)
    assert again.found(b"1")._replace(total=None) == one._replace(total=None)
    assert (tmp_path / "sums").read_bytes() == whole
    assert OpenedSumsFile(tmp_path / "sums", "cd").found(b"1") is None


def test_sums_are_forgotten_once_no_checkpoint_needs_them(tmp_path):
    sums = OpenedSumsFile(tmp_path / "sums", "ab")

    def known():
        return [q for q in (b"1", b"2", b"3", b"4") if OpenedSumsFile(tmp_path / "sums", "ab").found(q)]

    sums.add(b"1", Opened([0]), lasts=False)
    sums.add(b"2", Opened([0]), lasts=True)
    sums.checkpoint()
    sums.add(b"3", Opened([0]), lasts=False)
    assert known() == [b"1", b"2", b"3"]  # the checkpoint may not have been written
    sums = OpenedSumsFile(tmp_path / "sums", "ab")
    sums.add(b"4", Opened([0]), lasts=False)
    sums.checkpoint()
    assert known() == [b"1", b"2", b"3", b"4"]
    sums.checkpoint()
    assert known() == [b"2"]


def test_what_a_site_has_answered_is_on_its_disk_for_each_run(tmp_path):
    answered = AnsweredSumsFile(tmp_path, "ab", NAMES)
    question, other = b"1" * 32, b"2" * 32
    answered.require(question, [0, 1, 2])
    answered.add(question, [2, 1, 0])
    with (tmp_path / "ab").open("ab") as file:
        file.write(b"unfinished")
    for now in (answered, AnsweredSumsFile(tmp_path, "ab", NAMES)):
        now.add(question, [0, 1, 2])
        for refused in (now.require, now.add):
            with pytest.raises(InputError, match="in a sum over other sites"):
                refused(question, [0, 1])
        now.require(other, [0, 1])
    with pytest.raises(InputError, match="in a sum over other sites"):
        AnsweredSumsFile(tmp_path, "ab", ("a", "b", "d")).require(question, [0, 1, 2])
    AnsweredSumsFile(tmp_path, "cd", NAMES).require(question, [0, 1])
    assert (tmp_path / "ab").stat().st_size == 32
    with pytest.raises(InputError, match="is not a run's identity"):
        AnsweredSumsFile(tmp_path, "../ab", NAMES)


class Network:
    """A transport that loses requests and replies, to clients that are restarted now and then or are away."""

    def __init__(self, folder, clients, least, rng):
        self.folder, self.rng, self.faults, self.away = folder, rng, 0.15, set()
        self.rule, self.keys = configured(f"secure-sum(at_least={least})"), Keys(clients)
        self.values = rng.integers(-1000, 1000, (clients, 3)).astype(np.int32)
        self.clients = {m: self.started(m) for m in range(clients)}

    def started(self, m):
        answered = AnsweredSumsFile(self.folder / f"site-{m}", "ab", NAMES)
        return SecureClient(m, self.rule, Signer(self.keys, m), answered)

    def server(self, opened):
        exchange = Exchange(self, len(self.clients), 2)
        return SecureExchange(exchange, self.rule, Signer(self.keys, 0), len(self.clients), opened)

    def happens(self):
        return self.rng.random() < self.faults

    def ask(self, requests):
        replies, failures = {}, {}
        for m, request in requests.items():
            if self.happens():
                self.clients[m] = self.started(m)
            try:
                assert m not in self.away and not self.happens(), "the request was lost"
                reply = self.clients[m].answer(wire.decode(request, EXPRESSIONS).expression, [self.values[m]])
                assert not self.happens(), "the reply was lost"
                replies[m] = wire.encode(reply)
            except (InputError, AssertionError) as error:
                failures[m] = Failure.of(error)
            if self.rng.random() < self.faults / 20:
                raise KeyboardInterrupt  # the server is killed
        return replies, failures


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), clients=st.integers(3, 6), remembers=st.booleans(), data=st.data())
def test_whatever_is_lost_no_two_sums_of_one_question_differ_by_few_answers(tmp_path_factory, seed, clients, remembers, data):
    folder, rng = tmp_path_factory.mktemp("run"), np.random.default_rng(seed)
    least = data.draw(st.integers(clients // 2 + 1, clients))
    network = Network(folder, clients, least, rng)
    question, opened = (Evaluate(np.zeros(3), None), []), []

    def asked():
        journal = OpenedSumsFile(folder / "sums", "ab") if remembers else None
        total, members, _ = network.server(journal).total({m: question for m in range(clients)}, 3)
        np.testing.assert_array_equal(total, network.values[members].sum(0))
        opened.append(set(members))

    for _ in range(8):
        network.away = {m for m in range(clients) if rng.random() < 0.2}
        with contextlib.suppress(RuntimeError, KeyboardInterrupt):
            asked()
    for one, other in itertools.combinations(opened, 2):
        assert one == other or len(one ^ other) >= least
    network.faults, network.away = 0, set()
    if remembers:
        asked()
        assert opened[-1] == opened[0]
