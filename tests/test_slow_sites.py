"""Means of the first answers: what late ones count for, what is recorded, and that a run can be repeated from it."""

import dataclasses
import json
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import private_rows
import pytest
from federations import deployed, weighted

import fedbilevel as fb
from fedbilevel.aggregations.buffered import Buffered
from fedbilevel.core.participation import Everyone, Uniform
from fedbilevel.core.problem import Pair
from fedbilevel.engines.arrivals import Arrival, ArrivalsFile, Drawn, Recorded, Schedule
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.in_process import InProcess
from fedbilevel.errors import InputError
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.quadratic import Quadratic

ALGORITHMS = {
    "fedbio": (fb.FedBiO(), "global"),
    "fedbioacc": (fb.FedBiOAcc(local_steps=2), "global"),
    "simfbo": (fb.SimFBO(), "global"),
    "fedbio-local": (fb.FedBiOLocal(local_steps=2), "local"),
}


def task_of(lower_level="global", weights=None, clients=4):
    task = Quadratic(clients=clients, noise=0.1, lower_level=lower_level).build()
    return task if weights is None else dataclasses.replace(task, population=weighted(task.population, weights))


def engine_of(task, algorithm, schedule, rule, participation=Everyone(), record=None):  # noqa: B008
    clients = InProcess(task, algorithm, rule, schedule)
    return DeployedEngine(clients, task.population, participation, aggregation=rule, arrivals=record)


def run(engine, task, algorithm, count):
    """x and the metrics after each of some steps, and the traffic."""
    state = engine.init(algorithm, task.x, task.y, jax.random.key(0)).state
    return continued(engine, task, algorithm, state, range(count))[1]


def continued(engine, task, algorithm, state, numbers):
    found = []
    for t in numbers:
        made = engine.step(algorithm, state, jax.random.fold_in(jax.random.key(1), t))
        state, metrics = made.state, engine.evaluate(task, made.state)
        found.append((np.asarray(state.x).tolist(), {k: float(v) for k, v in metrics.items()}, made.traffic))
    return state, found


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("weights", [None, [0.4, 0.3, 0.2, 0.1]])
def test_waiting_for_all_is_the_synchronous_run_to_the_last_bit(name, weights):
    algorithm, level = ALGORITHMS[name]
    task = task_of(level, weights)
    buffered = engine_of(task, algorithm, Drawn(2.0, 0), Buffered(first=4))
    waiting, _ = deployed(algorithm, task.population, Everyone())
    assert run(buffered, task, algorithm, 3) == run(waiting, task, algorithm, 3)


class Scripted(Schedule):
    """For each call in turn who answers in time, who late, and whose late answers have come."""

    def __init__(self, *script):
        self.script, self.calls = iter(script), []

    def ask(self, call, members, enough):
        first, later, self.come = next(self.script)
        self.calls.append(call)
        return first, later

    def due(self):
        come, self.come = getattr(self, "come", []), []
        return [(m, self.calls[k]) for m, k in come]

    def saved(self):
        raise NotImplementedError

    restore = saved


@fb.algorithm
class Walk(fb.Algorithm):
    """x moves by the mean of (m + 1) 10^t, sent as an iterate in step t."""

    late_answers: ClassVar[bool] = True
    unbiased: bool = fb.flag(False, "which mean")

    @fb.at_client
    def moved(self, client, x, t):
        return x + (client.number + 1) * 10.0**t

    def init(self, x, y, clients):
        return Pair(jnp.zeros(1), jnp.zeros(1))

    def step(self, state, clients, key):
        mean = clients.everyone().unbiased_mean if self.unbiased else clients.everyone().mean
        return Pair(mean(self.moved, state.x, state.y[0], around=state.x), state.y + 1)

    def rounds(self, key, size):
        return 1


@pytest.mark.parametrize("weights", [[0.25] * 4, [0.4, 0.3, 0.2, 0.1]])
@pytest.mark.parametrize("unbiased", [False, True])
def test_late_answers_count_as_changes_by_their_age(weights, unbiased):
    """Client 3 is asked in step 0 and comes in step 2, at age 2; client 1's answer to step 1 in step 2, at age 1."""
    task, algorithm = task_of(weights=weights), Walk(unbiased=unbiased)
    script = ([0, 1, 2], [3], []), ([0, 2], [1], []), ([0, 1, 2, 3], [], [(3, 0), (1, 1)])
    engine = engine_of(task, algorithm, Scripted(*script), Buffered(first=2))
    state = engine.init(algorithm, task.x, task.y, jax.random.key(0)).state
    xs = []
    for t in range(3):
        state = engine.step(algorithm, state, jax.random.key(t)).state
        xs.append(float(state.x[0]))
    w = np.asarray(weights)

    def moved(x, changes):
        """Of (client, change, share)."""
        total = sum(share for _, _, share in changes)
        return x + sum(4 * w[m] * share / total * change for m, change, share in changes)

    x0 = moved(0.0, [(m, m + 1, 1) for m in (0, 1, 2)])
    x1 = moved(x0, [(m, (m + 1) * 10, 1) for m in (0, 2)])
    late = [(3, 4, 1 / math.sqrt(3)), (1, 20, 1 / math.sqrt(2))]
    x2 = moved(x1, [*((m, (m + 1) * 100, 1) for m in range(4)), *late])
    np.testing.assert_allclose(xs, [x0, x1, x2], rtol=1e-12)


def test_an_answer_that_is_too_old_is_dropped_and_counted_as_absent():
    task, algorithm = task_of(), Walk()
    script = ([0, 1, 2], [3], []), ([0, 1, 2], [], []), ([0, 1, 2], [], [(3, 0)])
    xs, traffic = {}, {}
    for oldest in (1, 2):
        engine = engine_of(task, algorithm, Scripted(*script), Buffered(first=3, oldest=oldest))
        state = engine.init(algorithm, task.x, task.y, jax.random.key(0)).state
        for t in range(3):
            made = engine.step(algorithm, state, jax.random.key(t))
            state = made.state
        xs[oldest], traffic[oldest] = float(state.x[0]), made.traffic
        assert engine.exchange.absences == (oldest == 1)
    assert xs[1] == 222.0 and xs[2] != xs[1]
    assert traffic[1] == traffic[2] and traffic[1].up == 4  # it has crossed


@pytest.mark.parametrize("name", ["fedbioacc", "fedbio-local"])
def test_a_recorded_run_is_repeated_to_the_last_bit(name, tmp_path):
    algorithm, level = ALGORITHMS[name]
    task, rule, file = task_of(level, clients=5), Buffered(first=2), tmp_path / "arrivals.jsonl"
    drawn = engine_of(task, algorithm, Drawn(1.0, 0), rule, Uniform(4), ArrivalsFile(file))
    found = run(drawn, task, algorithm, 8)
    late = [json.loads(line)["late"] for line in file.read_text().splitlines()]
    assert any(late)
    assert run(engine_of(task, algorithm, Recorded(file), rule, Uniform(4)), task, algorithm, 8) == found
    with pytest.raises(InputError, match="recorded by another run, or ends before this one"):
        run(engine_of(task, algorithm, Recorded(file), rule, Uniform(4)), task, algorithm, 9)


def test_the_newest_line_of_a_call_counts_and_one_cut_off_does_not(tmp_path):
    file = tmp_path / "arrivals.jsonl"
    record = ArrivalsFile(file)
    for first in ([0], [1]):
        record.add(Arrival("ab", 0, "moved", [0, 1], first, []))
    with file.open("a") as out:
        out.write('{"call": "cd"')
    assert Recorded(file).ask("ab", [0, 1, 2], 1) == ([1], [0])
    ArrivalsFile(file).add(Arrival("ef", 0, "moved", [2], [2], []))
    assert Recorded(file).ask("ef", [0, 1, 2], 1) == ([2], [])


@pytest.mark.parametrize("repeated", [False, True])
def test_a_resumed_simulation_continues_to_the_last_bit(repeated, tmp_path):
    algorithm, level = ALGORITHMS["fedbio-local"]
    task, rule, file = task_of(level), Buffered(first=2), tmp_path / "arrivals.jsonl"
    whole = run(engine_of(task, algorithm, Drawn(1.5, 0), rule, record=ArrivalsFile(file)), task, algorithm, 8)

    def again():
        return engine_of(task, algorithm, Recorded(file) if repeated else Drawn(1.5, 0), rule)

    before, after, start = again(), again(), (algorithm, task.x, task.y, jax.random.key(0))
    state, found = continued(before, task, algorithm, before.init(*start).state, range(4))
    assert found == whole[:4]
    saved = before.save(state, 4)
    assert continued(after, task, algorithm, after.restore(saved, *start), range(4, 8))[1] == whole[4:]


def test_how_often_metrics_are_taken_changes_no_arrival():
    task = task_of()

    def end(every):
        solved = fb.solve(
            task, algorithm="fedbio", rounds=12, every=every, aggregation="buffered(first=2)", arrivals="lognormal:2"
        )
        return np.asarray(solved.x)

    np.testing.assert_array_equal(end(1), end(12))


def test_what_cannot_be_is_refused_with_a_line(tmp_path):
    task = task_of()

    def solve(**options):
        fb.solve(task, rounds=5, **{"algorithm": "fedbio", "aggregation": "buffered(first=2)", **options})

    for options, line in [
        ({"aggregation": "buffered(first=5)"}, "first must be at most 4, the clients of a round; given: 5"),
        ({"algorithm": "fednest"}, "fednest needs the answers of an exchange together"),
        ({"algorithm": "commfedbio"}, "CommFedBiO needs the answers of an exchange together"),
        ({"aggregation": "mean", "arrivals": "lognormal:1"}, "arrivals are for an aggregation that does not wait"),
        ({"attack": "sign-flip:1"}, "for clients computed together"),
        ({"arrivals": "lognormal:x"}, "arrivals must be lognormal:SIGMA"),
        ({"arrivals": str(tmp_path / "none")}, "none"),
    ]:
        with pytest.raises(InputError, match=line):
            solve(**options)


@pytest.mark.slow
def test_a_private_run_that_waits_for_all_has_the_noise_of_one_that_does_not_buffer():
    """One step: noise follows from the point to its last bit, which the engines share only at the start."""
    task = private_rows.task(sizes=(40, 40, 40), batch_size=8)

    def x_of(**options):
        *_, last = simulation(task, fb.FedBiO(local_steps=1), steps=1, **options).run()
        return np.asarray(last.state.x)

    noisy = x_of(aggregate="buffered(first=3)", privacy="rows(noise=1.0)")
    np.testing.assert_allclose(noisy, x_of(privacy="rows(noise=1.0)"), rtol=1e-9)
    assert np.abs(noisy - x_of(aggregate="buffered(first=3)")).max() > 1e-3
