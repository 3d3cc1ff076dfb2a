"""The simulated federation: all clients vmapped in one process, and each whole step one pure function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.algorithms import called
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.aggregation import Aggregation, Mean
from fedbilevel.core.clients import Clients
from fedbilevel.core.devices import copied_everywhere
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.core.randomness import split
from fedbilevel.core.traffic import Traffic
from fedbilevel.engines.attacks import Attack
from fedbilevel.engines.engine import Limits, Step, Stretch, advance, complete_report, recalled, remembering, unflattened
from fedbilevel.engines.simulated_clients import ClientCall, Rehearsed, Rows, SimulatedClients, Watch
from fedbilevel.errors import InputError
from fedbilevel.tasks.base import Task

CALLS = "calls"  # what is remembered in a rehearsal that counts them
PRODUCTS = {  # of float32 matrices: the arithmetic, by JAX's names
    "default": None,  # JAX's choice for the device: 10 bits on NVIDIA GPUs, full precision on CPUs
    "float32": "highest",
    "bfloat16": "BF16_BF16_F32",  # factors rounded to 7 bits, sums in float32
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["population"],
    meta_fields=["participation", "chunk_size", "products", "aggregation", "attack"],
)
@dataclass(frozen=True)
class SimulatedEngine:
    """Clients in this process: `init` and `step` are pure functions that can be compiled."""

    population: Population
    participation: Participation
    chunk_size: int | None = None  # how many clients are computed at once; None: the whole cohort
    products: str = "default"  # one of `PRODUCTS`
    aggregation: Aggregation = Mean()
    attack: Attack | None = None

    def require(self, task: Task, algorithm: Algorithm) -> None:
        """Raise `InputError` unless this engine can run the algorithm on the task."""
        self.participation.capacity(self.population.size)
        self.aggregation.require(self.population, self.participation)
        self.aggregation.require_algorithm(called(algorithm), algorithm.single_answers, algorithm.late_answers)
        if self.attack is not None:
            self.attack.require(self.population)
        if self.products != "default" and task.x.dtype != jnp.float32:
            raise InputError(f"products={self.products} is for simulated clients in single precision: leave it out")

    def init(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> Step:
        """The algorithm's first state."""
        clients = self._clients(key, memory=self._first_memory(algorithm, x, y, key))
        with jax.default_matmul_precision(PRODUCTS[self.products]):
            state = algorithm.init(x, y, clients)
            return Step(remembering(state, clients.memory), clients.traffic, {})

    def step(self, algorithm: Algorithm, state: Any, key: Array) -> Step:
        """One outer step."""
        server_key, clients_key = split(key)
        state, memory = recalled(state)
        clients = self._clients(clients_key, memory=memory)
        with jax.default_matmul_precision(PRODUCTS[self.products]):
            state = algorithm.step(state, clients, server_key)
            return Step(remembering(state, clients.memory), clients.traffic, complete_report(algorithm, clients.reported))

    def rounds(self, algorithm: Algorithm, key: Array) -> Array | int:
        """The rounds that the step with this key takes, by the algorithm's own formula."""
        server_key, _ = split(key)
        return algorithm.rounds(server_key, self.participation.capacity(self.population.size))

    def repeat(self, goes_on: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any) -> Any:
        """Apply `body` to `carry` while `goes_on` holds, compiled."""
        return lax.while_loop(goes_on, body, carry)

    def start(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> Step:
        """Like `init`, compiled."""
        return _init(self._everywhere, algorithm, x, y, key)

    def advance(self, algorithm: Algorithm, state: Any, step: int, key: Array, limits: Limits) -> Stretch:
        """A stretch of steps as one compiled program."""
        return _advance(self._everywhere, algorithm, state, step, key, limits)

    def point(self, state: Any) -> tuple[Any, Any]:
        """x and y of a state, with a row per client where each has its own."""
        x, y = (v.rows if isinstance(v, Rows) else v for v in (state.x, state.y))
        return x, y

    def evaluate(self, task: Task, state: Any) -> Mapping[str, Any]:
        """All metrics of a state, on all clients' data."""
        point = self.point(state)
        known = jax.device_count() == 1 and all(map(jnp.array_equal, point, task.start))
        return task.at_start if known else task.evaluate(*point)

    def refusal(self, state: Any) -> str:
        """What the aggregation could not encode, if that is why a state is not finite."""
        memories = {name: held.rows for name, held in recalled(state)[1].items() if isinstance(held, Rows)}
        return next(filter(None, (self.aggregation.refusal(name, rows) for name, rows in memories.items())), "")

    def save(self, state: Any, step: int) -> list[np.ndarray]:
        """The state's arrays."""
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

    def restore(self, arrays: list[np.ndarray], algorithm: Algorithm, x: Array, y: Array, key: Array) -> Any:
        """The state from what `save` returned; `InputError` if the arrays are not this run's."""
        return unflattened(arrays, self.state_shapes(algorithm, x, y, key))

    def state_shapes(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> Any:
        """Shapes and dtypes of the algorithm's states, without computing one."""
        return jax.eval_shape(type(self).init, self, algorithm, x, y, key).state

    def rehearse_init(self, watch: Watch, algorithm: Algorithm, x: Array, y: Array, key: Array) -> tuple[Any, Traffic]:
        """Start the algorithm without numbers: its state has the right shapes, and the traffic is what `watch` counts."""
        clients = self._clients(key, watch)
        return algorithm.init(x, y, clients), clients.traffic

    def rehearse_step(self, watch: Watch, algorithm: Algorithm, shapes: Any, key: Array) -> Traffic:
        """Like `rehearse_init`, for the step with this key from a state of these shapes."""
        server_key, clients_key = split(key)
        clients = self._clients(clients_key, watch)
        algorithm.step(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), recalled(shapes)[0]), clients, server_key)
        return clients.traffic

    def calls(self, names: Sequence[str], work: Callable[[Clients], Any], key: Array) -> Array:
        """How often `work` calls each of these client functions at every client; nothing that they return is computed."""

        def watch(call: ClientCall) -> Rehearsed:
            asked = clients.memory[CALLS].at[names.index(call.function.__name__), call.members].add(call.active)
            clients.memory = {CALLS: asked}
            return Rehearsed(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), call.result()))

        clients = self._clients(key, watch, {CALLS: jnp.zeros((len(names), self.population.size), jnp.int32)})
        work(clients)
        return clients.memory[CALLS]

    def encoded(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """The shapes of what a start or a step encodes: of answers, by client function, and of what the server sends."""
        averaged: dict[str, Tree] = {}
        addressed: dict[str, Tree] = {}

        def watch(call: ClientCall) -> Rehearsed:
            return Rehearsed(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), call.result()))

        def start_and_step(x: Array, y: Array, key: Array) -> Any:
            first, then = self._clients(key, watch), self._clients(key, watch)
            state = algorithm.step(algorithm.init(x, y, first), then, key)
            averaged.update(first.averaged | then.averaged)
            addressed.update(first.addressed | then.addressed)
            return state

        jax.eval_shape(start_and_step, x, y, key)
        return averaged, addressed

    def _first_memory(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> dict[str, Any]:
        if not self.aggregation.encodes:
            return {}
        averaged, addressed = self.encoded(algorithm, x, y, key)
        n = self.population.size
        each = {name: Rows(jax.tree.map(lambda s: jnp.zeros((n, *s.shape), s.dtype), one)) for name, one in averaged.items()}
        return {**each, **nothing_left(addressed)}

    def _clients(self, key: Array, watch: Watch | None = None, memory: dict[str, Any] | None = None) -> SimulatedClients:
        how = self.chunk_size, watch, self.aggregation, self.attack, memory
        return SimulatedClients(self.population, self.participation, key, *how)

    @functools.cached_property
    def _everywhere(self) -> SimulatedEngine:
        return copied_everywhere(self)


_init, _advance = jax.jit(SimulatedEngine.init), jax.jit(advance)


def nothing_left(addressed: Mapping[str, Tree]) -> dict[str, Tree]:
    """What encoding has left out of arrays of these shapes before any was sent."""
    return {name: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes) for name, shapes in addressed.items()}
