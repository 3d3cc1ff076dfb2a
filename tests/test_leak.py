"""What the server can read out of gradients, in a small data-cleaning run: the numbers that docs/federation.md has.

The gradient on the weights of a hidden unit, divided by that on its bias, is the row that activates it, if it is only one; the
gradient on the last bias is below 0 only at labels of the rows. No optimisation is needed, as it is where several rows activate
every unit (L. Zhu, Z. Liu and S. Han, Deep Leakage from Gradients, NeurIPS 2019).
"""

import functools

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.engines import wire
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.messages import Call, Request
from fedbilevel.errors import InputError
from fedbilevel.federation.site_policy import SitePolicy
from fedbilevel.tasks.data_cleaning import DataCleaning

SITES, ROWS, DECAY = 3, 110, 1e-3
PIXELS, HIDDEN, CLASSES = 64, 32, 10
ALGORITHM = fb.FedMBO()


@functools.cache
def task_of(batch_size):
    return DataCleaning(clients=SITES, layers=2, hidden=HIDDEN, rc=DECAY, batch_size=batch_size).build()


class Attacker:
    """The server, which sends requests that are well-formed for the algorithm, and keeps what it can read."""

    def __init__(self, batch_size):
        self.task = task_of(batch_size)
        self.sites = [ClientRuntime(ALGORITHM, self.task.population.only(m), m) for m in range(SITES)]
        rows = self.task.population.lower.rows
        self.images, self.labels = np.asarray(rows.images[:ROWS]).reshape(ROWS, -1) / 255, np.asarray(rows.labels[:ROWS])
        self.found = set()  # rows of the first site

    def gradient(self, m, x, number):
        """What site m answers to request `number`."""
        key = np.asarray(jax.random.key_data(jax.random.key(number)))
        call = Call("lower_gradient", key, (np.asarray(x), np.asarray(self.task.y)), None)
        return wire.decode(self.sites[m].answer(wire.encode(Request(call, True, []))))

    def read(self, gradient, regularised=1):
        """Note the rows that alone activate a hidden unit; `regularised` is how many terms λ |y|² are in the gradient."""
        alone = np.asarray(gradient - regularised * 2 * DECAY * self.task.y)
        weights, bias, _, last = np.split(alone, np.cumsum([PIXELS * HIDDEN, HIDDEN, HIDDEN * CLASSES]))
        weights = weights.reshape(PIXELS, HIDDEN)
        active = np.abs(bias) > 1e-9
        images, labels = (weights[:, active] / bias[active]).T, last < 0
        near = (np.abs(self.images[:, None] - images) < 1 / 255).all(2).any(1)
        self.found |= set(np.flatnonzero(near & labels[self.labels]))

    def weights_on(self, row):
        """An x with all weight on one row of the first site."""
        return np.where(np.arange(self.task.x.size) == row, 40.0, -40.0)


@pytest.mark.parametrize(("batch_size", "of_one", "of_sums"), [(1, 68, 58), (32, 14, 5)])
def test_a_server_that_follows_the_algorithm_reads_fewer_rows_from_minibatches_and_from_sums(batch_size, of_one, of_sums):
    """From 100 answers at the start; a sum over the three sites is all that the server has with secure sums."""
    one, sums = Attacker(batch_size), Attacker(batch_size)
    for number in range(100):
        each = [one.gradient(m, one.task.x, number) for m in range(SITES)]
        one.read(each[0])
        sums.read(sum(each), SITES)
    assert (len(one.found), len(sums.found)) == (of_one, of_sums)


@pytest.mark.parametrize("policy", [SitePolicy(least_batch_size=20), SitePolicy(least_rows=20)])
def test_a_site_can_insist_on_the_larger_minibatches(policy):
    policy.agree_rows(task_of(32).population.only(0))
    with pytest.raises(InputError, match="this site insists on"):
        policy.agree_rows(task_of(1).population.only(0))


@pytest.mark.parametrize("sums", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_that_chooses_x_reads_all_rows_whatever_a_site_insists_on(sums):
    """All weight on one row: the gradient is that row's, and so is the sum of all sites' gradients, but for known terms."""
    attacker, rule = Attacker(batch_size=32), configured("secure-sum(bound=10)")
    SitePolicy(least_batch_size=20, least_rows=20).agree_rows(attacker.task.population.only(0))
    for row in range(ROWS):
        x = attacker.weights_on(row)
        for number in range(60):  # until the row is in the minibatch
            if row in attacker.found:
                break
            if sums:
                each = [attacker.gradient(m, x, number) for m in range(SITES)]
                whole = sum(rule.encode(None, g, np.zeros_like(g))[0] for g in each)
                attacker.read(np.asarray(whole) * rule.step, SITES)
            else:
                attacker.read(attacker.gradient(0, x, number))
    assert len(attacker.found) == ROWS
