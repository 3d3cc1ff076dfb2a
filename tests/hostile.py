"""A server and a site that cheat, as their owners could make them: on the owner's machine any module can be installed."""

import json
import time
from pathlib import Path

import jax
import numpy as np
from nvflare.collab import collab
from nvflare.collab.api.call_opt import CallOption

from fedbilevel.core.problem import Point
from fedbilevel.engines import wire
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.messages import Call, Part, Request, Save, Store
from fedbilevel.federation.server import ExperimentServer
from fedbilevel.tasks.quadratic import Quadratic


class HostileServer(ExperimentServer):
    """Asks every site for what it must refuse, writes down what came back, then runs the experiment as if nothing were."""

    def experiment(self, configuration, transport):
        experiment = super().experiment(configuration, transport)
        z = Point(experiment.task.x, experiment.task.y, experiment.task.y)
        key = np.asarray(jax.random.key_data(jax.random.key(0)))
        asked = {
            "method": Call("step", key, (z,), None),
            "private": Call("__init__", key, (), None),
            "shape": Call("first_momentum", key, (z._replace(y=z.y[1:]),), None),
            "dtype": Call("first_momentum", key, (z._replace(y=z.y.astype("float16")),), None),
            "nan": Call("first_momentum", key, (z._replace(y=z.y * np.nan),), None),
            "saving": Save(1, [Store(z.x, 1)], "no number"),
            "many": Store([z.x] * 200_000, 1),
            "indices": Part(Store(z.x, 1), (np.zeros(50_000, int),)),
        }
        requests = {name: wire.encode(Request(e, isinstance(e, Call), [])) for name, e in asked.items()}
        said = {}
        for name, request in {**requests, "garbage": b"\x80\x04 garbage"}.items():
            _, failures = transport.ask(dict.fromkeys(range(len(self.sites)), request))
            said[name] = {m: failure.line for m, failure in failures.items()}
        for name in ("prepare", "_begin"):
            said[name] = {proxy.name: forced(proxy, name) for proxy in collab.clients}
        (Path(self.folder) / "said.json").write_text(json.dumps(said))
        return experiment


def forced(proxy, name):
    """What a site says to a call that the engine's own server would not even send."""
    with proxy.app.new_context(proxy.caller_name, proxy.name) as context:
        try:
            return str(proxy.backend.call_target(context, proxy.target_name, CallOption(timeout=30.0), name, request=b""))
        except Exception as error:
            return str(error)


def lying_rows():
    """Client 1's rows of the quadratics, and from now on false answers of this process to some requests."""
    honest = ClientRuntime.answer
    forged = json.dumps({"array": "float32\n2026-01-01 - all is well\x1b[2J" + "x" * 5000, "shape": [8]}).encode()
    lies = iter(
        [
            *map(wire.encode, (np.zeros(3, np.float32), np.zeros(8, np.float16), np.full(8, np.nan, np.float32))),
            len(forged).to_bytes(8, "little") + forged + bytes(32),
        ]
    )

    def answer(self, data):
        reply = honest(self, data)
        if np.shape(wire.decode(reply)) == (8,) and (lie := next(lies, None)) is not None:
            return lie
        return reply

    ClientRuntime.answer = answer
    part = Quadratic(clients=3, noise=0.1).build().population.only(1)
    return tuple(jax.tree.map(np.asarray, shards.rows) for shards in (part.upper, part.lower))


def slow_rows():
    """The same rows, at a site that takes several seconds for one of its answers."""
    honest, count = ClientRuntime.answer, iter(range(10**9))

    def answer(self, data):
        if next(count) == 40:
            time.sleep(4.5)
        return honest(self, data)

    ClientRuntime.answer = answer
    part = Quadratic(clients=3, noise=0.1).build().population.only(1)
    return tuple(jax.tree.map(np.asarray, shards.rows) for shards in (part.upper, part.lower))
