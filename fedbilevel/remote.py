"""The deployed federation: the same algorithms, their client functions called by name over a transport.

What a client is to compute is an expression: a client function's name, a key, and arguments that are arrays,
values kept at the client, or further expressions. It is sent when the server needs the answer, so that
`S.mean(h, S.map(g, x))` is one round trip. Values stay at the client under a number until the server has
forgotten them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel import wire
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.clients import Clients, Cohort, PerClient, is_client_function
from fedbilevel.errors import InputError
from fedbilevel.participation import Participation, present
from fedbilevel.population import Population
from fedbilevel.problem import Tree
from fedbilevel.sets import UNCONSTRAINED, Sets
from fedbilevel.traffic import Totals, floats


class Transport(Protocol):
    """Carries bytes between the server and the clients; the one seam between us and a federated engine."""

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], dict[int, str]]:
        """Send each client its request at the same time: the replies, and for the others what went wrong."""


class Call(NamedTuple):
    """function(client, *args), kept under `slot` unless that is None."""

    function: str
    key: np.ndarray
    args: tuple
    slot: int | None


class Store(NamedTuple):
    """A value of the server's, kept under `slot`."""

    value: Tree
    slot: int


class Kept(NamedTuple):
    """What is kept under `slot`."""

    slot: int


class Part(NamedTuple):
    """A part of the tuple that an expression gives."""

    of: Any
    path: tuple[int, ...]


class Request(NamedTuple):
    """What a client is to compute, whether to send the result back, and which slots it may forget first."""

    expression: Any
    reply: bool
    forget: list[int]


EXPRESSIONS = {t.__name__: t for t in (Call, Store, Kept, Part, Request)}


def sent_floats(expression: Any) -> int:
    """The numbers that travel in an expression; keys and slots are part of the envelope."""
    match expression:
        case Call(args=inside) | list(inside):
            return sum(sent_floats(e) for e in inside)
        case Store(value=value):
            return floats(value)
        case Part(of=inside):
            return sent_floats(inside)
        case Kept():
            return 0
        case _:
            return floats(expression)


class Held:
    """One client's value, as the server knows it: still to be computed there, or kept there."""

    def __init__(self, federation: RemoteFederation, m: int, make: Callable[[int, list[Held]], Call | Store]):
        self.slot = federation.new_slot()
        self.make: Callable[[int, list[Held]], Call | Store] | None = make
        weakref.finalize(self, federation.forgotten[m].append, self.slot)

    def expression(self, computed: list[Held]) -> Any:
        """For a request; `computed` gains what the client will keep after it."""
        if self.make is None or any(self is c for c in computed):
            return Kept(self.slot)
        expression = self.make(self.slot, computed)
        computed.append(self)
        return expression


class HeldPart(NamedTuple):
    """A held value, or a part of it."""

    held: Held
    path: tuple[int, ...] = ()

    def expression(self, computed: list[Held]) -> Any:
        """As `Held.expression`."""
        whole = self.held.expression(computed)
        return Part(whole, self.path) if self.path else whole


class RemoteRows(PerClient):
    """One held value for each client of a cohort."""

    def __init__(self, parts: list[HeldPart]):
        self.parts = parts

    def __getitem__(self, index: int) -> RemoteRows:
        return RemoteRows([HeldPart(p.held, (*p.path, index)) for p in self.parts])


class RemoteFederation:
    """Clients behind a transport, seen from the server. `init` and `step` mirror `simulate.Simulator`."""

    def __init__(self, transport: Transport, weights: Array, participation: Participation, sets: Sets = UNCONSTRAINED):
        self.transport, self.weights, self.participation, self.sets = transport, np.asarray(weights), participation, sets
        self.forgotten: dict[int, list[int]] = {m: [] for m in range(len(weights))}
        self._slots = 0

    def new_slot(self) -> int:
        """A number for a value that a client is to keep."""
        self._slots += 1
        return self._slots

    def init(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> tuple[Any, Totals]:
        """The algorithm's first state, and what it took to communicate."""
        clients = RemoteClients(self, algorithm, key)
        return clients.settled(algorithm.init(x, y, clients)), clients.totals

    def step(self, algorithm: Algorithm, state: Any, key: Array) -> tuple[Any, Totals]:
        """The state after one outer step, and what it took to communicate."""
        server_key, clients_key = jax.random.split(key)
        clients = RemoteClients(self, algorithm, clients_key)
        return clients.settled(algorithm.step(state, clients, server_key)), clients.totals


class RemoteClients(Clients):
    """The clients during one step."""

    def __init__(self, federation: RemoteFederation, algorithm: Algorithm, key: Array):
        self.federation, self._key, self._calls = federation, key, 0
        self._types = wire.named_tuples(type(algorithm))
        self.totals = Totals()

    @property
    def size(self) -> int:
        return self.federation.participation.capacity(len(self.federation.weights))

    @property
    def sets(self) -> Sets:
        return self.federation.sets

    def draw(self, active: Array | None = None) -> Cohort:
        ids, there = self.federation.participation.draw(self.next_key(), len(self.federation.weights))
        taking_part = present(active, there)
        return RemoteCohort(self, np.asarray(ids), np.ones(len(ids), bool) if taking_part is None else np.asarray(taking_part))

    def everyone(self) -> Cohort:
        population = len(self.federation.weights)
        return RemoteCohort(self, np.arange(population), np.ones(population, bool))

    def loop(self, n: Array | int, body: Callable[[Any, Tree], Tree], value: Tree) -> Tree:
        for k in range(int(n)):
            value = body(k, value)
        return value

    def next_key(self) -> Array:
        """The randomness of the next call or draw."""
        self._calls += 1
        return jax.random.fold_in(self._key, self._calls - 1)

    def ask(self, wanted: dict[int, tuple[Any, list[Held]]], reply: bool) -> tuple[dict[int, Tree], dict[int, str]]:
        """Have each client compute its expression; what the expressions hold is then kept there."""
        if not wanted:
            return {}, {}
        forgotten = self.federation.forgotten
        forget = {m: list(forgotten[m]) for m in wanted}
        requests = {m: wire.encode(Request(expression, reply, forget[m])) for m, (expression, _) in wanted.items()}
        answers, errors = self.federation.transport.ask(requests)
        replies = {m: wire.decode(answer, self._types) for m, answer in answers.items()}
        for m in replies:
            del forgotten[m][: len(forget[m])]
            for held in wanted[m][1]:
                held.make = None
        if reply and not replies:
            m, error = next(iter(errors.items()))
            raise RuntimeError(f"none of {len(wanted)} clients answered; client {m}: {error}")
        down = sum(sent_floats(expression) for expression, _ in wanted.values())
        up = sum(floats(r) for r in replies.values())
        rounds, before_up, before_down = self.totals
        self.totals = Totals(rounds + reply, before_up + up, before_down + down)
        return replies, errors

    def settled(self, state: Any) -> Any:
        """The state, once the clients have computed what it leaves with them."""
        wanted: dict[int, tuple[Any, list[Held]]] = {}
        for rows in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, RemoteRows)):
            for m, part in enumerate(rows.parts if isinstance(rows, RemoteRows) else ()):
                if part.held.make is not None:
                    expressions, computed = wanted.setdefault(m, ([], []))
                    expressions.append(part.expression(computed))
        self.ask(wanted, reply=False)
        return state


class RemoteCohort(Cohort):
    """Some clients behind the transport. One that fails to answer is not asked again in this cohort."""

    def __init__(self, clients: RemoteClients, ids: np.ndarray, active: np.ndarray):
        self._clients, self._ids, self._active = clients, ids, active

    @property
    def active(self) -> Array:
        return jnp.asarray(self._active)

    def map(self, function: Callable[..., Tree], *args: Tree) -> PerClient:
        call = self._call(function, args)
        return self._hold(lambda row: partial(call, row))

    def mean(self, function: Callable[..., Tree], *args: Tree) -> Tree:
        replies, weights = self._ask(function, args)
        return _weighted_sum(weights / weights.sum(), replies)

    def unbiased_mean(self, function: Callable[..., Tree], *args: Tree) -> Tree:
        replies, weights = self._ask(function, args)
        return _weighted_sum(weights * (len(self._clients.federation.weights) / max(len(replies), 1)), replies)

    def gather(self, function: Callable[..., Tree], *args: Tree, otherwise: Tree = None) -> Tree:
        replies, _ = self._ask(function, args)
        if not replies and otherwise is None:
            raise RuntimeError(f"nobody was asked for {function.__name__}: say what the rows are otherwise")
        if not replies:
            return otherwise
        rows = np.flatnonzero(self._active)

        def stack(rest: Array | None, *leaves: np.ndarray) -> Array:
            shape = (len(self._ids), *leaves[0].shape)
            out = np.zeros(shape, leaves[0].dtype) if rest is None else np.array(rest)
            out[rows] = np.stack(leaves)
            return jnp.asarray(out)

        rest = jax.tree.map(lambda _: None, replies[0]) if otherwise is None else otherwise
        return jax.tree.map(stack, rest, *replies, is_leaf=lambda node: node is None)

    def scatter(self, rows: Tree) -> PerClient:
        def store(row: int) -> Callable[[int, list[Held]], Store]:
            return lambda slot, _: Store(jax.tree.map(lambda r: r[row], rows), slot)

        return self._hold(store)

    def take(self, everyone: PerClient) -> PerClient:
        assert isinstance(everyone, RemoteRows)
        return RemoteRows([everyone.parts[m] for m in self._ids])

    def put(self, everyone: PerClient, part: PerClient) -> PerClient:
        assert isinstance(everyone, RemoteRows) and isinstance(part, RemoteRows)
        parts = list(everyone.parts)
        for row in np.flatnonzero(self._active):
            parts[self._ids[row]] = part.parts[row]
        return RemoteRows(parts)

    def _hold(self, make: Callable[[int], Callable[[int, list[Held]], Call | Store]]) -> RemoteRows:
        federation = self._clients.federation
        return RemoteRows([HeldPart(Held(federation, int(m), make(row))) for row, m in enumerate(self._ids)])

    def _call(self, function: Callable[..., Tree], args: tuple) -> Callable[[int, int | None, list[Held]], Call]:
        key = np.asarray(jax.random.key_data(self._clients.next_key()))

        def call(row: int, slot: int | None, computed: list[Held]) -> Call:
            here = tuple(a.parts[row].expression(computed) if isinstance(a, RemoteRows) else a for a in args)
            return Call(function.__name__, key, here, slot)

        return call

    def _ask(self, function: Callable[..., Tree], args: tuple) -> tuple[list[Tree], np.ndarray]:
        """The replies of the members who answer, and their weights."""
        call, wanted = self._call(function, args), {}
        for row in np.flatnonzero(self._active):
            computed: list[Held] = []
            wanted[int(self._ids[row])] = call(int(row), None, computed), computed
        replies, errors = self._clients.ask(wanted, reply=True)
        self._active = self._active & ~np.isin(self._ids, list(errors))
        members = self._ids[self._active]
        return [replies[m] for m in members], self._clients.federation.weights[members]


def _weighted_sum(weights: np.ndarray, replies: list[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.asarray(sum(w * leaf for w, leaf in zip(weights, leaves, strict=True))), *replies)


class ClientRuntime:
    """The client's side: answers requests with its own data, and keeps what it is told to keep."""

    def __init__(self, algorithm: Algorithm, population: Population, m: int, weight: float = 1.0):
        self._algorithm, self._population, self._m, self._weight = algorithm, population, m, weight
        self._types = EXPRESSIONS | wire.named_tuples(type(algorithm))
        self._kept: dict[int, Tree] = {}

    def answer(self, data: bytes) -> bytes:
        """The reply to a request, or `InputError` if it asks for what a client does not do."""
        request = wire.decode(data, self._types)
        for slot in request.forget:
            self._kept.pop(slot, None)
        result = self._evaluate(request.expression)
        return wire.encode(jax.tree.map(np.asarray, result) if request.reply else None)

    def _evaluate(self, expression: Any) -> Tree:
        match expression:
            case Kept(slot=slot):
                return self._kept[slot]
            case Store(value=value, slot=slot):
                self._kept[slot] = value
                return value
            case Part(of=of, path=path):
                value = self._evaluate(of)
                for index in path:
                    value = value[index]
                return value
            case Call(function=name, key=key, args=args, slot=slot):
                if not is_client_function(getattr(self._algorithm, name, None)):
                    raise InputError(f"{name!r} is not a client function of {type(self._algorithm).__name__}: refused")
                own = self._population, self._m, self._weight
                value = _compute(self._algorithm, name, own, key, [self._evaluate(a) for a in args])
                if slot is not None:
                    self._kept[slot] = value
                return value
            case list():
                return [self._evaluate(e) for e in expression]
            case _:
                return expression


@partial(jax.jit, static_argnames="name")
def _compute(algorithm: Algorithm, name: str, own: tuple[Population, Array, Array], key: Array, args: list[Tree]) -> Tree:
    population, m, weight = own
    client = population.alone(jax.random.fold_in(jax.random.wrap_key_data(key), m), weight, m)
    return getattr(algorithm, name)(client, *args)
