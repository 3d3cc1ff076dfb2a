"""Budgets, metrics, resuming and divergence of a run."""

import dataclasses
import hashlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.core import devices
from fedbilevel.core.participation import Uniform
from fedbilevel.engines import simulated_clients, wire
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import Diverged, InputError
from fedbilevel.report.curves import curves
from fedbilevel.runs import experiment as experiment_module
from fedbilevel.runs import stretches
from fedbilevel.runs.checkpoint import MAGIC
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.simulation import simulation
from fedbilevel.runs.stopping import Interrupted, StopRequest
from fedbilevel.tasks.quadratic import Quadratic

TASK = Quadratic(clients=5, noise=0.3).build()


def finished(experiment, start=None):
    return list(experiment.run(start))


@pytest.mark.parametrize(
    ("algorithm", "rounds", "steps", "used"),
    [
        (fb.SimFBO(), 7, 7, 7),
        (fb.FedBiOAcc(local_steps=2), 8, 3, 7),  # one round to start, two for each step
        (fb.FedMBO(alpha=0.01, lower_rounds=2, neumann_terms=1), 11, 2, 8),  # four for each step
    ],
)
def test_a_budget_of_rounds_buys_as_many_whole_steps_as_fit(algorithm, rounds, steps, used):
    *_, last = simulation(TASK, algorithm, rounds=rounds, every=1).run()
    assert (last.step, last.totals.rounds) == (steps, used)


def test_a_random_number_of_rounds_never_exceeds_the_budget_and_leaves_no_step_unused():
    algorithm = fb.FedMBO(alpha=0.01, lower_rounds=1, neumann_terms=8)
    for seed in range(5):
        experiment = simulation(TASK, algorithm, rounds=40, seed=seed)
        *_, last = experiment.run()
        key = jax.random.fold_in(jax.random.key(seed), last.step + 1)
        assert last.totals.rounds <= 40 < last.totals.rounds + experiment.engine.rounds(algorithm, key)


def test_steps_count_outer_steps():
    *_, last = simulation(TASK, fb.FedBiOAcc(local_steps=2), steps=5).run()
    assert (last.step, last.totals.rounds) == (5, 11)


def test_metrics_come_at_the_start_every_k_rounds_and_at_the_end():
    rows = [m.totals.rounds for m in simulation(TASK, fb.SimFBO(), rounds=23, every=5).run() if m.metrics]
    assert rows == [0, 5, 10, 15, 20, 23]


def test_where_stretches_end_changes_no_bit(monkeypatch):
    experiment = simulation(TASK, fb.FedMBO(alpha=0.01, lower_rounds=2, neumann_terms=4), rounds=60, participation=Uniform(3))
    ours = finished(experiment)
    monkeypatch.setattr(stretches, "STRETCH_SECONDS", 0.0)
    theirs = finished(experiment)
    assert len(theirs) > len(ours)
    assert [m.metrics for m in ours if m.metrics] == [m.metrics for m in theirs if m.metrics]
    np.testing.assert_array_equal(ours[-1].state.x, theirs[-1].state.x)


def configuration(**changes):
    values = dict(rounds=120, every=10, seed=3, clients_per_round=3)
    hyperparameters = changes.pop("hyperparameters", {})
    algorithm = changes.pop("algorithm", "fedbioacc")
    lower = "local" if algorithm.endswith("local") else "global"
    knobs = {"clients": 5, "noise": 0.3, "lower_level": lower}
    if algorithm == "fedmbo":
        hyperparameters = {"lower_rounds": 2, "neumann_terms": 8}
    return Configuration.resolve("quadratic", knobs, algorithm, hyperparameters, RunOptions(**values | changes))


def created(path, configuration):
    (folder,) = RunFolder.create({path: configuration})
    return folder


def test_seconds_begin_when_all_is_compiled(monkeypatch):
    clock, compiling, advance = [0.0], [1000.0], SimulatedEngine.advance

    def slow_at_first(self, *args):
        clock[0] += compiling.pop() if compiling else 1
        return advance(self, *args)

    monkeypatch.setattr(experiment_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(SimulatedEngine, "advance", slow_at_first)
    rows = [moment.row() for moment in simulation(TASK, fb.SimFBO(), rounds=4, every=2).run() if moment.metrics]
    assert rows[0]["seconds"] == 0 < rows[-1]["seconds"] < 10


def without_seconds(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def checkpoint_leaves(folder):
    return jax.tree.leaves(folder.checkpoint(folder.configuration.experiment()).state)


@pytest.mark.parametrize("algorithm", ["fedbioacc", "fedmbo", "fedbio-local"])
def test_a_resumed_run_is_bit_identical(tmp_path, algorithm):
    whole = created(tmp_path / "whole", configuration(algorithm=algorithm))
    whole.execute(StopRequest(), lambda moment: None)
    broken = created(tmp_path / "broken", configuration(algorithm=algorithm))
    for stop_at in (1, 3, 6):
        stop = StopRequest()

        def observe(moment, stop=stop, stop_at=stop_at):
            if moment.step >= stop_at:
                stop.signum = 2

        with pytest.raises(Interrupted):
            broken.execute(stop, observe)
    with (broken.path / "metrics.jsonl").open("a") as metrics:  # rows that a kill left behind the last checkpoint
        metrics.write(json.dumps({"step": 10**6, "rounds": 10**6}) + "\n" + '{"step": 7, "rou')
    broken.execute(StopRequest(), lambda moment: None)
    assert without_seconds(whole.rows()) == without_seconds(broken.rows())
    assert len(whole.rows()) >= 8
    for a, b in zip(checkpoint_leaves(whole), checkpoint_leaves(broken), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_finished_run_is_left_as_it_is(tmp_path):
    folder = created(tmp_path / "run", configuration())
    folder.execute(StopRequest(), lambda moment: None)
    before = {p.name: p.read_bytes() for p in folder.path.iterdir()}
    folder.execute(StopRequest(), lambda moment: pytest.fail("ran again"))
    assert {p.name: p.read_bytes() for p in folder.path.iterdir()} == before


def test_a_run_killed_between_its_last_checkpoint_and_its_result_ends_without_a_double_row(tmp_path):
    folder = created(tmp_path / "run", configuration())
    folder.execute(StopRequest(), lambda moment: None)
    rows = folder.rows()
    (folder.path / "result.json").unlink()
    folder.execute(StopRequest(), lambda moment: None)
    assert without_seconds(folder.rows()) == without_seconds(rows) and folder.result["status"] == "finished"


def interrupted(path, at=6):
    """A run that was stopped after some rows, at a checkpoint."""
    folder, stop = created(path, configuration()), StopRequest()

    def observe(moment):
        stop.signum = 2 if moment.step >= at else None

    with pytest.raises(Interrupted):
        folder.execute(stop, observe)
    return folder


@pytest.mark.parametrize("kept", [None, 0, 1, -1])
def test_a_run_whose_rows_are_gone_does_not_go_on(tmp_path, kept):
    folder = interrupted(tmp_path / "run")
    metrics = folder.path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.unlink() if kept is None else metrics.write_text("".join(lines[:kept]))
    left = len(lines[:kept]) if kept is not None else 0
    with pytest.raises(
        InputError, match=rf"metrics\.jsonl has {left} of the {len(lines)} rows that it had when the checkpoint"
    ):
        folder.execute(StopRequest(), lambda moment: None)
    metrics.write_text("".join(lines))
    folder.execute(StopRequest(), lambda moment: None)
    assert folder.result["status"] == "finished"


def test_a_run_whose_rows_have_other_numbers_does_not_go_on(tmp_path):
    folder = interrupted(tmp_path / "run")
    metrics = folder.path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    row = json.loads(lines[1])
    metrics.write_text("".join([lines[0], json.dumps(row | {"upper_loss": row["upper_loss"] / 2}) + "\n", *lines[2:]]))
    with pytest.raises(InputError, match=r"metrics\.jsonl has other numbers than when the checkpoint beside it was written"):
        folder.execute(StopRequest(), lambda moment: None)


@pytest.mark.parametrize(
    "order, message",
    [
        ([0, 0, 1, 2], r"metrics\.jsonl, line 2: step must be a whole number from 1 to"),
        ([1, 0, 2], r"metrics\.jsonl, line 2: step must be a whole number from"),
        ([0, 2, 3], r"metrics\.jsonl has 2 of the 3 rows that it had when the checkpoint"),
    ],
)
def test_a_run_whose_rows_are_repeated_or_out_of_order_or_lack_one_in_the_middle_does_not_go_on(tmp_path, order, message):
    folder = interrupted(tmp_path / "run")
    metrics = folder.path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])
    lines.append(json.dumps(last | {"step": last["step"] + 1}) + "\n")  # written after the checkpoint, before a kill
    metrics.write_text("".join(lines[k] for k in order))
    with pytest.raises(InputError, match=message):
        folder.execute(StopRequest(), lambda moment: None)


def test_numbers_of_hundreds_of_digits_are_refused(tmp_path):
    folder = interrupted(tmp_path / "run")
    for name, key, message in (
        ("metrics.jsonl", "floats_up", r"metrics\.jsonl, line 1: floats_up must be a whole number below 2⁶³"),
        ("config.json", "bytes_per_float", r"config\.json: bytes_per_float: Number out of range"),
    ):
        file = folder.path / name
        file.write_text(re.sub(f'"{key}": \\d+', f'"{key}": {10**400}', file.read_text()))
        with pytest.raises(InputError, match=message):
            curves([folder])


@pytest.mark.parametrize("kept", [None, 0, -1])
def test_a_finished_run_without_its_last_row_is_not_shown(tmp_path, kept):
    folder = created(tmp_path / "run", configuration())
    folder.execute(StopRequest(), lambda moment: None)
    metrics = folder.path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.unlink() if kept is None else metrics.write_text("".join(lines[:kept]))
    with pytest.raises(InputError, match=rf"metrics\.jsonl does not end with step {folder.result['step']}, as the run did"):
        folder.rows()


def test_a_checkpoint_of_version_0_1_is_read_and_one_of_other_values_is_refused(tmp_path):
    folder = interrupted(tmp_path / "run")
    file = folder.path / "checkpoint"
    values = wire.decode(file.read_bytes().split(b"\n", 2)[2])

    def write(values):
        payload = wire.encode(values)
        file.write_bytes(MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)

    for change, message in (
        ({"step": "1"}, r"checkpoint: step: Expected `int`, got `str`"),
        ({"leaves": [1.0]}, r"checkpoint: leaves\[0\]: Expected `numpy.ndarray`, got `float`"),
        ({"totals": [1, 2, 3, 4, 5, 6]}, r"checkpoint: totals: Expected `array` of length 0 to 5"),
        ({"other": 1}, r"checkpoint: unknown entry 'other'"),
    ):
        write(values | change)
        with pytest.raises(InputError, match=message):
            folder.execute(StopRequest(), lambda moment: None)
    write({name: value for name, value in values.items() if name not in ("rows", "reported")})
    folder.execute(StopRequest(), lambda moment: None)
    whole = created(tmp_path / "whole", configuration())
    whole.execute(StopRequest(), lambda moment: None)
    assert without_seconds(folder.rows()) == without_seconds(whole.rows())


def test_the_configuration_repeats_the_run(tmp_path):
    first = created(tmp_path / "first", configuration(hyperparameters={"eta": "0.25"}))
    first.execute(StopRequest(), lambda moment: None)
    stored = first.configuration
    assert stored.hyperparameters["eta"] == 0.25
    second = created(tmp_path / "second", stored)
    second.execute(StopRequest(), lambda moment: None)
    assert without_seconds(first.rows()) == without_seconds(second.rows())
    assert {"python", "jax", "fedbilevel", "device"} <= set(json.loads((first.path / "config.json").read_text())["versions"])


def test_divergence_stops_at_once_and_says_where_and_what_to_try(tmp_path):
    folder = created(tmp_path / "run", configuration(algorithm="simfbo", hyperparameters={"gamma_y": 1e30}))
    seen = []
    with pytest.raises(Diverged) as caught:
        folder.execute(StopRequest(), seen.append, checkpoint_seconds=0)
    message = str(caught.value)
    assert message.startswith("SimFBO diverged at round ") and "gamma_y = 1e+30" in message and "Try steps" in message
    assert " y " in message or "lower_loss" in message
    assert seen[-1].totals.rounds < 40  # at once, not at the end of the budget
    assert folder.result["status"] == "diverged" and folder.result["reason"] == message
    assert folder.rows()[0]["step"] == 0
    assert all(np.isfinite(leaf).all() for leaf in checkpoint_leaves(folder))


def test_a_loss_above_its_bound_is_divergence():
    experiment = simulation(TASK, fb.SimFBO(gamma_y=3.0), rounds=200, every=5, loss_bound=50.0)
    with pytest.raises(Diverged, match=r"^SimFBO diverged at round .*: .*loss is .*, above the bound of 50\. .*Try steps"):
        finished(experiment)
    with pytest.raises(
        Diverged, match=r"^upper_loss is .*, above the bound of 1e-09, before the first step: raise the loss bound"
    ):
        finished(simulation(TASK, fb.SimFBO(), rounds=200, loss_bound=1e-9))  # smaller steps would not help


def test_a_checkpoint_that_is_damaged_foreign_or_of_another_run_is_refused(tmp_path):
    folder = created(tmp_path / "run", configuration())
    folder.execute(StopRequest(), lambda moment: None)
    (folder.path / "result.json").unlink()
    file = folder.path / "checkpoint"
    good, rows = file.read_bytes(), folder.rows()

    def refused(data, message):
        file.write_bytes(data)
        with pytest.raises(InputError, match=message):
            folder.execute(StopRequest(), lambda moment: None)
        assert file.read_bytes() == data and folder.rows() == rows  # nothing was overwritten

    refused(good[:-7], "truncated or damaged")
    refused(good[:40], "truncated or damaged")
    refused(b"", "not a checkpoint of fedbilevel")
    refused(b"PK\x03\x04 something else", "not a checkpoint of fedbilevel")
    other = created(tmp_path / "other", configuration(seed=4))
    other.execute(StopRequest(), lambda moment: None)
    refused((other.path / "checkpoint").read_bytes(), "belongs to a run with another configuration")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rounds=0), "rounds must be a whole number of at least 1 .and below 2³¹.; given: 0"),
        (dict(rounds=10, steps=10), "either a budget of rounds or a number of steps"),
        (dict(), "either a budget of rounds or a number of steps"),
        (dict(rounds=10, every=0), "every must be"),
        (dict(rounds=10, seed=-1), "seed must be"),
        (dict(rounds=10, loss_bound=float("nan")), "loss_bound must be"),
        (dict(rounds=10, participation=Uniform(6)), "between 1 and the number of clients, 5; given: 6"),
        (dict(rounds=10, algorithm=fb.FedBiOLocal()), "FedBiOLocal is for a local lower level"),
        (dict(rounds=2, algorithm=fb.FedBiOAcc()), "2 rounds are too few for FedBiOAcc"),
    ],
)
def test_impossible_experiments_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        finished(simulation(changes.pop("task", TASK), changes.pop("algorithm", fb.SimFBO()), **changes))


@pytest.mark.filterwarnings("ignore:The upper loss ends above its start")  # y begins better for f than g lets it be
def test_solve_takes_trees_unequal_clients_and_own_metrics():
    rng = np.random.default_rng(0)
    lower = [{"a": rng.standard_normal((n, 3)), "b": rng.standard_normal(n)} for n in (4, 9, 6)]

    def g(x, y, rows):
        return jnp.mean((rows["a"] @ y["w"] - rows["b"]) ** 2) + jnp.exp(x["log_ridge"]) * jnp.sum(y["w"] ** 2)

    def f(x, y, rows):
        return jnp.mean((rows["a"] @ y["w"] - rows["b"]) ** 2)

    found = fb.solve(
        f,
        g,
        {"log_ridge": jnp.array(0.0)},
        {"w": jnp.zeros(3)},
        lower=lower,
        upper=[{k: v[:2] for k, v in rows.items()} for rows in lower],
        algorithm=fb.SimFBO(),
        steps=50,
        metrics=lambda x, y: {"norm": jnp.linalg.norm(y["w"])},
    )
    assert set(found.x) == {"log_ridge"} and found.y["w"].shape == (3,)
    assert found.history[-1]["lower_loss"] < found.history[0]["lower_loss"]
    np.testing.assert_allclose(found.history[-1]["norm"], np.linalg.norm(found.y["w"]))
    with pytest.raises(InputError, match=r"f\(x, y, batch\) must return one real number, not float64\[5\]"):
        fb.solve(
            lambda x, y, rows: rows["b"],
            g,
            *[{"log_ridge": 0.0}, {"w": np.zeros(3)}],
            lower=lower[:1],
            algorithm=fb.SimFBO(),
            steps=1,
        )


@pytest.mark.filterwarnings("ignore:The upper loss ends above its start")  # y begins better for f than g lets it be
def test_a_local_solution_has_a_row_per_client():
    lower = [np.full((3, 2), float(m)) for m in range(4)]
    found = fb.solve(
        lambda x, y, rows: jnp.sum((y - 1) ** 2) + x**2,
        lambda x, y, rows: jnp.mean(jnp.sum((y - rows) ** 2, 1)) + 0 * x,
        jnp.array(0.5),
        jnp.zeros(2),
        lower=lower,
        algorithm=fb.FedBiOLocal(gamma=0.2),
        steps=40,
    )
    np.testing.assert_allclose(found.y, np.repeat(np.arange(4.0)[:, None], 2, 1), atol=1e-6)


def test_solving_again_with_other_step_sizes_compiles_nothing_anew(caplog):
    rows = [np.ones((3, 2)), np.zeros((2, 2))]

    def f(x, y, rows):
        return jnp.mean(jnp.sum((y["w"] - rows) ** 2, 1)) + x["s"] ** 2

    def go(**steps):
        return fb.solve(f, f, {"s": jnp.array(1.0)}, {"w": jnp.zeros(2)}, lower=rows, algorithm=fb.SimFBO(**steps), steps=3)

    def compiles(**steps):
        caplog.clear()
        with jax.log_compiles():
            go(**steps)
        return any("Compiling jit(advance)" in record.message for record in caplog.records)

    assert compiles() and not compiles(gamma_x=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(algorithm="simfboo"), "there is no algorithm .simfboo.; did you mean simfbo"),
        (dict(algorithm=fb.SimFBO), "algorithm must be a name or an instance such as FedBiOAcc"),
        (dict(lower=np.ones((2, 3, 2))), "lower must be a list with one entry per client, not ndarray"),
        (dict(lower=[np.ones((3, 2)), np.ones((3, 4))]), "client 1's rows have another shape"),
        (dict(weights=["a", "b"]), "weights must be 2 numbers above 0"),
        (dict(weights=[1.0, 0.0]), "weights must be 2 numbers above 0"),
        (dict(steps=2.5), "steps must be a whole number"),
        (dict(steps="5"), "steps must be a whole number"),
        (dict(seed=1.5), "seed must be a whole number"),
        (dict(clients_per_round=1.5), "clients_per_round must be a whole number"),
        (dict(clients_per_round=1, participation=Uniform(1)), "not both"),
        (dict(batch_size=2.5), "batch_size must be a whole number"),
        (dict(metrics=lambda x, y: {"both": y}), "the metric 'both' must be one number"),
        (dict(metrics=lambda x, y: {"step": x}), "the metric 'step' must be one number"),
        (dict(metrics=lambda x, y: {"status": x}), "the metric 'status' must be one number"),
        (dict(lower=[np.ones((3, 2)), np.full((2, 2), np.nan)]), "loss is not finite at the start"),
        (dict(g=lambda x, y, rows: rows @ y), r"g\(x, y, batch\) must return one real number"),
        (dict(g=lambda x, y, rows: jnp.sum((y - rows) ** 2)), "g must be a mean over its rows where .* it is 10, and .* is 2;"),
        (
            dict(f=lambda x, y, rows: jnp.sum(rows @ y) + x**2, batch_size=2, upper=[np.ones((3, 2))] * 2),
            "f must be a mean over",
        ),
    ],
)
def test_solve_refuses_what_it_cannot_use(changes, message):
    def loss(x, y, rows):
        return jnp.mean(jnp.sum((y - rows) ** 2, 1)) + x**2

    values = dict(f=loss, g=loss, x0=jnp.array(1.0), y0=jnp.zeros(2), lower=[np.ones((3, 2)), np.zeros((2, 2))])
    values |= dict(algorithm=fb.SimFBO(), steps=3)
    with pytest.raises(InputError, match=message):
        fb.solve(**values | changes)


def test_a_sum_over_equally_many_rows_is_the_loss_that_it_says():
    def total(x, y, rows):
        return jnp.sum((y - rows) ** 2) / 6 + x**2

    rows = [np.ones((3, 2)), np.zeros((3, 2))]
    found = fb.solve(total, total, jnp.array(1.0), jnp.zeros(2), lower=rows, algorithm=fb.SimFBO(gamma_y=0.5), steps=200)
    np.testing.assert_allclose(found.y, 0.5, atol=1e-3)


def test_a_solution_keeps_the_precision_that_it_started_with():
    def loss(x, y, rows):
        assert (x["half"].dtype, x["single"].dtype) == (jnp.bfloat16, jnp.float32)
        return jnp.mean((y - rows) ** 2) + x["single"] ** 2 + jnp.sum(x["half"].astype(float) ** 2)

    start = {"half": jnp.ones(3, jnp.bfloat16), "single": np.float32(1)}
    found = fb.solve(loss, loss, start, jnp.zeros(()), lower=[np.ones(4)], algorithm=fb.SimFBO(), steps=2)
    assert (found.x["half"].dtype, found.x["single"].dtype, found.y.dtype) == (jnp.bfloat16, jnp.float32, jnp.float64)


def test_a_round_that_memory_cannot_hold_is_refused_with_the_estimate(monkeypatch):
    monkeypatch.setattr(devices, "memory", lambda: 10**9)
    simulation(TASK, fb.SimFBO(), rounds=5)
    huge = dataclasses.replace(TASK, population=dataclasses.replace(TASK.population, batch_size=2**22))
    said = r"^a round of SimFBO: about [\d.]+ GB of memory are needed, and 1\.0 are there: lower batch_size"
    with pytest.raises(InputError, match=said):
        simulation(huge, fb.SimFBO(), rounds=5)
    wide = dataclasses.replace(TASK, x=np.broadcast_to(0.0, 10**9))
    with pytest.raises(InputError, match=said):
        simulation(wide, fb.SimFBO(), rounds=5)


def test_a_metric_that_is_not_finite_is_no_divergence():
    found = fb.solve(
        lambda x, y, rows: jnp.sum((y - rows) ** 2) + x**2,
        lambda x, y, rows: jnp.sum((y - rows) ** 2),
        jnp.array(1.0),
        jnp.zeros(1),
        lower=[np.ones((1, 1))],
        algorithm=fb.SimFBO(),
        steps=2,
        metrics=lambda x, y: {"odd": jnp.log(-1.0 - x**2)},
    )
    assert found.history[-1]["odd"] is None


def test_many_rows_of_metrics():
    *_, last = simulation(TASK, fb.FedAvg(), rounds=2500, every=1).run()
    assert last.step == 2500


def test_a_folder_is_run_by_one_process_at_a_time(tmp_path):
    folder = created(tmp_path / "run", configuration())
    seen = []

    def observe(moment):
        if not seen:
            seen.append(moment)
            with pytest.raises(InputError, match="is being run by another process"):
                RunFolder(folder.path).execute(StopRequest(), lambda moment: None)

    folder.execute(StopRequest(), observe)
    assert seen and folder.result["status"] == "finished"


def test_runs_are_created_all_or_none(tmp_path):
    created(tmp_path / "b", configuration())
    with pytest.raises(InputError, match="already holds a run"):
        RunFolder.create({tmp_path / "a": configuration(), tmp_path / "b": configuration()})
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a part of it is a file"):
        RunFolder.create({tmp_path / "file" / "run": configuration()})


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"{}", b'{"configuration": {"nonsense": 1}}'])
def test_a_configuration_that_is_none_is_refused(tmp_path, content):
    folder = created(tmp_path / "run", configuration())
    (folder.path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json: (JSON is malformed|Expected|Object missing|options: unknown entry)"):
        folder.execute(StopRequest(), lambda moment: None)


def test_matrix_products_are_in_the_arithmetic_asked_for():
    with jax.enable_x64(False):
        task = Quadratic().build()
        for products, preset in (("default", None), ("bfloat16", "BF16_BF16_F32")):
            experiment = simulation(task, SimFBO(), rounds=5, products=products)
            state = SimFBO().init(task.x, task.y, None)
            step = str(jax.make_jaxpr(SimulatedEngine.step)(experiment.engine, SimFBO(), state, jax.random.key(0)))
            assert "dot_general" in step and ("BF16_BF16_F32" in step) == (preset is not None)
        with pytest.raises(InputError, match="products must be one of default, float32, bfloat16; given: float8"):
            simulation(task, SimFBO(), rounds=5, products="float8")
    with pytest.raises(InputError, match="in single precision"):
        simulation(Quadratic().build(), SimFBO(), rounds=5, products="bfloat16")


@pytest.mark.parametrize("name", ["simfbo", "fedbioacc"])
def test_on_a_cpu_clients_are_computed_in_parts_whose_answers_fit_its_cache(monkeypatch, name):
    made = Configuration.resolve("quadratic", {"clients": 12}, name, {}, RunOptions(rounds=5)).experiment()
    assert made.engine.chunk_size is None
    task, key, shared = made.task, jax.random.key(3), simulated_clients.each_its_share

    def step(most, **given):
        computed = []

        def recorded(rows):
            computed.append(len(jax.tree.leaves(rows)[0]))
            return shared(rows)

        monkeypatch.setattr(simulated_clients, "each_its_share", recorded)
        monkeypatch.setattr(simulated_clients, "CACHED", most)
        engine = dataclasses.replace(made.engine, **given)

        @jax.jit
        def both():
            return engine.step(made.algorithm, engine.init(made.algorithm, task.x, task.y, key).state, key).state

        return jax.tree.leaves(both()), min(computed)

    whole, sizes = step(10**9)
    assert sizes == 12
    for given, expected in ((dict(), 2), (dict(chunk_size=12), 12), (dict(chunk_size=7), 6)):
        parts, sizes = step(1, **given)
        assert sizes == expected, "two clients, or as many as asked for, in parts of one size"
        for ours, theirs in zip(parts, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_metrics_where_all_runs_start_are_computed_once(monkeypatch):
    task, evaluated = Quadratic(clients=5, noise=0.3).build(), []
    evaluate = task.evaluate
    monkeypatch.setitem(vars(task), "evaluate", lambda x, y: (evaluated.append(x), evaluate(x, y))[1])
    first, second = (finished(simulation(task, SimFBO(), rounds=3, every=1, seed=seed)) for seed in (0, 1))
    assert first[0].metrics == second[0].metrics == experiment_module.numbers(evaluate(*task.start))
    computed = [x for x in evaluated if not isinstance(x, jax.core.Tracer)]
    assert len(computed) == 1 + 3 + 3 and first[1].metrics != second[1].metrics
