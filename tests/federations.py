"""Small federations that several tests use."""

import numpy as np

from fedbilevel.engines.call_shapes import signatures
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.deployed import RemoteFederation
from fedbilevel.engines.loopback import Loopback


def deployed(algorithm, population, participation, start=None, vaults=None):
    """The population behind a loopback transport, and its clients' runtimes.

    Where the start (x, y) is given both ends check shapes.
    """
    weights = np.asarray(population.weights) * population.size
    known = signatures(algorithm, population, *start) if start else None

    def client(m):
        part = population.only(m)
        there = signatures(algorithm, part, *start) if start else None
        return ClientRuntime(algorithm, part, m, weights[m], there, vaults[m] if vaults else None)

    runtimes = {m: client(m) for m in range(population.size)}
    federation = RemoteFederation(
        Loopback(runtimes), population.weights, participation, population.problem.sets, known, population.problem.metric_names
    )
    return federation, runtimes


def add(a, b):
    return type(a)(*(p + q for p, q in zip(a, b, strict=True)))
