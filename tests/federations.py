"""Small federations that several tests use."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.aggregation import Mean
from fedbilevel.core.randomness import fold_in, wrapped
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.loopback import Loopback

SHARED_X = [name for name, entry in ALGORITHMS.items() if not entry.load().own_x]  # for the tasks that most tests use
AVERAGED = [name for name in SHARED_X if not (one := ALGORITHMS[name].configure(name, {})).single_answers and not one.pooled]


def weighted(population, weights):
    """The population with these weights, in any scale."""
    equal, weights = len(set(weights)) == 1, jnp.asarray(weights, float)
    return dataclasses.replace(population, weights=weights / weights.sum(), equal_weights=equal)


def deployed(
    algorithm,
    population,
    participation,
    start=None,
    stores=None,
    aggregation=Mean(),  # noqa: B008
    identities=None,
    opened=None,
    answered=None,
):
    """The population behind a loopback transport, and its clients' runtimes.

    Where the start (x, y) is given both ends check shapes.
    """
    weights = np.asarray(population.weights) * population.size
    known = call_shapes(algorithm, population, *start) if start else None
    runtimes = {
        m: ClientRuntime(
            algorithm,
            population.only(m),
            m,
            weights[m],
            known,
            stores[m] if stores else None,
            aggregation,
            identities and identities[m],
            noise=ServersKeys(m) if aggregation.clients_add_noise else None,
            answered=answered and answered[m],
        )
        for m in range(population.size)
    }
    signatures = identities and identities[0]
    engine = DeployedEngine(
        Loopback(runtimes), population, participation, known, aggregation=aggregation, signatures=signatures, opened=opened
    )
    return engine, runtimes


class ServersKeys:
    """Keys for a client's noise as a simulation has them, which the server knows."""

    def __init__(self, m):
        self.m = m

    def key(self, name, key, args):
        return np.asarray(jax.random.key_data(fold_in(wrapped(key), self.m)))


class MemoryStore:
    """What a client puts on its disk, in memory."""

    def __init__(self):
        self.saved = {}

    def save(self, step, data, keep):
        self.saved[step] = data

    def load(self, step):
        return self.saved[step]


def add(a, b):
    return type(a)(*(p + q for p, q in zip(a, b, strict=True)))


@partial(jax.jit, static_argnames="steps")
def trajectory(algorithm, simulator, x, y, steps):
    """All states of a run, stacked."""
    key = jax.random.key(0)

    def step(state, t):
        state = simulator.step(algorithm, state, jax.random.fold_in(key, t)).state
        return state, state

    start = simulator.init(algorithm, x, y, jax.random.fold_in(key, steps)).state
    return jax.lax.scan(step, start, jnp.arange(steps))[1]
