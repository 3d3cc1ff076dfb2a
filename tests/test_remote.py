"""An experiment whose steps a federation takes: the simulated numbers, through stops, losses of clients and bad messages."""

import contextlib
import dataclasses
import gc
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import MemoryStore, deployed, weighted

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.participation import Everyone, Uniform
from fedbilevel.core.problem import LOSSES, Pair
from fedbilevel.core.traffic import Totals, Traffic
from fedbilevel.engines import client_runtime, kept_values, wire
from fedbilevel.engines.deployed_clients import DeployedClients, DeployedCohort
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.engines.kept_values import MOST_KEPT
from fedbilevel.engines.messages import Call, Encode, Encoded, Evaluate, Kept, Part, Request, Save, Saved, Store
from fedbilevel.engines.server_metrics import known_at_server
from fedbilevel.errors import Diverged, InputError, NotFinite
from fedbilevel.federation.site_store import RUNS, DiskStore
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.simulation import simulation
from fedbilevel.runs.stopping import Interrupted, StopRequest
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.quadratic import Quadratic


def on(experiment, stores=None, participation=None):
    """The experiment with its steps taken by a loopback federation, and its clients' runtimes."""
    task = experiment.task
    drawn = participation or experiment.engine.participation
    engine, runtimes = deployed(experiment.algorithm, task.population, drawn, (task.x, task.y), stores)
    return dataclasses.replace(experiment, engine=engine), runtimes


def compared(ours, theirs, without=("seconds", "absences")):
    """Rows of metrics as columns, without those that differ by nature."""
    for a, b in zip(ours, theirs, strict=True):
        names = [n for n in b if n in a and n not in without]
        assert set(a) - set(b) <= set(without) and len(names) > 5
        np.testing.assert_allclose([a[n] for n in names], [b[n] for n in names], rtol=1e-9)


@pytest.mark.parametrize(
    "name", [pytest.param("fedmbo", marks=pytest.mark.slow), "fedbio-local", "mefbo"]
)  # others: below, through deaths
def test_an_experiment_on_a_federation_has_the_simulated_numbers_and_traffic(name):
    """Other algorithms: below, through deaths."""
    lower = "local" if name.endswith("local") else "global"
    task = Quadratic(clients=4, noise=0.2, lower_level=lower).build()
    simulated = simulation(task, ALGORITHMS[name].configure(name, {}), rounds=40, every=10, participation=Uniform(3))
    federated, _ = on(simulated)
    ours, theirs = ([m.row() for m in e.run() if m.metrics] for e in (federated, simulated))
    compared(ours, theirs)
    assert all(row["absences"] == 0 for row in ours)
    assert ("y_error" in ours[0]) == (lower == "global")  # the server has not seen the clients' own y


def test_metrics_that_the_server_can_know_are_found_by_what_they_depend_on():
    task = Quadratic(clients=3, lower_level="local").build()
    metrics = lambda x, y: {"x": x.sum(), "y": y.sum(), "const": jnp.float32(2), "both": jnp.where(y.sum() > 0, x.sum(), 1)}  # noqa: E731
    known = known_at_server(dataclasses.replace(task, metrics=metrics))
    assert set(known(task.x, None)) == {"x", "const"}
    assert set(known(task.x, jnp.ones((3, 8)))) == {"x", "y", "const", "both"}


@pytest.mark.parametrize("name", [name for name in TASKS if name != "label-errors"])  # which needs tables
def test_tasks_leave_the_losses_to_the_experiment(name):
    task = TASKS[name].load()().build()
    named = jax.eval_shape(task.metrics, task.x, task.y)
    assert not set(named) & set(LOSSES)


def configuration(algorithm, **changes):
    lower = "local" if algorithm.endswith("local") else "global"
    knobs = {"clients": 4, "noise": 0.3, "lower_level": lower}
    return Configuration.resolve("quadratic", knobs, algorithm, {}, RunOptions(**dict(rounds=40, every=10, seed=3) | changes))


def rows(folder):
    return [{k: v for k, v in row.items() if k not in ("seconds", "absences")} for row in folder.rows()]


@pytest.mark.parametrize(
    "algorithm",
    ["fedbio-local", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fedbioacc", "fedbioacc-local", "commfedbio"))],
)
def test_a_run_whose_server_and_clients_all_died_goes_on_from_its_checkpoint(tmp_path, algorithm):
    made = configuration(algorithm, clients_per_round=3)
    simulated = list(made.experiment().run())
    (folder,) = RunFolder.create({tmp_path / "run": made})
    for stop_at in (1, 3, 10**6):
        stores = [DiskStore(tmp_path / f"site-{m}", folder.identity) for m in range(4)]
        experiment, _ = on(folder.configuration.experiment(), stores)  # new processes everywhere
        stop = StopRequest()

        def observe(moment, stop=stop, stop_at=stop_at):
            if moment.step >= stop_at:
                stop.signum = 2

        if stop_at < 10**6:
            with pytest.raises(Interrupted):
                folder.execute(stop, observe, experiment=experiment)
        else:
            folder.execute(stop, observe, checkpoint_seconds=0, experiment=experiment)
    compared(folder.rows(), [m.row() for m in simulated if m.metrics])
    assert folder.result["status"] == "finished"
    if algorithm != "fedbioacc":
        assert all(len(list((tmp_path / f"site-{m}" / folder.identity).iterdir())) <= 2 for m in range(4))


def test_values_saved_after_the_last_durable_checkpoint_do_not_count(tmp_path):
    """The server dies between the sites' saving and its own: it goes on from the checkpoint before, and so do they."""
    (folder,) = RunFolder.create({tmp_path / "run": configuration("fedbio-local")})
    whole = [m.row() for m in configuration("fedbio-local").experiment().run() if m.metrics]
    stores = [DiskStore(tmp_path / f"site-{m}", folder.identity) for m in range(4)]
    stop = StopRequest()

    def observe(moment):
        stop.signum = 2 if moment.step >= 10 else None

    with pytest.raises(Interrupted):
        folder.execute(stop, observe, experiment=on(folder.configuration.experiment(), stores)[0])
    checkpoint = (folder.path / "checkpoint").read_bytes()
    stop = StopRequest()
    with pytest.raises(Interrupted):
        folder.execute(
            stop,
            lambda moment: setattr(stop, "signum", 2 if moment.step >= 15 else None),
            experiment=on(folder.configuration.experiment(), stores)[0],
        )
    (folder.path / "checkpoint").write_bytes(checkpoint)  # the newer one never reached the disk
    folder.execute(StopRequest(), lambda moment: None, experiment=on(folder.configuration.experiment(), stores)[0])
    compared(folder.rows(), whole)


def test_without_a_clients_values_a_checkpoint_is_not_written(tmp_path):
    (folder,) = RunFolder.create({tmp_path / "run": configuration("fedbio-local")})
    experiment, _ = on(folder.configuration.experiment())  # clients that have no disk
    with pytest.raises(RuntimeError, match=r"no client has saved its values for a checkpoint; client 0: .* store"):
        folder.execute(StopRequest(), lambda moment: None, checkpoint_seconds=0, experiment=experiment)
    assert not (folder.path / "checkpoint").exists() and folder.result is None


TIMED_OUT = Failure(Kind.LATE, "timed out")


class Flaky:
    """A transport whose clients can fall silent."""

    def __init__(self, transport, silent, trouble=TIMED_OUT):
        self.transport, self.silent, self.trouble = transport, silent, trouble

    def ask(self, requests):
        replies, errors = self.transport.ask({m: r for m, r in requests.items() if m not in self.silent})
        return replies, errors | {m: self.trouble for m in requests if m in self.silent}


def stopped_without_client_2(tmp_path, step):
    """The folder of a run in which client 2 was silent, stopped at a step, and the disks of its clients."""
    (folder,) = RunFolder.create({tmp_path / "run": configuration("fedbioacc-local")})
    stores = [DiskStore(tmp_path / f"site-{m}", folder.identity) for m in range(4)]
    experiment, _ = on(folder.configuration.experiment(), stores)
    experiment.engine.exchange.transport = Flaky(experiment.engine.exchange.transport, {2})
    stop = StopRequest()
    with pytest.raises(Interrupted):
        folder.execute(
            stop, lambda moment: setattr(stop, "signum", 2 if moment.step >= step else None), 0, experiment=experiment
        )
    return folder, stores


def test_a_client_that_missed_the_start_and_the_checkpoint_takes_part_when_it_is_back(tmp_path):
    folder, stores = stopped_without_client_2(tmp_path, step=3)
    assert folder.rows()[0]["absences"] == 2  # of the one round to start, and of the losses
    assert not (tmp_path / "site-2").exists()
    experiment, _ = on(folder.configuration.experiment(), stores)
    folder.execute(StopRequest(), lambda moment: None, experiment=experiment)
    assert folder.result["status"] == "finished" and folder.rows()[-1]["absences"] == 0
    assert list((tmp_path / "site-2" / folder.identity).iterdir())  # it was asked, and has its own y


def test_absences_are_counted_and_the_rest_is_weighed_anew():
    task = Quadratic(clients=4, noise=0.0).build()
    federated, _ = on(simulation(task, fb.SimFBO(), rounds=20, every=10))
    federated.engine.exchange.transport = Flaky(federated.engine.exchange.transport, {1})
    found = [m.row() for m in federated.run() if m.metrics]
    assert [row["absences"] for row in found] == [1, 11, 11]  # the losses' included
    three = dataclasses.replace(task, population=weighted(task.population, [1, 0, 1, 1]))
    alone = [m.row() for m in simulation(three, fb.SimFBO(), rounds=20, every=10).run() if m.metrics]
    for ours, theirs in zip(found, alone, strict=True):
        assert ours["rounds"] == theirs["rounds"]
        names = ("upper_loss", "lower_loss")
        np.testing.assert_allclose([ours[n] for n in names], [theirs[n] for n in names], rtol=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "participation"),
    [
        pytest.param(fb.FedMBO(), Everyone(), marks=pytest.mark.slow),
        pytest.param(fb.FedMBO(neumann_terms=4), Uniform(3), marks=pytest.mark.slow),
        (fb.FedMBO(neumann_terms=4), Uniform(1)),
        (fb.FedAvg(), Uniform(1)),
        (fb.FedBiOLocal(), Uniform(1)),
    ],
)
def test_a_silent_client_ends_no_run_however_few_are_asked_at_a_time(algorithm, participation):
    task = Quadratic(clients=4, noise=0.1, lower_level=type(algorithm).lower_level).build()
    federated, _ = on(simulation(task, algorithm, steps=20, every=10, participation=participation))
    federated.engine.exchange.transport = Flaky(federated.engine.exchange.transport, {1})
    found = [m.row() for m in federated.run() if m.metrics]
    assert found[-1]["step"] == 20 and sum(row["absences"] for row in found) > len(found)  # more than the losses'
    assert found[-1]["lower_loss"] < found[0]["lower_loss"] or found[-1]["upper_loss"] < found[0]["upper_loss"]


def test_who_stands_in_goes_on_from_its_own_value():
    task, algorithm = Quadratic(clients=4, lower_level="local").build(), fb.FedBiOLocal()
    federation, _ = deployed(algorithm, task.population, Uniform(1), (task.x, task.y))
    first, *_ = federation.init(algorithm, task.x, task.y, jax.random.key(0))
    for silent in range(4):
        federation.exchange.transport = Flaky(federation.exchange.transport, {silent})
        state, totals, *_ = federation.step(algorithm, first, jax.random.key(1))
        (moved,) = [m for m in range(4) if state.y.at(m) is not first.y.at(m)]
        assert moved != silent and totals.rounds in (1, 2)
        federation.exchange.transport = federation.exchange.transport.transport


def test_who_stands_in_gets_what_was_meant_for_the_one_it_stands_in_for():
    task, algorithm = Quadratic(clients=4, noise=0.2).build(), fb.FedMBO()
    federation, _ = deployed(algorithm, task.population, Uniform(2), (task.x, task.y))
    rows = jnp.stack([task.y + 1, task.y + 2])

    def gathered(members, active):
        clients = DeployedClients(federation.exchange, task.population, Uniform(2), algorithm, jax.random.key(0))
        cohort = DeployedCohort(clients, np.array(members), np.array(active))
        return cohort.gather(algorithm.contracted, task.x, task.y, cohort.scatter(rows)), cohort

    expected, _ = gathered([1, 0], [True, False])
    federation.exchange.transport = Flaky(federation.exchange.transport, {0, 2, 3})
    for members in ([0, 1], [0, 2]):  # it is a member who was not asked for, or none
        found, cohort = gathered(members, [True, False])
        np.testing.assert_array_equal(found, expected)
        assert cohort.active.tolist() == [True, False]
        assert np.isfinite(cohort.gather(algorithm.contracted, task.x, task.y, cohort.scatter(rows))).all()  # a row for each


def test_only_the_silence_of_all_clients_ends_a_run():
    task = Quadratic(clients=4).build()
    for participation in (Everyone(), Uniform(1)):
        federated, _ = on(simulation(task, fb.FedAvg(), rounds=20, every=10, participation=participation))
        federated.engine.exchange.transport = Flaky(federated.engine.exchange.transport, set(range(4)))
        with pytest.raises(RuntimeError, match=r"none of 4 clients answered; client \d: timed out"):
            list(federated.run())


def test_absences_survive_a_restart(tmp_path):
    (folder,) = RunFolder.create({tmp_path / "run": configuration("simfbo", rounds=20)})
    stop = StopRequest()
    for last in (5, 20):
        experiment, _ = on(folder.configuration.experiment())
        experiment.engine.exchange.transport = Flaky(experiment.engine.exchange.transport, {1})

        def observe(moment, last=last):
            stop.signum = 2 if moment.step == last < 20 else None

        with contextlib.suppress(Interrupted):
            folder.execute(stop, observe, experiment=experiment)
    assert [row["absences"] for row in folder.rows()] == [1, 11, 11]


def test_only_what_was_sent_is_traffic_and_absent_clients_cost_no_memory(monkeypatch):
    monkeypatch.setattr(client_runtime, "MOST_KEPT", 4)  # beyond that a client refuses
    task, algorithm = Quadratic(clients=3, lower_level="local").build(), fb.FedBiOLocal()
    down = {}
    for trouble in (Failure(Kind.LATE, "timed out"), Failure(Kind.UNREACHABLE, "not connected", sent=False)):
        federation, _ = deployed(algorithm, task.population, Everyone(), (task.x, task.y))
        federation.exchange.transport = Flaky(federation.exchange.transport, {1}, trouble)
        state, *_ = federation.init(algorithm, task.x, task.y, jax.random.key(0))
        sizes = []
        for k in range(6):
            state, totals, *_ = federation.step(algorithm, state, jax.random.key(k))
            sizes.append(max(map(len, federation.exchange.slots.needed.values())))
        down[trouble.line] = totals.down
        assert sizes[-1] == sizes[2] <= 4 and federation.exchange.absences == 6
    assert down["not connected"] == 2 * task.x.size < down["timed out"]


def test_a_restart_that_is_not_finite_is_divergence(tmp_path):
    """A client that never saved its values starts over, which can fail as any start can."""
    folder, stores = stopped_without_client_2(tmp_path, step=1)
    experiment, _ = on(folder.configuration.experiment(), stores)
    everyone = Flaky(experiment.engine.exchange.transport, {0, 1, 2, 3}, Failure(Kind.NOT_FINITE, "no number"))
    experiment.engine.exchange.transport = everyone
    with pytest.raises(Diverged, match="4 of 4 clients computed values that are not finite"):
        folder.execute(StopRequest(), lambda moment: None, experiment=experiment)
    assert folder.result["status"] == "diverged"


def test_a_federation_does_not_pool():
    task = Quadratic(clients=2).build()
    engine, _ = deployed(fb.FedAvg(), task.population, Everyone())
    pooled = simulation(task, ALGORITHMS["stocbio"].configure("stocbio", {}), rounds=90)
    with pytest.raises(InputError, match="pools the data of all clients"):
        dataclasses.replace(pooled, engine=engine)


def test_divergence_on_a_federation_is_said_as_in_a_simulation():
    task = Quadratic(clients=3).build()
    federated, _ = on(simulation(task, fb.SimFBO(gamma_y=1e300, gamma_x=1e300), rounds=50, every=50))
    with pytest.raises(Diverged, match=r"SimFBO diverged at round \d+ .* not finite.*gamma_y = 1e\+300"):
        list(federated.run())


KEY = np.asarray(jax.random.key_data(jax.random.key(0)))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (lambda t: Call("step", KEY, (t.x, t.y), None), "'step' is not a client function of FedAvg: refused"),
        (
            lambda t: Call("local_y", KEY, (t.x, t.y[1:]), None),
            r"local_y was called with float64\[5\], float64\[7\], but .*8\]",
        ),
        (lambda t: Call("local_y", KEY, (t.x, t.y.astype("float32")), None), r"with float64\[5\], float32\[8\]"),
        (lambda t: Call("local_y", KEY, (t.x, t.y * np.nan), None), "an argument holds a value that is not finite"),
        (lambda t: Call("local_y", KEY, (t.x,), None), r"with float64\[5\], but"),
        (lambda t: Store(t.x * np.inf, 1), "a value to keep holds a value that is not finite"),
        (lambda t: Store(np.zeros(10**6), 1), r"no call of this algorithm takes a value of float64\[1000000\]: refused"),
        (lambda t: Evaluate(t.x, t.y[1:]), r"evaluate was called with float64\[5\], float64\[7\], but .*8\]: refused"),
        (lambda t: Save(1, [t.x], -1), "only values kept here are saved here: refused"),
        (lambda t: [Store(t.x, slot) for slot in range(MOST_KEPT + 1)], f"{MOST_KEPT} values are kept here already: refused"),
        (lambda t: Call("local_y", KEY, (t.x, {"y": t.y}), None), "refused"),
    ],
)
def test_a_client_refuses_requests_that_are_not_its_algorithms(expression, message):
    task = Quadratic(clients=2).build()
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y))
    with pytest.raises((InputError, NotFinite), match=message):
        runtimes[0].answer(wire.encode(Request(expression(task), isinstance(expression(task), (Call, Evaluate)), [])))


def test_a_client_refuses_a_message_that_is_no_request():
    task = Quadratic(clients=2).build()
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y))
    with pytest.raises(InputError, match="a message is not a request: refused"):
        runtimes[0].answer(wire.encode(Kept(1)))


class Lying:
    """A transport whose client 1 answers something else."""

    def __init__(self, transport, answer):
        self.transport, self.answer = transport, answer

    def ask(self, requests):
        replies, errors = self.transport.ask(requests)
        return replies | {m: self.answer(replies[m]) for m in replies if m == 1}, errors


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda a: wire.encode(np.zeros(9)), r"local_y returned float64\[9\]"),
        (lambda a: wire.encode(np.zeros(8, np.float32)), r"local_y returned float32\[8\]"),
        (lambda a: wire.encode(np.full(8, np.nan)), "an answer holds a value that is not finite"),
        (lambda a: wire.encode(None), "local_y returned nothing"),
        (lambda a: a[:-3], "a message"),
        (lambda a: b"\x00", "a message"),
    ],
)
def test_the_server_refuses_answers_that_are_not_the_algorithms_and_goes_on(answer, message, caplog):
    task = Quadratic(clients=3).build()
    algorithm = fb.FedAvg()
    federation, _ = deployed(algorithm, task.population, Everyone(), (task.x, task.y))
    honest = federation.step(algorithm, Pair(task.x, task.y), jax.random.key(0))[0]
    federation.exchange.transport = Lying(federation.exchange.transport, answer)
    state, *_ = federation.step(algorithm, Pair(task.x, task.y), jax.random.key(0))
    assert federation.exchange.absences == 1 and not np.allclose(state.y, honest.y)
    assert len(caplog.records) == 1 and "client 1 is left out of this round" in caplog.text
    assert message.replace("\\", "") in caplog.text
    federation.exchange.transport = federation.exchange.transport.transport
    federation.step(algorithm, state, jax.random.key(1))
    assert "client 1 takes part again" in caplog.text


def test_a_store_keeps_two_checkpoints_of_few_runs_and_detects_damage(tmp_path):
    (tmp_path / "a stray file").touch()
    store = DiskStore(tmp_path, "ab12")
    store.save(10, b"ten", keep=-1)
    store.save(20, b"twenty", keep=10)
    assert store.load(10) == b"ten" and store.load(20) == b"twenty"
    store.save(30, b"thirty", keep=20)
    with pytest.raises(InputError, match="no values of step 10"):
        store.load(10)
    file = tmp_path / "ab12" / "step-30"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="damaged"):
        store.load(30)
    for k in range(20):
        DiskStore(tmp_path, f"{k:x}")  # runs that keep nothing
    assert store.load(20) == b"twenty" and len(list(tmp_path.iterdir())) == 2
    for k in range(20):
        DiskStore(tmp_path, f"{k:x}").save(1, b"one", keep=-1)
    assert len(list(tmp_path.iterdir())) == RUNS + 1
    for wrong in ("../x", "", "AB", "a/b"):
        with pytest.raises(InputError, match="not a run's identity"):
            DiskStore(tmp_path, wrong)


def test_a_store_takes_no_more_of_the_disk_than_it_may_and_has_the_oldest_runs_go_first(tmp_path):
    digest, data = 32, bytes(968)
    for k, run in enumerate(("aa", "bb", "cc")):
        DiskStore(tmp_path, run, 3500).save(1, data, keep=-1)
        os.utime(tmp_path / run, (k, k))
    store = DiskStore(tmp_path, "dd", 3500)
    store.save(1, data, keep=-1)
    assert {folder.name for folder in tmp_path.iterdir()} == {"bb", "cc", "dd"}
    store.save(2, data, keep=1)
    store.save(3, data, keep=2)
    assert {folder.name for folder in tmp_path.iterdir()} == {"cc", "dd"} and store.load(2) == store.load(3) == data
    too_much = bytes(3500 - len(data) - 2 * digest + 1)
    with pytest.raises(InputError, match="values of two checkpoints would take 3,501 bytes of this site's disk, and 3,500 are"):
        store.save(4, too_much, keep=3)
    assert store.load(3) == data and DiskStore(tmp_path, "cc").load(1) == data
    store.save(4, too_much[1:], keep=3)
    assert sum(file.stat().st_size for file in tmp_path.rglob("step-*")) == 3500


@pytest.mark.parametrize("n", [0, 5, 2**32 + 7, 2**50])
def test_counts_on_the_host_become_counts_in_compiled_code_exactly(n):
    assert Totals().plus(Traffic.of(Totals(3, n, n // 2))) == Totals(3, n, n // 2)


def test_rows_are_json(tmp_path):
    (folder,) = RunFolder.create({tmp_path / "run": configuration("fedavg", rounds=10)})
    folder.execute(StopRequest(), lambda moment: None, experiment=on(folder.configuration.experiment())[0])
    assert json.loads((folder.path / "metrics.jsonl").read_text().splitlines()[-1])["absences"] == 0


def test_what_a_client_keeps_does_not_leave_it():
    task, algorithm = Quadratic(clients=2, lower_level="local").build(), fb.FedBiOLocal()
    federation, runtimes = deployed(algorithm, task.population, Everyone())
    state, *_ = federation.init(algorithm, task.x, task.y, jax.random.key(0))
    state, *_ = federation.step(algorithm, state, jax.random.key(1))
    held = state.y.at(0).expression([])
    for expression in (held, [held], Store(np.ones(2), 99)):
        with pytest.raises(InputError, match="values kept here do not leave this client"):
            runtimes[0].answer(wire.encode(Request(expression, True, [])))


@pytest.mark.parametrize("garbage", ["text", [], {"a": "b"}, b"", b"not ours", "deep"])
def test_whatever_one_client_answers_is_that_clients_trouble_alone(garbage):
    task, algorithm = Quadratic(clients=3).build(), fb.SimFBO()
    federation, runtimes = deployed(algorithm, task.population, Everyone(), (task.x, task.y))
    state, *_ = federation.init(algorithm, task.x, task.y, jax.random.key(0))
    if garbage == "deep":
        inside = b"[" * 5000 + b"]" * 5000
        garbage = len(inside).to_bytes(8, "little") + inside
    answer = garbage if isinstance(garbage, bytes) else wire.encode(garbage)
    runtimes[1].answer = lambda request: answer
    moved, *_ = federation.step(algorithm, state, jax.random.key(1))
    assert np.isfinite(moved.x).all() and federation.exchange.absences == 1


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (lambda t: Save(1, [Store(t.x, 1)], "no number"), "a Save has entries of another type"),
        (lambda t: Save([1], [Store(t.x, 1)], -1), "a Save has entries of another type"),
        (lambda t: Save(1, [Store(t.x, 1)] + [Kept(1)] * MOST_KEPT, -1), "only values kept here are saved here"),
        (lambda t: Store([np.zeros(5)] * 20_000, 1), "takes a value of 20,000 arrays: refused"),
        (lambda t: Part(Store(t.x, 1), (np.zeros(10**4, int),)), "a Part has entries of another type"),
        (lambda t: Part(Store(t.x, 1), (0,)), "only tuples have parts: refused"),
        (lambda t: Kept("1"), "a Kept has entries of another type"),
        (lambda t: Saved(1, 0, None), "a Saved has entries of another type"),
        (lambda t: [[Store(t.x, 1) for _ in range(MOST_KEPT + 2)]], f"more than {MOST_KEPT} values: refused"),
    ],
)
def test_a_client_refuses_to_keep_what_is_malformed_or_too_much_and_writes_nothing(tmp_path, expression, message):
    task = Quadratic(clients=2).build()
    stores = [DiskStore(tmp_path / str(m), "ab12") for m in range(2)]
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y), stores)
    with pytest.raises(InputError, match=message):
        runtimes[0].answer(wire.encode(Request(expression(task), False, [])))
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.parametrize("needed", [None, "1", [[1]], ["1"], [1.5]])
def test_a_client_refuses_a_request_whose_needed_numbers_are_none(needed):
    task = Quadratic(clients=2).build()
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y))
    with pytest.raises(InputError, match="a message is not a request: refused"):
        runtimes[0].answer(wire.encode(Request([], False, needed)))


def test_a_value_read_from_disk_does_not_keep_the_rest_of_its_file_alive(monkeypatch):
    added, add = [], kept_values.KeptValues.add

    def noted(self, slot, value):
        added.append(value)
        return add(self, slot, value)

    monkeypatch.setattr(kept_values.KeptValues, "add", noted)
    task = Quadratic(clients=2).build()
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y), [MemoryStore() for _ in range(2)])
    for expression in (Save(1, [Store(task.x, 1), Store(task.y, 2)], -1), Saved(1, 1, 3)):
        runtimes[0].answer(wire.encode(Request(expression, False, [3])))
    np.testing.assert_array_equal(added[-1], task.y)
    assert added[-1].base is None


def test_a_request_reads_a_file_once():
    class Counted(MemoryStore):
        loads = 0

        def load(self, step):
            Counted.loads += 1
            return super().load(step)

    task = Quadratic(clients=2).build()
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y), [Counted(), Counted()])
    runtimes[0].answer(wire.encode(Request(Save(1, [Store(task.x, 1), Store(task.y, 2)], -1), False, [])))
    for loads in (1, 2):
        runtimes[0].answer(wire.encode(Request([Saved(1, k % 2, k) for k in range(500)], False, [])))
        assert Counted.loads == loads
    with pytest.raises(InputError, match="of step 1 2 values are saved here, and none at 2: refused"):
        runtimes[0].answer(wire.encode(Request(Saved(1, 2, 3), False, [])))
    with pytest.raises(InputError, match=f"more than {MOST_KEPT} values"):
        runtimes[0].answer(wire.encode(Request([Evaluate(task.x, task.y)] * (MOST_KEPT + 2), False, [])))


@pytest.mark.parametrize(
    ("around", "memory", "wrong"),
    [
        (lambda t: [np.zeros((4000, *t.y.shape))], lambda t: None, "a point that answers are near"),
        (lambda t: [t.y, t.y], lambda t: None, "a point that answers are near"),
        (lambda t: [1], lambda t: Store(np.zeros((1, *t.y.shape)), 2), "what was left out before"),
        (lambda t: [1], lambda t: np.zeros((4000, *t.y.shape)), "what was left out before"),
    ],
)
def test_a_client_encodes_only_changes_of_its_answers_own_shape(around, memory, wrong):
    task, rule = Quadratic(clients=2).build(), configured("quantized")
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), None, None, rule)
    key = np.zeros(2, np.uint32)
    call = Call("local_y", key, (task.x, task.y), None)
    runtimes[0].answer(wire.encode(Request(Encode(call, [1], None, key, 1), True, [])))
    with pytest.raises(InputError, match=f"{wrong} has another shape than the answer: refused"):
        runtimes[0].answer(wire.encode(Request(Encode(call, around(task), memory(task), key, 1), True, [])))


@pytest.mark.parametrize(
    ("rule", "message", "shape"),
    [
        ("mean", np.ones(1), [10**6]),
        ("quantized", [np.ones(9, np.int8), np.ones(1)], [9]),  # of sums of clients' answers alone
        ("quantized(down=8)", [np.ones(1, np.int8), np.ones(1)], [10**6]),
        ("quantized(down=8)", [np.ones(64, np.int8), np.ones(2)], [64]),
        ("quantized(down=8)", [np.ones((9, 9, 9), np.int8), np.ones(1)], [9]),
        ("quantized(down=4)", [np.ones(5, np.int8), np.ones(1)], [9]),  # not unsigned
        ("quantized(down=4)", np.ones(9), [9]),
    ],
)
def test_a_client_decodes_only_what_the_aggregation_encodes(rule, message, shape):
    task = Quadratic(clients=2, x_dimension=9).build()
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y), None, configured(rule))
    with pytest.raises(InputError, match="an array is not encoded as the run's aggregation does: refused"):
        runtimes[0].answer(wire.encode(Request([Encoded(message, shape, "float64")], False, [])))


def test_what_a_request_has_decoded_is_bounded_as_a_whole(monkeypatch):
    monkeypatch.setattr(kept_values, "MOST_BYTES", 0)
    monkeypatch.setattr(kept_values, "MOST_TIMES", 1)
    task, rule = Quadratic(clients=2, x_dimension=90).build(), configured("quantized(down=8)")
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y), None, rule)
    one = Encoded(rule.encode_sent(task.x), [90], "float64")
    runtimes[0].answer(wire.encode(Request([one], False, [])))
    with pytest.raises(InputError, match="values here may take"):
        runtimes[0].answer(wire.encode(Request([one] * 9, False, [])))


def test_what_a_client_keeps_is_bounded_in_bytes_over_requests_and_on_its_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_values, "MOST_BYTES", 0)
    monkeypatch.setattr(kept_values, "MOST_TIMES", 1)
    task = Quadratic(clients=2).build()
    stores = [DiskStore(tmp_path / str(m), "ab12") for m in range(2)]
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y), stores)
    most = max(task.x.nbytes + task.y.nbytes + n for n in (task.x.nbytes, task.y.nbytes, 16))

    def ask(expression, *needed):
        return runtimes[0].answer(wire.encode(Request(expression, False, list(needed))))

    fits = most // task.x.nbytes
    for slot in range(fits):
        ask([Store(task.x, slot)], *range(slot))
    with pytest.raises(InputError, match=f"values here may take {most} bytes, and these take {(fits + 1) * task.x.nbytes}"):
        ask([Store(task.x, fits)], *range(fits))
    ask(Save(1, [Kept(0)], -1), 0)
    with pytest.raises(InputError, match="values here may take"):
        ask(Save(2, [Kept(0)] * (fits + 1), 1), 0)
    assert [file.name for file in tmp_path.rglob("step-*")] == ["step-1"]
    with pytest.raises(InputError, match="values here may take"):  # the same number over and over
        ask([[Store(task.x, 1)] * (fits + 1)])


def test_a_kept_value_does_not_keep_the_message_alive_that_brought_it():
    task = Quadratic(clients=2).build()
    _, runtimes = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y))
    message = bytearray(wire.encode(Request(Store(np.asarray(task.x), 1), False, [])))
    runtimes[0].answer(message)
    gc.collect()
    message.clear()  # it fails while an array has its memory


@pytest.mark.parametrize("shape", [[-1], [2, -3], [1.0], ["1"], [True]])
def test_a_message_with_a_shape_of_something_else_than_whole_numbers_is_refused(shape):
    description = json.dumps({"array": "float32", "shape": shape}).encode()
    with pytest.raises(InputError, match="a message is damaged"):
        wire.decode(len(description).to_bytes(8, "little") + description + bytes(8))


def test_a_message_with_an_endless_description_is_refused_before_it_is_read():
    description = b"[" + b"[]," * (wire.MOST_DESCRIPTION // 3 + 1) + b"0]"
    with pytest.raises(InputError, match="are the most: refused"):
        wire.decode(len(description).to_bytes(8, "little") + description)


def test_a_lying_dtype_neither_forges_lines_nor_reaches_the_terminal():
    lie = "float32\n2026-01-01 00:00:00 INFO all is well \x1b[2J\x1b]0;owned\x07 \u202e" + "x" * 10_000
    description = json.dumps({"array": lie, "shape": [1]}).encode()
    with pytest.raises(InputError) as refused:
        wire.decode(len(description).to_bytes(8, "little") + description + bytes(4))
    assert str(refused.value).isprintable() and len(str(refused.value)) < 300
