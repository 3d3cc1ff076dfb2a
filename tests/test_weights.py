"""Every method solves min Σ w_m f_m with Σ w_m g_m, whoever takes part: against expectations over all cohorts there are.

A step that is right on average has, over all cohorts of n clients, the mean that the step with everyone has. Its means are
linear, so on quadratics, and where cohorts that meet in a product are drawn apart, that holds to rounding.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import SHARED_X, deployed, weighted
from jax import lax
from jax.flatten_util import ravel_pytree

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.participation import Bernoulli, Dropouts, Everyone, Participation, Uniform
from fedbilevel.core.population import Population
from fedbilevel.core.problem import FiveBatches, Pair, Point
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.engines.simulated_clients import SimulatedClients
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.base import Task
from fedbilevel.tasks.quadratic import PROBLEM, RIDGE, LowerRows, Quadratic, UpperRows

X, Y = np.linspace(-1, 1, 5), np.linspace(0.5, 1.5, 8)


class InTurn(Participation):
    """The k-th cohort that is drawn is the k-th of those given."""

    def __init__(self, cohorts, present=None):
        self.cohorts, self.present, self.size = iter(cohorts), present, cohorts[0].shape[-1]

    def capacity(self, population):
        return self.size

    def draw(self, key, population):
        return next(self.cohorts), self.present


def federation(clients, lower_level="global"):
    """Heterogeneous quadratics without noise and with weights of which the largest is seven times the smallest."""
    weights = np.geomspace(1, 7, clients)
    task = Quadratic(clients=clients, hessian_heterogeneity=0.8, condition=4.0, lower_level=lower_level)
    k = dataclasses.replace(task.coefficients(), weights=weights / weights.sum())
    return weighted(task.build().population, weights), k


def over_all_cohorts(of, cohorts, draws):
    """The mean of of([cohort of the first draw, of the second, ...]), each of the cohorts as likely as any other."""
    indices = np.array(list(itertools.product(range(len(cohorts)), repeat=draws)))
    found = jax.jit(lambda i: lax.map(lambda i: of(list(jnp.asarray(cohorts)[i])), i, batch_size=1000))(indices)
    return jax.tree.map(lambda leaf: np.asarray(leaf).mean(0), found)


def start_of(algorithm, population, parts):
    """A state to step from. To look at momenta start without: a new one is taken at a point that S itself has averaged."""
    clients = SimulatedClients(population, Everyone(), jax.random.key(0))
    state = algorithm.init(jnp.asarray(X), jnp.asarray(Y), clients)
    momenta = {name: jnp.zeros_like(getattr(state, name)) for name in MOMENTA & {*parts}}
    if hasattr(state, "z"):
        return state._replace(z=state.z._replace(u=jnp.asarray(Y[::-1])))
    return state._replace(**momenta, **({"u": jnp.asarray(Y[::-1])} if hasattr(state, "u") else {}))


MOMENTA = {"nu", "omega", "q"}
DOUBLE = dict(lower_rounds=1, local_steps=3)
SVRG = dict(lower_rounds=1, lower_solver="fedsvrg", local_steps=1)
NEUMANN = dict(neumann_terms=2, smoothness=3.0)
LOCAL = dict(local_steps=3, neumann_order=2)
STORM = dict(local_steps=1, neumann_order=2)

# name, settings, the parts of the state that must be right, number of draws in a step, number of clients
EXACT = [
    ("simfbo", dict(local_steps=3), "x y u", 1, 6),
    ("shrofbo", dict(local_steps=3), "x y u", 1, 6),
    ("mefbo", dict(local_steps=3), "x y theta", 1, 6),
    ("fedavg", dict(local_steps=3), "y", 1, 6),
    ("fedbio", dict(local_steps=3), "x y u", 1, 6),
    ("fedbioacc", dict(local_steps=3), "x y u", 1, 6),
    ("fedbioacc", dict(local_steps=1), "nu omega q", 1, 6),
    ("fedbio-local", LOCAL, "x", 1, 6),
    ("distbio", dict(neumann_order=2), "x", 1, 6),
    ("fedbioacc-local", LOCAL, "x", 1, 6),
    ("distbioacc", dict(neumann_order=2), "x", 1, 6),
    ("local-bsgvr", LOCAL, "x y", 1, 6),
    ("adafbio", LOCAL, "x y", 1, 6),
    ("lfednest", DOUBLE | NEUMANN | dict(lower_solver="sgd"), "x y", 2, 5),
    ("cm-soba", dict(one_in=1), "y u h", 1, 6),
    ("ef-soba", dict(one_in=1), "y u h", 1, 6),
    ("fedmsa", dict(local_steps=1), "x y u", 2, 5),
    ("commfedbio", DOUBLE | dict(one_in=1, system_rounds=1), "x y u", 3, 5),
    ("fedmbo", DOUBLE | NEUMANN | dict(estimator="ihgp"), "x y", 4, 4),
    ("fednest", SVRG | NEUMANN, "x y", 5, 4),
    ("fbo-aggitd", SVRG, "y", 1, 6),  # its x is biased: one cohort serves the whole step
    ("fbo-aggitd", DOUBLE | dict(lower_solver="fedavg"), "y", 1, 6),
    ("fedpace-local", dict(newton_steps=1, products=3), "m", 1, 6),
    ("fedpace", dict(minibatches=2), "m", 1, 6),  # what it moves along; how far depends on what S measures
]
VARIANTS = [  # momenta and lower solvers whose code another method above has run
    ("distbioacc", dict(neumann_order=2), "nu", 1, 6),
    ("local-bsgvr", STORM, "nu omega", 1, 6),
    ("adafbio", STORM, "nu omega", 1, 6),
    ("lfednest", DOUBLE | NEUMANN | dict(lower_solver="fedavg"), "x y", 2, 5),
    ("lfednest", SVRG | NEUMANN, "x y", 2, 5),
    ("fednest", DOUBLE | NEUMANN | dict(lower_solver="fedavg"), "x y", 5, 4),
]
# Methods that divide by lengths of what S answered: not their steps are right on average, but what they divide.
# name: settings, number of draws in a step, and what the parts of the state were divided by
NORMALISED = {
    "s-tfbo": (dict(), 1, lambda z: dict(x=z.alpha * jnp.fmax(z.beta, z.gamma), y=z.beta, u=jnp.fmax(z.beta, z.gamma))),
    "d-tfbo": (dict(lower_rounds=1, system_rounds=1), 3, lambda z: dict(y=z.beta)),  # its u and x start at a random y
}


def test_every_federated_method_is_among_these():
    assert {name for name, *_ in EXACT} | {*NORMALISED} == {
        name for name in SHARED_X if not ALGORITHMS[name].preset.get("pooled")
    }


def prepared(name, settings, clients, parts):
    """An algorithm, its federation, where it starts, and a key of which chains make a round of their own."""
    algorithm = ALGORITHMS[name].configure(name, settings)
    population, _ = federation(clients, algorithm.lower_level)
    keys = (jax.random.key(k) for k in itertools.count())
    key = next(k for k in keys if not hasattr(algorithm, "lengths") or algorithm.lengths(k, 1).max() == 1)
    return algorithm, population, start_of(algorithm, population, parts), key


def stepped(algorithm, population, state, key, participation, parts):
    after = algorithm.step(state, SimulatedClients(population, participation, jax.random.key(1)), key)
    return [part_of(after, part) for part in parts]


def part_of(state, name):
    """A part of a state as a vector."""
    return ravel_pytree(getattr(state, name))[0]


QUICK = ("fedbio", "simfbo", "fedmbo", "fednest", "fedbioacc-local")  # one of each way to weigh


def slow(values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("n", [2, slow([1]), slow([3])])
@pytest.mark.parametrize(
    ("name", "settings", "parts", "draws", "clients"),
    [*(line if line[0] in QUICK else slow(line) for line in EXACT), *(slow(line) for line in VARIANTS)],
)
def test_the_mean_of_a_step_over_all_cohorts_is_the_step_with_everyone(name, settings, parts, draws, clients, n):
    parts = parts.split()
    algorithm, population, state, key = prepared(name, settings, clients, parts)
    everyone = jax.jit(lambda: stepped(algorithm, population, state, key, Everyone(), parts))()
    cohorts = np.array(list(itertools.combinations(range(clients), n)))
    means = over_all_cohorts(lambda S: stepped(algorithm, population, state, key, InTurn(S), parts), cohorts, draws)
    for part, mean, wanted in zip(parts, means, everyone, strict=True):
        assert np.linalg.norm(wanted - part_of(state, part)) > 1e-3
        np.testing.assert_allclose(mean, wanted, rtol=1e-9, atol=1e-12, err_msg=part)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", NORMALISED)
def test_what_is_normalised_is_right_on_average(name, n):
    settings, draws, divisors = NORMALISED[name]
    algorithm, population, state, key = prepared(name, settings, 5, ())

    def directions(participation):
        after = algorithm.step(state, SimulatedClients(population, participation, jax.random.key(1)), key)
        return {part: (getattr(state, part) - getattr(after, part)) * by for part, by in divisors(after).items()}

    everyone = jax.jit(lambda: directions(Everyone()))()
    cohorts = np.array(list(itertools.combinations(range(5), n)))
    means = over_all_cohorts(lambda S: directions(InTurn(S)), cohorts, draws)
    for part, wanted in everyone.items():
        np.testing.assert_allclose(means[part], wanted, rtol=1e-9, atol=1e-12, err_msg=part)


@pytest.mark.parametrize("participation", [Uniform(2), Dropouts(Uniform(3), 0.3)], ids=str)
def test_ef_soba_keeps_the_mean_of_its_clients_memories(participation):
    """So what a sample of them lacks is right on average in later steps too."""
    algorithm, population, state, _ = prepared("ef-soba", {}, 5, ())
    step = jax.jit(SimulatedEngine(population, participation).step)
    for k in range(6):
        state, *_ = step(algorithm, state, jax.random.key(k))
    for mean, rows in zip(state.memory, state.memories.rows, strict=True):
        assert np.linalg.norm(mean) > 0.1
        np.testing.assert_allclose(mean, np.mean(rows, 0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_so_it_is_given_that_n_of_all_are_present(n):
    """M/n counts those who are there: where absence does not depend on who is who, a step is right for each n >= 1."""
    parts = ["x", "y", "u"]
    algorithm, population, state, key = prepared("fedbio", {}, 5, parts)
    everyone = jax.jit(lambda: stepped(algorithm, population, state, key, Everyone(), parts))()

    def step(masks):
        return stepped(algorithm, population, state, key, InTurn([jnp.arange(5)], masks[0]), parts)

    present = np.array([[m in S for m in range(5)] for S in itertools.combinations(range(5), n)])
    for mean, wanted in zip(over_all_cohorts(step, present, 1), everyone, strict=True):
        np.testing.assert_allclose(mean, wanted, rtol=1e-9, atol=1e-12)


def test_both_engines_say_how_far_the_members_of_a_cohort_are_apart():
    """About the members' own average, whatever the estimate for all clients is; one member is nowhere apart."""
    algorithm = fb.FedAvg(local_steps=3)
    population, k = federation(5)
    for members in ([3, 0, 4], [1]):
        weights, each = k.weights[members], []
        for m in members:
            y = Y
            for _ in range(3):
                y = y - algorithm.gamma * (k.A[m] @ y - k.B[m] @ X - k.b[m])
            each.append(y)
        wanted = Y + 5 / len(members) * weights @ (np.stack(each) - Y)
        average = weights / weights.sum() @ np.stack(each)
        apart = np.sqrt(weights / weights.sum() @ np.sum((each - average) ** 2, 1))
        simulated = SimulatedEngine(population, InTurn([np.array(members)]))
        remote, _ = deployed(algorithm, population, InTurn([np.array(members)]))
        for engine in (simulated, remote):
            state, _, reported = engine.step(algorithm, Pair(jnp.asarray(X), jnp.asarray(Y)), jax.random.key(0))
            np.testing.assert_allclose(state.y, wanted, rtol=1e-12)
            np.testing.assert_allclose(reported["drift"], apart, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("participation", [Bernoulli(0.4), Dropouts(Everyone(), 0.5), Dropouts(Uniform(4), 0.5)], ids=str)
def test_given_how_many_are_present_each_client_is_as_often_as_any_other(participation):
    ids, active = map(np.asarray, jax.vmap(lambda k: participation.draw(k, 6))(jax.random.split(jax.random.key(0), 20_000)))
    for n in (1, 2, 3):
        rows = active.sum(1) == n
        often = np.bincount(ids[rows][active[rows]], minlength=6)
        expected = rows.sum() * n / 6
        assert expected > 300 and np.all(np.abs(often - expected) < 4.5 * np.sqrt(expected))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("estimator", ["phe", "ihgp"])
def test_hypergradient_estimates_are_right_over_all_cohorts(estimator, n):
    """PHE's chains move from row to row of a cohort, so every order of its members counts."""
    algorithm = fb.FedMBO(estimator=estimator, **NEUMANN)
    population, k = federation(5)
    key = next(k for k in map(jax.random.key, itertools.count()) if algorithm.lengths(k, n).max() == 1)

    def estimate(S):
        clients = SimulatedClients(population, InTurn(S), jax.random.key(1))
        return algorithm.hypergradient(jnp.asarray(X), jnp.asarray(Y), clients, key)

    found = over_all_cohorts(estimate, np.array(list(itertools.permutations(range(5), n))), 3)
    A, B, _, c, d = (getattr(k.mean(), name)[0] for name in "ABbcd")
    powers = [np.linalg.matrix_power(np.eye(8) - A / 3, int(N)) for N in algorithm.lengths(key, n)]
    p = 2 / 3 * np.mean(powers, 0) @ (Y - c)
    np.testing.assert_allclose(found, RIDGE * (X - d) + B.T @ p, rtol=1e-9)


@pytest.mark.slow
def test_fbo_aggitd_is_biased_by_sampling_even_with_equal_weights_and_says_so():
    """One cohort serves the whole step. The mean over all of them, and over all Q, is off by less the more take part."""
    algorithm = fb.FBOAggITD(lower_rounds=5)
    task = Quadratic(clients=7, hessian_heterogeneity=0.8, condition=4.0).build()
    keys = {int(jax.random.randint(key, (), 0, 6)): key for key in map(jax.random.key, range(60))}
    assert len(keys) == 6

    def estimate(S):
        def with_its_Q(key):
            clients = SimulatedClients(task.population, InTurn(S), jax.random.key(1))
            return algorithm.aggregate(jnp.asarray(X), jnp.asarray(Y), clients, clients.draw(), key)[0]

        return jax.vmap(with_its_Q)(jnp.stack([*keys.values()])).mean(0)

    means = [over_all_cohorts(estimate, np.array(list(itertools.combinations(range(7), n))), 1) for n in (1, 2, 3, 7)]
    off = [np.linalg.norm(mean - means[-1]) / np.linalg.norm(means[-1]) for mean in means[:-1]]
    np.testing.assert_allclose(off, [0.208, 0.084, 0.044], atol=1e-3)


DROPOUTS = Dropouts(Uniform(3), 0.2)
CAVEATS = [
    (fb.FBOAggITD(), Uniform(3), "FBO-AggITD draws one cohort"),
    (fb.FBOAggITD(), Uniform(6), ""),
    (fb.FBOAggITD(), Everyone(), ""),
    (fb.SimFBO(rescale=True, spread=1), Uniform(3), "ShroFBO's ρ"),
    (fb.SimFBO(rescale=True, spread=1), Everyone(), ""),
    (fb.SimFBO(spread=1), DROPOUTS, ""),
    (fb.FedMBO(), DROPOUTS, "FedMBO's chains skip"),
    (fb.FedMBO(), Uniform(3), ""),
    (fb.FedMBO(estimator="ihgp"), DROPOUTS, ""),
    (fb.FedBiO(), DROPOUTS, ""),
]


@pytest.mark.parametrize(("algorithm", "participation", "caveat"), CAVEATS)
def test_a_method_that_cannot_be_right_says_so(algorithm, participation, caveat):
    task = Quadratic(clients=6).build()
    found = simulation(task, algorithm, steps=1, participation=participation).caveats()
    assert len(found) == bool(caveat) and all(sentence.startswith(caveat) for sentence in found)


@pytest.mark.slow
def test_fedbio_with_two_clients_at_a_time_ends_at_the_weighted_solution():
    """In the mean over runs; with weights normalised within the cohort it would end a tenth away."""
    population, k = federation(6)
    algorithm = fb.FedBiO(eta=0.02, gamma=0.1, tau=0.1, local_steps=1)
    task = dataclasses.replace(Quadratic(clients=6).build(), population=population)
    engine = simulation(task, algorithm, steps=1, participation=Uniform(2)).engine

    def run(key):
        state, *_ = engine.init(algorithm, task.x, task.y, key)

        def step(carry, t):
            state, total = carry
            state, *_ = engine.step(algorithm, state, jax.random.fold_in(key, t))
            return (state, total + jnp.where(t > 3000, state.x, 0)), None

        return lax.scan(step, (state, jnp.zeros(5)), jnp.arange(6000))[0][1] / 2999

    found = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 64))).mean(0)
    x_star = k.mean().upper()
    assert np.linalg.norm(found - x_star) < 0.02 * np.linalg.norm(x_star)


# One client with all rows ---------------------------------------------------------------------------------------------

SIZES, WEIGHTS = [3, 5, 1, 4], np.array([0.15, 0.4, 0.1, 0.35])


def ragged(weights, batch_size=None):
    rng = np.random.default_rng(0)
    upper = [UpperRows(rng.standard_normal((n, 2)), rng.standard_normal((n, 3))) for n in SIZES]
    lower = [LowerRows(np.stack([np.eye(2)] * n), rng.standard_normal((n, 2, 3)), rng.standard_normal((n, 2))) for n in SIZES]
    return Population.build(PROBLEM, upper, lower, weights, batch_size)


@pytest.mark.parametrize("weights", [WEIGHTS, np.array(SIZES)], ids=["of their own", "by rows"])
def test_pooled_rows_weigh_as_their_clients_do(weights):
    population = ragged(weights)
    u = jnp.array([1.0, -1.0])

    @jax.jit
    def directions(batch):
        return jnp.concatenate(PROBLEM.direction(Point(jnp.ones(3), jnp.arange(2.0), u), FiveBatches(*[batch] * 5)))

    each = np.stack([directions(population.whole(m)) for m in range(4)])
    pooled = directions(population.pooled().client(0, jax.random.key(0)).whole())
    np.testing.assert_allclose(pooled, weights / weights.sum() @ each, rtol=1e-12)


def test_pooled_minibatches_draw_a_client_by_its_weight_and_then_a_row_of_it():
    shards = [np.full((n, 1), 10.0 * m) + np.arange(n)[:, None] for m, n in enumerate(SIZES)]
    pooled = Population.build(PROBLEM, shards, shards, WEIGHTS, batch_size=40_000).pooled()
    batch = pooled.client(0, jax.random.key(0)).batch()
    for rows in batch:
        values, counts = np.unique(np.asarray(rows), return_counts=True)
        np.testing.assert_array_equal(values, np.concatenate(shards).ravel())
        expected = 40_000 * np.repeat(WEIGHTS / SIZES, SIZES)
        assert np.all(np.abs(counts - expected) < 4.5 * np.sqrt(expected))
    assert not np.array_equal(batch.upper, batch.lower)


@pytest.mark.parametrize(("weights", "caveat"), [(None, "clients with more rows weigh more"), (WEIGHTS, "")])
def test_pooled_rows_of_equal_clients_count_the_same_and_that_is_said(weights, caveat):
    task = Task(ragged(weights), jnp.zeros(3), jnp.zeros(2), lambda x, y: {})
    found = simulation(task, ALGORITHMS["stocbio"].configure("stocbio", {}), steps=1).caveats()
    assert len(found) == bool(caveat) and all(caveat in sentence for sentence in found)
