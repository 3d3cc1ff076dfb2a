"""What an exchange of 600 KB costs with secure sums and without: `python benchmarks/secure_sum.py [--processes]`.

Without the network: CPU seconds of a site and of the server, messages encoded and decoded as in a federation, for 4, 16 and 64
sites, t a majority. With --processes: wall seconds of an exchange in a real federation of four sites on this machine.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from federation_exchange import measured as exchanged

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.participation import Everyone
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.loopback import Loopback

SIZE = 150_000  # numbers of 4 bytes
EXCHANGES = 10


class Signer:
    """Signatures as fast as they can be: the kits' take a millisecond more."""

    def __init__(self, keys: dict[int, Ed25519PrivateKey], number: int):
        self.keys, self.number = keys, number

    def sign(self, message: bytes) -> bytes:
        return self.keys[self.number].sign(message)

    def verify(self, client: int, message: bytes, signature: bytes) -> None:
        self.keys[client].public_key().verify(signature, message)


def measured(sites: int, rule: Aggregation) -> tuple[float, float]:
    """CPU seconds of a site and of the server in an exchange."""
    ones = [np.ones(1, np.float32)] * sites
    task = fb.Task.of(
        lambda x, y, rows: 0.5 * jnp.mean(rows) * (x**2).sum(),
        lambda x, y, rows: 0.5 * jnp.mean(rows) * (y**2).sum(),
        x0=np.ones(1, np.float32),
        y0=np.ones(SIZE, np.float32),
        lower=ones,
    )
    keys = {m: Ed25519PrivateKey.generate() for m in range(sites)}
    algorithm = fb.FedAvg(local_steps=1)
    clients = {
        m: ClientRuntime(algorithm, task.population.only(m), m, aggregation=rule, identity=Signer(keys, m))
        for m in range(sites)
    }
    engine = DeployedEngine(Loopback(clients), task.population, Everyone(), aggregation=rule, signatures=Signer(keys, 0))
    state = engine.init(algorithm, task.x, task.y, jax.random.key(0)).state
    for _ in range(2):  # compile: the second has something that the first left out
        state = engine.step(algorithm, state, jax.random.key(1)).state
    spent, answer = 0.0, ClientRuntime.answer

    def timed(self: ClientRuntime, data: bytes) -> bytes:
        nonlocal spent
        began = time.process_time()
        reply = answer(self, data)
        spent += time.process_time() - began
        return reply

    ClientRuntime.answer = timed  # type: ignore[method-assign]
    began = time.process_time()
    for t in range(EXCHANGES):
        state = engine.step(algorithm, state, jax.random.key(2 + t)).state
    whole = time.process_time() - began
    ClientRuntime.answer = answer  # type: ignore[method-assign]
    return spent / EXCHANGES / sites, (whole - spent) / EXCHANGES


def in_one_process() -> None:
    """A table of CPU milliseconds."""
    print(f"{'sites':>5} {'':10} {'a site, ms':>11} {'server, ms':>11}")
    for sites in (4, 16, 64):
        spent = {}
        for name, text in (("plain", "mean"), ("secure", f"secure-sum(at_least={sites // 2 + 1}, cohort={max(16, sites)})")):
            spent[name] = measured(sites, configured(text))
            print(f"{sites:>5} {name:10} {1e3 * spent[name][0]:>11.1f} {1e3 * spent[name][1]:>11.1f}", flush=True)
        ratios = [secure / plain for secure, plain in zip(spent["secure"], spent["plain"], strict=True)]
        print(f"{sites:>5} {'ratio':10} {ratios[0]:>11.1f} {ratios[1]:>11.1f}")


def in_processes() -> None:
    """Wall milliseconds of an exchange with four sites over TLS, plain and secure ones in turns."""
    seconds = exchanged("secure_job.SecureServer", "secure_job.SecureSite")
    times = ", ".join(f"{name} {1e3 * median:.1f} ms" for name, median in seconds.items())
    print(f"medians: {times}, {seconds['secure'] / seconds['plain']:.2f} times as long")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", action="store_true", help="measure a real federation of four sites instead")
    in_processes() if parser.parse_args().processes else in_one_process()
