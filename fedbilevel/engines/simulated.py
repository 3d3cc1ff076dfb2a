"""The simulated federation: all clients in one process, vmapped, and a whole step one pure function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.clients import Clients, Cohort, PerClient
from fedbilevel.core.devices import each_its_share, everywhere, padded
from fedbilevel.core.participation import Participation, present
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.core.randomness import fold_in, split
from fedbilevel.core.sets import Sets
from fedbilevel.core.traffic import Traffic, floats, product

PRODUCTS = {  # of float32 matrices: in which arithmetic, by JAX's names
    "default": None,  # as JAX does it on the device: of 10 bits on NVIDIA's GPUs, whole on CPUs
    "float32": "highest",
    "bfloat16": "BF16_BF16_F32",  # factors rounded to 7 bits, added up in float32
}


@partial(jax.tree_util.register_dataclass, data_fields=["population"], meta_fields=["participation", "chunk_size", "products"])
@dataclass(frozen=True)
class Simulator:
    """A federation in this process: `init` and `step` are pure functions that can be compiled."""

    population: Population
    participation: Participation
    chunk_size: int | None = None  # how many clients are computed at once; None: the whole cohort
    products: str = "default"  # one of `PRODUCTS`

    def init(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> tuple[Any, Traffic]:
        """The algorithm's first state, and what it took to communicate."""
        clients = SimulatedClients(self, key)
        with jax.default_matmul_precision(PRODUCTS[self.products]):
            return algorithm.init(x, y, clients), clients.traffic

    def step(self, algorithm: Algorithm, state: Any, key: Array) -> tuple[Any, Traffic]:
        """The state after one outer step, and what it took to communicate."""
        server_key, clients_key = split(key)
        clients = SimulatedClients(self, clients_key)
        with jax.default_matmul_precision(PRODUCTS[self.products]):
            return algorithm.step(state, clients, server_key), clients.traffic

    def rounds(self, algorithm: Algorithm, key: Array) -> Array | int:
        """The rounds that the step with this key takes, by the algorithm's own formula."""
        server_key, _ = split(key)
        return algorithm.rounds(server_key, self.participation.capacity(self.population.size))

    def repeat(self, goes_on: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any) -> Any:
        """`carry` after `body` was applied while `goes_on`, compiled."""
        return lax.while_loop(goes_on, body, carry)


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=[])
@dataclass(frozen=True)
class Rows(PerClient):
    """One row for each client of a cohort."""

    rows: Tree

    def __getitem__(self, index: int) -> Rows:
        return Rows(self.rows[index])


class SimulatedClients(Clients):
    """The clients during one step. What they do to the count of calls and of traffic is threaded by `loop`."""

    def __init__(self, simulator: Simulator, key: Array):
        self._simulator, self._key = simulator, key
        self._calls, self.traffic = jnp.int32(0), Traffic.zero()
        self._trace = get_opaque_trace_state()

    @property
    def size(self) -> int:
        return self._simulator.participation.capacity(self._simulator.population.size)

    @property
    def sets(self) -> Sets:
        return self._simulator.population.problem.sets

    def draw(self, active: Array | None = None) -> Cohort:
        ids, there = self._simulator.participation.draw(self.next_key(), self._simulator.population.size)
        return SimulatedCohort(self, ids, present(active, there))

    def everyone(self) -> Cohort:
        return SimulatedCohort(self, jnp.arange(self._simulator.population.size), None)

    def loop(self, n: Array | int, body: Callable[[Any, Tree], Tree], value: Tree) -> Tree:
        self._check_trace()
        outside = self._trace

        def threaded(k: Array, carry: Any) -> Any:
            self._trace = get_opaque_trace_state()
            self._calls, self.traffic, value = carry
            value = body(k, value)
            return self._calls, self.traffic, value

        self._calls, self.traffic, value = lax.fori_loop(0, n, threaded, (self._calls, self.traffic, value))
        self._trace = outside
        return value

    def next_key(self) -> Array:
        """The randomness of the next call or draw."""
        self._check_trace()
        self._calls += 1
        return fold_in(self._key, self._calls - 1)

    def count(self, rounds: Array | int, up: Array, down: Array) -> None:
        """Add to the traffic."""
        self._check_trace()
        self.traffic = self.traffic.plus(rounds, up, down)

    def _check_trace(self) -> None:
        if get_opaque_trace_state() != self._trace:
            raise TypeError(
                "a client was asked from inside a loop, condition or transformation of JAX's own: "
                "use clients.loop(n, body, value) for a loop that communicates"
            )


class SimulatedCohort(Cohort):
    """Some clients, as rows of stacked arrays. Inactive members are computed and their rows left out."""

    def __init__(self, clients: SimulatedClients, ids: Array, active: Array | None):
        self._clients, self._ids, self._active = clients, ids, active

    @property
    def active(self) -> Array:
        return jnp.ones(len(self._ids), bool) if self._active is None else self._active

    @property
    def _count(self) -> Array | int:
        return len(self._ids) if self._active is None else self._active.sum(dtype=jnp.int32)

    def map(self, function: Callable[..., Tree], *args: Tree) -> PerClient:
        compute, rows = self._call(function, args)
        n, size = len(self._ids), self._clients._simulator.chunk_size
        if size is None or size >= n:
            return Rows(_at_once(compute, rows))
        _, index = _chunks(n, size)
        each = lax.map(lambda index: _at_once(compute, jax.tree.map(lambda r: r[index], rows)), index)
        return Rows(jax.tree.map(lambda r: r.reshape(-1, *r.shape[2:])[:n], each))

    def mean(self, function: Callable[..., Tree], *args: Tree) -> Tree:
        weights = self._weights()
        return self._sum(weights / weights.sum(), function, args)

    def unbiased_mean(self, function: Callable[..., Tree], *args: Tree) -> Tree:
        weights, count = self._weights(), jnp.maximum(self._count, 1)
        weights = weights * self._clients._simulator.population.size / count.astype(weights.dtype)
        return self._sum(weights, function, args)

    def gather(self, function: Callable[..., Tree], *args: Tree, otherwise: Tree = None) -> Tree:
        mapped = self.map(function, *args)
        assert isinstance(mapped, Rows)
        rows = mapped.rows
        self._reply(jax.tree.map(lambda r: r[0], rows))
        if self._active is None:
            return rows
        otherwise = jax.tree.map(jnp.zeros_like, rows) if otherwise is None else otherwise
        return jax.tree.map(partial(_where, self._active), rows, otherwise)

    def scatter(self, rows: Tree) -> PerClient:
        one = floats(jax.tree.map(lambda r: r[0], rows))
        self._clients.count(0, product(0, 0), product(self._count, one))
        return Rows(rows)

    def take(self, everyone: PerClient) -> PerClient:
        return jax.tree.map(lambda r: r[self._ids], everyone)

    def put(self, everyone: PerClient, part: PerClient) -> PerClient:
        def place(old: Array, new: Array) -> Array:
            new = new if self._active is None else _where(self._active, new, old[self._ids])
            return old.at[self._ids].set(new, unique_indices=True)

        return everywhere(jax.tree.map(place, everyone, part))

    def _call(self, function: Callable[..., Tree], args: tuple) -> tuple[Callable[[Tree], Tree], Tree]:
        """What each client computes from its row, and the rows; the server's arguments are counted as sent."""
        key, population = self._clients.next_key(), self._clients._simulator.population
        sent = [a for a in args if not isinstance(a, Rows)]
        self._clients.count(0, product(0, 0), product(self._count, floats(sent)))

        def compute(row: Tree) -> Tree:
            m, held = row
            held = iter(held)
            here = [next(held) if isinstance(a, Rows) else a for a in args]
            return function(population.client(m, fold_in(key, m)), *here)

        return compute, (self._ids, [a.rows for a in args if isinstance(a, Rows)])

    def _reply(self, one: Tree) -> None:
        n = jnp.asarray(self._count)
        self._clients.count(n > 0, product(n, floats(one)), product(0, 0))

    def _weights(self) -> Array:
        weights = self._clients._simulator.population.weights[self._ids]
        return weights if self._active is None else weights * self._active

    def _sum(self, weights: Array, function: Callable[..., Tree], args: tuple) -> Tree:
        compute, rows = self._call(function, args)
        n, size = len(self._ids), self._clients._simulator.chunk_size

        def weighted(weights: Array, rows: Tree) -> tuple[Tree, Tree]:
            """The sum over some clients, and one client's part of it."""
            each = _at_once(compute, rows)
            if self._active is not None:  # whatever an absent member would have sent does not count
                each = jax.tree.map(lambda r: _where(weights > 0, r, jnp.zeros_like(r)), each)
            total = jax.tree.map(lambda r: jnp.tensordot(weights.astype(r.dtype), r, 1), each)
            return everywhere(total), jax.tree.map(lambda r: r[0], each)

        if size is None or size >= n:
            total, one = weighted(weights, rows)
            self._reply(one)
            return total

        chunks, index = _chunks(n, size)
        parts = jnp.concatenate([weights, jnp.zeros(chunks * size - n, weights.dtype)]).reshape(chunks, size)

        def add(total: Tree, chunk: tuple[Array, Array]) -> tuple[Tree, None]:
            weights, index = chunk
            part, _ = weighted(weights, jax.tree.map(lambda r: r[index], rows))
            return jax.tree.map(jnp.add, total, part), None

        shapes, one = jax.eval_shape(weighted, weights, rows)
        self._reply(one)
        return lax.scan(add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), (parts, index))[0]


def _at_once(compute: Callable[[Tree], Tree], rows: Tree) -> Tree:
    """Every client's result; each device computes its share of the clients."""
    n = len(jax.tree.leaves(rows)[0])
    each = each_its_share(jax.vmap(compute)(each_its_share(padded(rows))))
    return jax.tree.map(lambda r: r[:n], each)


def _chunks(n: int, size: int) -> tuple[int, Array]:
    """How many chunks of so many members n of them make, and which members each has; the last one's number is repeated."""
    chunks = -(-n // size)
    return chunks, jnp.minimum(jnp.arange(chunks * size), n - 1).reshape(chunks, size)


def _where(active: Array, new: Array, old: Array) -> Array:
    return jnp.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
