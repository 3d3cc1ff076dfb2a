"""Small federations that several tests use."""

import jax
import numpy as np

from fedbilevel.population import Population
from fedbilevel.remote import ClientRuntime, RemoteFederation
from fedbilevel.transports.loopback import Loopback


def own_part(population, m):
    """A population of client m alone, as its site would hold it."""

    def rows(shards):
        start, size = int(shards.start[m]), int(shards.size[m])
        return [jax.tree.map(lambda a: np.asarray(a[start : start + size]), shards.rows)]

    return Population.build(
        population.problem, rows(population.upper), rows(population.lower), batch_size=population.batch_size
    )


def deployed(algorithm, population, participation):
    """The population behind a loopback transport, and its clients' runtimes."""
    weights = np.asarray(population.weights) * population.size
    runtimes = {m: ClientRuntime(algorithm, own_part(population, m), m, weights[m]) for m in range(population.size)}
    return RemoteFederation(Loopback(runtimes), population.weights, participation, population.problem.sets), runtimes


def add(a, b):
    return type(a)(*(p + q for p, q in zip(a, b, strict=True)))
