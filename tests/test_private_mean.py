"""Privacy of clients: clipped changes with the server's noise, calibrated, and the same in both engines."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import deployed
from private_rows import task

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.core.participation import Everyone
from fedbilevel.core.privacy_accounting import Event, epsilon
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.loopback import Loopback
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.federation.own_secret import private_key
from fedbilevel.runs.simulation import simulation
from fedbilevel.runs.sweeps.batched_runs import run_together

OWN = partial(private_key, bytes(32))
ROWS = {"x": np.asarray([[3.0, 4.0], [0.3, 0.4], [np.inf, 0.0], [9.0, 9.0]]), "y": np.asarray([0.0, 0.0, 1.0, 9.0])}
HERE = jnp.asarray([1.0, 1.0, 1.0, 0.0])  # the last is absent


def test_changes_are_clipped_as_one_vector_and_absent_members_do_not_count():
    rule = configured("private-mean(clip=2, noise=1e-12)")
    got = rule.combine(HERE, ROWS, None, jax.random.key(0))
    np.testing.assert_allclose(got["x"], (np.asarray([3, 4]) * 2 / 5 + [0.3, 0.4]) / 3, rtol=1e-9)
    around = {"x": jnp.asarray([0.3, 0.4]), "y": jnp.asarray(0.0)}
    moved = rule.combine(HERE, ROWS, around, jax.random.key(0))
    np.testing.assert_allclose(moved["x"], np.asarray([0.3, 0.4]) + np.asarray([2.7, 3.6]) * 2 / 4.5 / 3, rtol=1e-9)


def test_the_noise_has_its_size_in_every_array():
    rule = configured("private-mean(clip=2, noise=3)")
    each = jax.vmap(lambda key: rule.combine(HERE, ROWS, None, key))(jax.random.split(jax.random.key(1), 3000))
    found = np.c_[np.asarray(each["x"]), np.asarray(each["y"])]
    np.testing.assert_allclose(found.std(0), 3 * 2 / 3, rtol=0.06)
    assert np.abs(np.corrcoef(found.T) - np.eye(3)).max() < 0.08


def test_a_run_is_calibrated_and_says_what_it_has_spent():
    experiment = simulation(task(), fb.SimFBO(), steps=20, aggregate="private-mean(epsilon=5, delta=1e-4)")
    noise = experiment.engine.aggregation.noise
    spent = [moment.metrics["epsilon"] for moment in experiment.run() if moment.metrics]
    assert spent[0] == 0 and spent[-1] == epsilon(Counter({Event(1.0, noise): 20}), 1e-4)
    assert 4.95 < spent[-1] <= 5


def test_both_engines_add_the_same_noise_unless_the_server_has_a_secret():
    population, algorithm = task(sizes=(9, 9, 9), batch_size=None).population, fb.SimFBO()
    rule, start, key = configured("private-mean(noise=1)"), (jnp.zeros(3), jnp.zeros(3)), jax.random.key(0)

    def step(engine):
        return engine.step(algorithm, engine.init(algorithm, *start, key).state, key).state.x

    simulated = jax.jit(lambda: step(SimulatedEngine(population, Everyone(), aggregation=rule)))()
    engine, _ = deployed(algorithm, population, Everyone(), start, aggregation=rule)
    np.testing.assert_allclose(step(engine), simulated, rtol=1e-9)
    own = DeployedEngine(engine.exchange.transport, population, Everyone(), aggregation=rule, own=OWN)
    assert np.abs(step(own) - simulated).max() > 1e-4


def test_a_repeated_step_has_the_same_noise_only_if_its_answers_are_the_same():
    """Otherwise three times the mean of three less twice that of two would be the third client's, without any noise."""
    population, algorithm = task(sizes=(9, 9, 9), batch_size=None).population, fb.SimFBO()
    start, key = (jnp.zeros(3), jnp.zeros(3)), jax.random.key(0)

    def step(present, noise):
        rule = configured(f"private-mean(noise={noise})")
        _, runtimes = deployed(algorithm, population, Everyone(), start, aggregation=rule)
        there = Loopback({m: runtimes[m] for m in range(present)})
        engine = DeployedEngine(there, population, Everyone(), aggregation=rule, own=OWN)
        return np.asarray(engine.step(algorithm, engine.init(algorithm, *start, key).state, key).state.x)

    np.testing.assert_array_equal(step(3, 1), step(3, 1))
    three, two = (present * (step(present, 1) - step(present, 1e-12)) for present in (3, 2))
    assert np.abs(three - two).max() > 1e-3 * np.abs(three).max() > 0


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: simulation(task(), fb.FedMBO(), rounds=9, aggregate="private-mean(noise=1)"), "needs single answers"),
        (lambda: configured("private-mean(noise=1, epsilon=1)"), "^private-mean: give either epsilon"),
        (lambda: simulation(task(), fb.SimFBO(), rounds=9, aggregate="private-mean"), "^private-mean: give epsilon"),
        (
            lambda: simulation(task(), fb.SimFBO(), rounds=9, aggregate="private-mean(noise=1)", privacy="rows(noise=1)"),
            "leave out either",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(build, line):
    with pytest.raises(InputError, match=line):
        build()


@pytest.mark.parametrize("how", [{"aggregate": "private-mean(noise=1)"}, {"privacy": "rows(noise=2)"}])
def test_private_runs_that_are_compared_have_the_numbers_of_each_alone(how):
    problem = task(sizes=(40, 40))

    def made(seed):
        return simulation(problem, fb.SimFBO(gamma_x=0.1 / (1 + seed)), steps=6, every=3, seed=seed, clients_per_round=1, **how)

    for seed, together in enumerate(run_together([made(seed) for seed in range(3)])):
        alone = [moment.row() for moment in made(seed).run() if moment.metrics]
        for row, of in zip(together.rows, alone, strict=True):
            assert row["epsilon"] == of["epsilon"]
            np.testing.assert_allclose(row["upper_loss"], of["upper_loss"], rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "regularisation", "simfbo", "--rounds", 64, "--epsilon", 8], "give noise=VALUE in its place"),
        (
            ["sweep", "regularisation", "simfbo", "--rounds", 9, "--grid", "gamma_x=1,2", "--epsilon", 8],
            "epsilon is that of one",
        ),
        (["run", "regularisation", "simfbo", "--rounds", 9, "--epsilon", 8, "--set-privacy", "epsilon=3"], "leave one out"),
    ],
)
def test_an_epsilon_that_does_not_hold_is_refused_in_one_line(words, said, run):
    code, out, err = run(*words)
    assert code == 2 and not out and said in err and err.count("\n") == 1
