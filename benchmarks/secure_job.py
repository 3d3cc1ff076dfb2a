"""The two ends of the exchange that `secure_sum.py --processes` measures: plain and secure, in one job."""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from exchange_job import Halve, population
from nvflare.collab import collab

from fedbilevel.aggregations import configured
from fedbilevel.core.participation import Everyone
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.failure import Failures
from fedbilevel.federation.flare import Flare
from fedbilevel.federation.kit_identity import KitIdentity, SiteSignatures
from fedbilevel.federation.site import Site

SIZE = 150_000  # floats of 4 bytes
REPEATS, WARM = 40, 3
RULE = "secure-sum(at_least=3)"
RUN = "benchmark"


class SecureSite(Site):
    """A site that answers requests of two runs, one with secure sums."""

    @collab.publish
    def begin(self, request: bytes) -> list:
        """Get ready, as that one of the sites."""
        number, names = json.loads(request)
        known = call_shapes(Halve(), population(), jnp.zeros(SIZE), jnp.zeros(1))
        identity = KitIdentity(Path(collab.workspace.get_root_dir()), names, number, RUN)
        self._runtime = ClientRuntime(Halve(), population(), number, 1.0, known)
        self._summing = ClientRuntime(Halve(), population(), number, 1.0, known, None, configured(RULE), identity)
        return [True, b""]

    @collab.publish
    def summed(self, request: bytes) -> list:
        """Answer a request of the run with secure sums."""
        return [True, self._summing.answer(request)]


class Summed:
    """The sites in the run with secure sums."""

    def __init__(self, flare: Flare):
        self._flare = flare

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], Failures]:
        """See `Flare.ask`."""
        return self._flare.call("summed", requests)


class SecureServer:
    """Evaluate both in turns, so that whatever else the machine does slows both."""

    def __init__(self, out: str, port: int):
        self.out = out

    @collab.main
    def measure(self) -> None:
        """Write the seconds of all exchanges to a file."""
        proxies = dict(enumerate(collab.clients))
        names = {m: p.name for m, p in proxies.items()}
        flare = Flare(proxies, names, 300.0, lambda: False)
        flare.call("begin", {m: json.dumps([m, [*names.values()]]).encode() for m in proxies})
        everyone, x = population(len(proxies)), np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
        known = call_shapes(Halve(), population(), jnp.asarray(x), jnp.zeros(1))
        signatures = SiteSignatures(Path(collab.workspace.get_root_dir()), [*names.values()], RUN)
        plain = DeployedEngine(flare, everyone, Everyone(), known)
        secure = DeployedEngine(Summed(flare), everyone, Everyone(), known, None, configured(RULE), signatures=signatures)
        seconds: dict[str, list[float]] = {"plain": [], "secure": []}
        key = jax.random.key(0)
        engines = {"plain": plain, "secure": secure}
        states = {name: engine.init(Halve(), jnp.asarray(x), jnp.zeros(1), key).state for name, engine in engines.items()}
        for k in range(WARM + REPEATS):
            for name, engine in engines.items():
                step = partial(engine.step, Halve(), states[name], key)
                began = time.perf_counter()
                after = step().state
                seconds[name].append(time.perf_counter() - began)
                if k == 0:
                    np.testing.assert_allclose(after.x, x / 2, atol=1e-4)
        Path(self.out).write_text(json.dumps({name: statistics.median(times[WARM:]) for name, times in seconds.items()}))
