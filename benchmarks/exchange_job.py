"""The two ends of the exchange that `federation_exchange.py` measures: ours and FLARE's own calls, in one job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from nvflare.collab import collab

from fedbilevel.algorithms.base import Algorithm, algorithm
from fedbilevel.core.clients import Client, Clients, at_client
from fedbilevel.core.participation import Everyone
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Pair, Problem
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.federation.flare import Flare
from fedbilevel.federation.site import Site

SIZES = {"4 KB": 1024, "600 KB": 150_000, "10 MB": 2_500_000}  # floats of 4 bytes
REPEATS = {"4 KB": 60, "600 KB": 40, "10 MB": 12}
WARM = 3
BYTES_RECEIVED, BYTES_SENT = 128, 200  # places in Linux's struct tcp_info


@algorithm
class Halve(Algorithm):
    """One exchange a step: x goes to all clients, and half of it comes back."""

    @at_client
    def halve(self, client: Client, x: jax.Array) -> jax.Array:
        """x / 2"""
        return x * 0.5

    def init(self, x: jax.Array, y: jax.Array, clients: Clients) -> Pair:
        return Pair(x, y)

    def step(self, state: Pair, clients: Clients, key: jax.Array) -> Pair:
        return Pair(clients.draw().mean(self.halve, state.x), state.y)

    def rounds(self, key: jax.Array, size: int) -> int:
        return 1


def population(clients: int = 1) -> Population:
    """Clients with a row each."""
    zero = Problem(lambda x, y, rows: jnp.sum(y * rows), lambda x, y, rows: jnp.sum(y * rows))
    rows = [np.ones((1, 1), np.float32)] * clients
    return Population.build(zero, rows, rows)


class ExchangeSite(Site):
    """A site that answers our requests, and bare calls of the engine beside them."""

    @collab.publish
    def begin(self, request: bytes) -> list:
        """Get ready for arrays of so many floats."""
        number, size = json.loads(request)
        known = call_shapes(Halve(), population(), jnp.zeros(size), jnp.zeros(1))
        self._runtime = ClientRuntime(Halve(), population(), number, 1.0, known)
        return [True, b""]

    @collab.publish
    def bare(self, x: np.ndarray) -> np.ndarray:
        """x / 2, as an array of the engine's own."""
        return x * np.float32(0.5)

    @collab.publish
    def wire(self, port: int) -> list:
        """Bytes sent to and received from the server's port by this process so far, TLS and all."""
        sent = received = 0
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # of a file that was closed meanwhile, or a socket that is not connected
                if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(number)) as line:
                    if line.family == socket.AF_INET and line.getpeername()[1] == port:
                        info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        received += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
                        sent += struct.unpack_from("Q", info, BYTES_SENT)[0]
        return [sent, received]


class ExchangeServer:
    """Evaluate both in turns, so that whatever else the machine does slows both."""

    def __init__(self, out: str, port: int):
        self.out, self.port = out, port

    @collab.main
    def measure(self) -> None:
        """Write the medians and the bytes to a file."""
        proxies = dict(enumerate(collab.clients))
        transport = Flare(proxies, {m: p.name for m, p in proxies.items()}, 300.0, lambda: False)
        pool = ThreadPoolExecutor(len(proxies))

        def wire() -> int:
            return sum(sum(proxy(timeout=30.0).wire(self.port)) for proxy in proxies.values())

        def bare(x: np.ndarray) -> np.ndarray:
            replies = list(pool.map(lambda proxy: proxy(timeout=300.0).bare(x), proxies.values()))
            return np.mean(replies, axis=0)

        results: dict[str, Any] = {}
        for name, size in SIZES.items():
            x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
            transport.call("begin", {m: json.dumps([m, size]).encode() for m in proxies})
            known = call_shapes(Halve(), population(), jnp.asarray(x), jnp.zeros(1))
            engine = DeployedEngine(transport, population(len(proxies)), Everyone(), known)
            state, key = Pair(jnp.asarray(x), jnp.zeros(1)), jax.random.key(0)
            exchanges = {"ours": lambda: engine.step(Halve(), state, key), "bare": lambda: bare(x)}
            seconds: dict[str, list[float]] = {"ours": [], "bare": []}
            bytes_: dict[str, int] = {}
            for which, exchange in exchanges.items():
                for _ in range(WARM):
                    exchange()
                before = wire()
                envelope = wire() - before  # of asking for the count
                before = wire()
                exchange()
                bytes_[which] = wire() - before - envelope
            for _ in range(REPEATS[name]):
                for which, exchange in exchanges.items():
                    began = time.perf_counter()
                    exchange()
                    seconds[which].append(time.perf_counter() - began)
            np.testing.assert_allclose(engine.step(Halve(), state, key)[0].x, x / 2, rtol=1e-6)
            results[name] = {
                "counted": 2 * 4 * size * len(proxies),
                **{f"{which} seconds": statistics.median(s) for which, s in seconds.items()},
                **{f"{which} bytes": n for which, n in bytes_.items()},
            }
        Path(self.out).write_text(json.dumps(results))
