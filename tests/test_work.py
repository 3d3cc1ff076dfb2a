"""The derivatives that clients compute are counted as they are computed."""

import collections
import dataclasses
import itertools

import jax
import pytest
from federations import deployed

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.participation import Bernoulli, Dropouts, Everyone, Uniform
from fedbilevel.core.population import Client
from fedbilevel.core.problem import Problem
from fedbilevel.runs.derivative_counts import CountingClient, CountingProblem, Tally, Work
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.quadratic import PROBLEM, Quadratic

COUNTED = collections.Counter()


@dataclasses.dataclass(frozen=True)
class Honest(Problem):
    """A problem that computes its derivatives, and counts the minibatches that each of them was asked for."""

    batch_size: int = 1


def count(kind, x, rows, batch_size):
    COUNTED[kind] += len(jax.tree.leaves(rows)[0]) // batch_size
    if isinstance(x, jax.core.Tracer):  # FedPace differentiates its direction along x
        COUNTED["second_order"] += len(jax.tree.leaves(rows)[0]) // batch_size


def counting(name, part, kind):
    def derivative(self, x, y, batch, *v):
        count(kind, x, getattr(batch, part), self.batch_size)
        return getattr(Problem, name)(self, x, y, batch, *v)

    return derivative


for name, part in (("fx", "upper"), ("fy", "upper"), ("gx", "lower"), ("gyy", "lower"), ("gxy", "lower")):
    setattr(Honest, name, counting(name, part, "gradients" if len(name) == 2 else "second_order"))


def lower_gradient(self, x, y, batch):
    if not isinstance(y, jax.core.Tracer):  # a second-order product differentiates it: that is not one more
        count("gradients", x, batch.lower, self.batch_size)
    return Problem.gy(self, x, y, batch)


Honest.gy = lower_gradient


@pytest.mark.parametrize(
    ("name", "settings", "participation"),
    [
        pytest.param("fedbioacc", dict(local_steps=2), Dropouts(Everyone(), 0.4), marks=pytest.mark.slow),
        pytest.param("fedmbo", dict(neumann_terms=4, lower_rounds=2), Uniform(2), marks=pytest.mark.slow),
        ("simfbo", dict(spread=2), Everyone()),
        pytest.param("mefbo", dict(local_steps=2), Bernoulli(0.5), marks=pytest.mark.slow),
        ("fedpace", dict(minibatches=2), Uniform(2)),
        pytest.param("fbo-aggitd", dict(lower_rounds=3), Uniform(2), marks=pytest.mark.slow),
        pytest.param("commfedbio", dict(lower_rounds=2, system_rounds=2), Uniform(2), marks=pytest.mark.slow),
        pytest.param("fedbioacc-local", dict(local_steps=2, neumann_order=2), Uniform(2), marks=pytest.mark.slow),
    ],
)
def test_the_tally_is_what_deployed_clients_compute(name, settings, participation):
    algorithm = ALGORITHMS[name].configure(name, settings)
    task = Quadratic(clients=3, noise=0.1, lower_level=type(algorithm).lower_level).build()
    experiment = simulation(task, algorithm, steps=2, participation=participation)
    expected = Tally(experiment).at([0, 1, 2])

    population = task.population
    honest = Honest(population.problem.f, population.problem.g, batch_size=population.batch_size)
    federation, _ = deployed(algorithm, dataclasses.replace(population, problem=honest), participation)
    COUNTED.clear()
    seen = []
    with jax.disable_jit():
        key = jax.random.key(0)
        state, *_ = federation.init(algorithm, task.x, task.y, jax.random.fold_in(key, 0))
        seen.append(Work(**COUNTED))
        for step in (1, 2):
            state, *_ = federation.step(algorithm, state, jax.random.fold_in(key, step))
            seen.append(Work(**COUNTED))
    assert seen == expected


def test_the_tally_of_a_long_run_grows_with_its_steps():
    task = Quadratic(clients=4, noise=0.1).build()
    algorithm = ALGORITHMS["fedbio"].configure("fedbio", {"local_steps": 3})
    tally = Tally(simulation(task, algorithm, steps=1))
    assert tally.at([1, 2], seed=5) == [Work(36, 24), Work(72, 48)]
    assert tally.at([0, 1, 1000]) == [Work(0, 0), Work(4 * 3 * 3, 4 * 3 * 2), Work(1000 * 36, 1000 * 24)]


def test_all_that_a_client_has_can_be_counted():
    counting = CountingClient(CountingProblem(PROBLEM.f, PROBLEM.g), 0, full_batches=True)
    assert {name for name in dir(Client) if not name.startswith("_")} <= {*dir(counting)}


def test_fbo_aggitd_begins_z_once_and_contracts_it_in_the_later_rounds():
    """By its Algorithm 1 a client computes ∇_y f once, and ∇²_yy g z at each t > Q."""
    N, clients = 4, 3
    algorithm = ALGORITHMS["fbo-aggitd"].configure("fbo-aggitd", dict(lower_rounds=N, lower_solver="sgd"))
    steps = range(40)
    works = Tally(simulation(Quadratic(clients=clients).build(), algorithm, steps=1)).at(steps)
    each = [Work(b.gradients - a.gradients, b.second_order - a.second_order) for a, b in itertools.pairwise(works)]
    # per client: N times ∇_y g, ∇_y f, ∇_x f in h, and twice ∇_x f in the upper round; N - Q contractions, and ∇²_xy g in h
    assert {work.gradients for work in each} == {clients * (N + 4)}
    assert {work.second_order for work in each} == {clients * (N - Q + 1) for Q in range(N + 1)}
