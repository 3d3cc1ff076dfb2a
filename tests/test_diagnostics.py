"""What algorithms report about their steps: the right numbers, in both engines, everywhere that metrics go."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import SHARED_X, deployed

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.participation import Everyone, Uniform
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.report.curves import curves, diagnostics, metrics
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.simulation import simulation
from fedbilevel.runs.stopping import StopRequest
from fedbilevel.tasks.quadratic import Quadratic

QUICK = ("fedbio", "simfbo", "mefbo", "fedbio-local")
FEDERATED = [name for name in SHARED_X if not ALGORITHMS[name].preset.get("pooled")]


def task_for(algorithm, **knobs):
    return Quadratic(clients=4, noise=0.2, lower_level=type(algorithm).lower_level, **knobs).build()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FEDERATED])
def test_both_engines_report_the_same(name):
    algorithm = ALGORITHMS[name].configure(name, {})
    task, key = task_for(algorithm), jax.random.key(5)
    simulator = SimulatedEngine(task.population, Uniform(3))
    remote, _ = deployed(algorithm, task.population, Uniform(3))
    states = [jax.jit(simulator.init)(algorithm, task.x, task.y, key).state, remote.init(algorithm, task.x, task.y, key).state]
    ours, theirs = jax.jit(simulator.step)(algorithm, states[0], key), remote.step(algorithm, states[1], key)
    assert set(ours.reported) == set(theirs.reported) == set(algorithm.reports)
    for number in ours.reported:
        assert np.isfinite(ours.reported[number])
        np.testing.assert_allclose(ours.reported[number], theirs.reported[number], rtol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_drift_is_the_distance_from_the_average(chunk_size):
    """FedAvg's clients by hand: with full batches each makes the same local steps alone."""
    algorithm = fb.FedAvg(gamma=0.3, local_steps=3)
    task = Quadratic(clients=4).build()
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    population = dataclasses.replace(task.population, weights=jnp.asarray(weights))
    engine = SimulatedEngine(population, Everyone(), chunk_size)
    made = engine.step(algorithm, algorithm.init(task.x, task.y, None), jax.random.key(0))
    alone = np.stack([algorithm.local_y(population.client(m, jax.random.key(0)), task.x, task.y) for m in range(4)])
    average = weights @ alone
    np.testing.assert_allclose(made.state.y, average, rtol=1e-9)
    np.testing.assert_allclose(made.reported["drift"], np.sqrt(weights @ np.sum((alone - average) ** 2, 1)), rtol=1e-9)


def test_simfbo_reports_its_u_and_its_hypergradient():
    task, algorithm = task_for(fb.SimFBO()), fb.SimFBO(local_steps=2)
    *_, before, after = itertools.islice(simulation(task, algorithm, steps=6, every=1).run(), 6)
    moved = np.linalg.norm(after.state.x - before.state.x) / (algorithm.gamma_x * 2)
    assert after.step == before.step + 1
    np.testing.assert_allclose(after.reported["hypergradient_norm"], moved, rtol=1e-6)
    np.testing.assert_allclose(after.reported["u_norm"], np.linalg.norm(after.state.u), rtol=1e-9)


@pytest.mark.parametrize("rescale", [False, True])
def test_unequal_local_steps_count_in_the_reported_hypergradient(rescale):
    """Where all directions are the same, so is their length: with τ_m = 2, 3, 2, 3 a step has 2.5 of them on average."""
    task = Quadratic(clients=4, hessian_heterogeneity=0, linear_heterogeneity=0).build()
    tiny = dict(eta_x=1e-12, eta_y=1e-12, eta_u=1e-12)
    equal, unequal = (
        SimulatedEngine(task.population, Everyone())
        .step(algorithm, algorithm.init(task.x, task.y, None), jax.random.key(0))
        .reported["hypergradient_norm"]
        for algorithm in (fb.SimFBO(local_steps=1, **tiny), fb.SimFBO(local_steps=2, spread=1, rescale=rescale, **tiny))
    )
    np.testing.assert_allclose(unequal, equal, rtol=1e-9)


def test_what_is_reported_reaches_rows_snapshots_and_the_page_but_is_no_metric(tmp_path):
    configuration = Configuration.resolve("quadratic", {"clients": 3}, "fedbioacc", {}, RunOptions(rounds=21, every=10))
    (folder,) = RunFolder.create({tmp_path / "run": configuration})
    seen = []
    folder.execute(StopRequest(), seen.append)
    reported = {"drift", "hypergradient_norm", "u_norm", "alpha_t"}
    assert set(seen[-1].reported) == reported and reported <= set(folder.rows()[-1])
    assert not reported & set(folder.rows()[0])  # no step was made yet
    (curve,) = curves([folder])
    assert set(diagnostics([curve])) == reported and not reported & set(metrics([curve]))
    assert reported <= set(json.loads((folder.path / "result.json").read_bytes()))


def test_a_number_that_is_not_declared_is_refused():
    class Talkative(fb.FedAvg):
        def step(self, state, clients, key):
            clients.report(noise=1.0)
            return state

    algorithm = jax.tree_util.register_dataclass(Talkative, ["gamma"], ["local_steps"])()
    task = task_for(algorithm)
    with pytest.raises(TypeError, match=r"Talkative\.reports does not declare noise"):
        SimulatedEngine(task.population, Everyone()).step(algorithm, algorithm.init(task.x, task.y, None), jax.random.key(0))


def test_reports_are_for_the_step_itself():
    class Looping(fb.FedAvg):
        def step(self, state, clients, key):
            def body(k, y):
                clients.report(drift=1.0)
                return y

            return state._replace(y=clients.loop(2, body, state.y))

    algorithm = jax.tree_util.register_dataclass(Looping, ["gamma"], ["local_steps"])()
    task = task_for(algorithm)
    with pytest.raises(TypeError, match="outside loops"):
        SimulatedEngine(task.population, Everyone()).step(algorithm, algorithm.init(task.x, task.y, None), jax.random.key(0))
