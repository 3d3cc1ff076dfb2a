"""Simulated clients: a cohort is rows of stacked arrays, and a client function is vmapped over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state

from fedbilevel.core.aggregation import (
    ATTACKING,
    COMBINING,
    ENCODING,
    Aggregation,
    Mean,
    beyond,
    change_from,
    scaled,
    sent_as,
    sent_down,
    weighted_sum,
)
from fedbilevel.core.clients import Clients, Cohort, PerClient, recentred, squared_distance
from fedbilevel.core.devices import each_its_share, everywhere, padded
from fedbilevel.core.participation import Participation, present
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.core.randomness import fold_in
from fedbilevel.core.sets import Sets
from fedbilevel.core.traffic import Traffic, product
from fedbilevel.engines.attacks import Attack


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=[])
@dataclass(frozen=True)
class Rows(PerClient):
    """One row for each client of a cohort."""

    rows: Tree

    def __getitem__(self, index: int) -> Rows:
        return Rows(self.rows[index])


CACHED = 3_500_000  # bytes of answers: with more in the making, products wait for memory; measured on a cache of 32 MB
FEWEST = 2  # clients at once


def fitting(answer: float) -> int:
    """How many clients a CPU computes at once if the answer of each takes so many bytes."""
    return max(FEWEST, int(CACHED // max(1, answer)))


class ClientCall(NamedTuple):
    """A call of a client function at some clients."""

    function: Callable[..., Tree]
    arguments: tuple  # the server's values, and `Rows` of what each client holds
    compute: Callable[[Tree], Tree]  # one client's result, from its row
    rows: Tree  # a row for each client asked
    members: Array  # their numbers
    active: Array  # whether each takes part

    def row(self) -> Tree:
        """The shapes of one client's row."""
        return jax.tree.map(lambda r: jax.ShapeDtypeStruct(r.shape[1:], r.dtype), self.rows)

    def arguments_of_one(self) -> tuple:
        """The shapes of one client's arguments."""
        return tuple(
            jax.tree.map(lambda r: jax.ShapeDtypeStruct(r.shape[1:], r.dtype), a.rows)
            if isinstance(a, Rows)
            else jax.tree.map(lambda v: jax.ShapeDtypeStruct(jnp.shape(v), jnp.result_type(v)), a)
            for a in self.arguments
        )

    def result(self) -> Tree:
        """The shapes of one client's result."""
        return jax.eval_shape(self.compute, self.row())


class Rehearsed(NamedTuple):
    """A watcher's response to a call: what all clients answer instead, and two counts, each below 2³²."""

    answer: Tree
    counts: tuple[Array | int, Array | int] = (0, 0)


Watch = Callable[[ClientCall], Rehearsed]


class SimulatedClients(Clients):
    """The clients during one step. Their counts of calls and of traffic are threaded through `loop`."""

    def __init__(
        self,
        population: Population,
        participation: Participation,
        key: Array,
        chunk_size: int | None = None,
        watch: Watch | None = None,
        aggregation: Aggregation = Mean(),  # noqa: B008 (frozen)
        attack: Attack | None = None,
        memory: dict[str, Any] | None = None,
    ):
        self.population, self.chunk_size, self.watch = population, chunk_size, watch
        self.aggregation, self.attack = aggregation, attack
        self.memory = dict(memory or {})  # by client function, what encoding left out of its answers, and of what it was sent
        self.averaged: dict[str, Tree] = {}  # in a rehearsal, by client function, the shapes of answers that are averaged
        self.addressed: dict[str, list[Any]] = {}  # in a rehearsal, the shapes of arrays that are sent encoded
        self.received: dict[int, Array] = {}  # by the identity of an array of the last call's, what the clients have of it
        self._participation, self._key = participation, key
        self._calls, self.traffic = jnp.int32(0), Traffic.zero()
        self.reported: dict[str, Array | float] = {}
        self._trace = self._outermost = get_opaque_trace_state()

    @property
    def size(self) -> int:
        return self._participation.capacity(self.population.size)

    @property
    def sets(self) -> Sets:
        return self.population.problem.sets

    def draw(self, active: Array | None = None) -> Cohort:
        ids, there = self._participation.draw(self.next_key(), self.population.size)
        return SimulatedCohort(self, ids, present(active, there))

    def everyone(self) -> Cohort:
        return SimulatedCohort(self, jnp.arange(self.population.size), None)

    def loop(self, n: Array | int, body: Callable[[Any, Tree], Tree], value: Tree) -> Tree:
        self._check_trace()
        outside = self._trace

        def threaded(k: Array, carry: Any) -> Any:
            self._trace = get_opaque_trace_state()
            self._calls, self.traffic, self.memory, value = carry
            value = body(k, value)
            return self._calls, self.traffic, self.memory, value

        carry = self._calls, self.traffic, self.memory, value
        self._calls, self.traffic, self.memory, value = lax.fori_loop(0, n, threaded, carry)
        self._trace = outside
        return value

    def next_key(self) -> Array:
        """The random key of the next call or draw."""
        self._check_trace()
        self._calls += 1
        return fold_in(self._key, self._calls - 1)

    def sent(self, function: str, values: Tree) -> tuple[Tree, Tree]:
        """The server's values as clients have them, and as they cross."""
        leaves, structure = jax.tree.flatten(values)
        places = [k for k, leaf in enumerate(leaves) if self.aggregation.shrinks(leaf)]
        self.received = {}
        if not places:
            return values, values
        large = [leaves[k] for k in places]
        name = sent_as(function, large)
        if self.watch is not None:
            self.addressed[name] = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in large]
            return values, values
        made = sent_down(self.aggregation, large, self.memory[name])
        self.memory = {**self.memory, name: made.left}
        self.received = {id(leaf): got for leaf, got in zip(large, made.received, strict=True)}
        crossing = [leaf for k, leaf in enumerate(leaves) if k not in places], made.messages
        for k, got in zip(places, made.received, strict=True):
            leaves[k] = got
        return jax.tree.unflatten(structure, leaves), crossing

    def key_for(self, purpose: int) -> Array:
        """A random key for something else than a call or a draw, which leaves theirs as they are."""
        self._check_trace()
        return fold_in(fold_in(self._key, purpose), self._calls)

    @property
    def streams(self) -> bool:
        """Whether answers are added up in parts, without anybody who looks at all of them."""
        return self.aggregation.streams and self.attack is None

    def count(self, traffic: Traffic) -> None:
        """Add to the traffic, except in a rehearsal, where it is not needed."""
        self._check_trace()
        if self.watch is None:
            self.traffic = self.traffic.plus(traffic)

    def rehearse(self, watch: Watch, call: ClientCall) -> Tree:
        """What the watcher has all clients answer; its counts replace the floats up and down."""
        answer, (up, down) = watch(call)
        self.traffic = self.traffic.plus(Traffic.zero()._replace(up=product(up, 1), down=product(down, 1)))
        return answer

    def report(self, **numbers: Array | float) -> None:
        if get_opaque_trace_state() != self._outermost:
            raise TypeError("clients.report is for the step itself: call it outside loops")
        self.reported |= numbers

    def _check_trace(self) -> None:
        if get_opaque_trace_state() != self._trace:
            raise TypeError(
                "a client was called inside one of JAX's own loops, conditions or transformations: "
                "use clients.loop(n, body, value) for a loop that communicates"
            )


class SimulatedCohort(Cohort):
    """Some clients, as rows of stacked arrays. Inactive members are computed, but their rows are left out."""

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
        n, size = len(self._ids), self._together(compute, rows)
        if size >= n:
            return Rows(_at_once(compute, rows))
        _, index = _chunks(n, size)
        each = lax.map(lambda index: _at_once(compute, jax.tree.map(lambda r: r[index], rows)), index)
        return Rows(jax.tree.map(lambda r: r.reshape(-1, *r.shape[2:])[:n], each))

    def mean(self, function: Callable[..., Tree], *args: Tree, around: Tree = None) -> Tree:
        return self._estimate(self._average(), function, args, around)

    def mean_and_drift(self, function: Callable[..., Tree], *args: Tree, around: Tree) -> tuple[Tree, Array]:
        each = self._average()
        if self._clients.streams:
            total, spread = self._sum(each, function, args, _Spread.of)
            combined = recentred(total, self._share(each), around)
        else:
            rows = self._heard(function, args, around)
            if self._clients.aggregation.only_means:
                return self._combine(each, rows, around), jnp.full((), jnp.nan)
            spread = _Spread.of(each, rows, weighted_sum(each, rows))
            combined = self._combine(each, rows, around)
        return combined, jnp.sqrt(spread.square / spread.share)

    def unbiased_mean(self, function: Callable[..., Tree], *args: Tree, around: Tree = None) -> Tree:
        return self._estimate(self._unbiased(), function, args, around)

    def gather(self, function: Callable[..., Tree], *args: Tree, otherwise: Tree = None) -> Tree:
        return self._answers(function, args, None, otherwise)

    def scatter(self, rows: Tree) -> PerClient:
        self._clients.count(Traffic.of_clients(self._count, down=jax.tree.map(lambda r: r[0], rows)))
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
        key, population = self._clients.next_key(), self._clients.population
        values, crossing = self._clients.sent(function.__name__, [a for a in args if not isinstance(a, Rows)])
        self._clients.count(Traffic.of_clients(self._count, down=crossing))

        def compute(row: Tree) -> Tree:
            m, held = row
            held, given = iter(held), iter(values)
            here = [next(held) if isinstance(a, Rows) else next(given) for a in args]
            return function(population.client(m, fold_in(key, m)), *here)

        rows = self._ids, [a.rows for a in args if isinstance(a, Rows)]
        if self._clients.watch is None:
            return compute, rows
        call = ClientCall(function, args, compute, rows, self._ids, self.active)
        answer = self._clients.rehearse(self._clients.watch, call)
        return lambda row: answer, rows

    def _reply(self, one: Tree) -> None:
        n = jnp.asarray(self._count)
        self._clients.count(Traffic.of_clients(n, up=one, rounds=n > 0))

    def _heard(self, function: Callable[..., Tree], args: tuple, around: Tree) -> Tree:
        """Every member's answer as the server makes it out: decoded changes where clients encode."""
        rule, name = self._clients.aggregation, function.__name__
        if not rule.encodes:
            return self._answers(function, args, around)
        key, mapped = self._clients.key_for(ENCODING), self.map(function, *args)
        assert isinstance(mapped, Rows)
        one = jax.eval_shape(lambda rows: jax.tree.map(lambda r: r[0], rows), mapped.rows)
        if self._clients.watch is not None:
            self._clients.averaged[name] = one
            return mapped.rows
        server = [a for a in args if not isinstance(a, Rows)]
        told = [leaf for leaf in beyond(around, server) if not isinstance(leaf, int)]
        self._clients.count(Traffic.of_clients(self._count, down=told))

        near = jax.tree.map(lambda leaf: self._clients.received.get(id(leaf), leaf), around)

        population = self._clients.population
        scales = rule.scales and not population.equal_weights

        def encoded(row: Tree) -> tuple[Tree, Tree, Tree]:
            change, memory, m = change_from(near, row[0]), row[1], row[2]
            change = scaled(change, population.weights[m] * population.size) if scales else change
            message, memory = rule.encode(key, change, memory)
            message = rule.with_noise(fold_in(key, m), message)
            return message, memory, rule.decode(key, message, one)

        everyone = self._clients.memory[name]
        before = self.take(everyone)
        assert isinstance(before, Rows)
        messages, after, heard = jax.vmap(encoded)((mapped.rows, before.rows, self._ids))
        self._clients.memory = {**self._clients.memory, name: self.put(everyone, Rows(after))}
        return self._believed(messages, heard, None, None)

    def _answers(self, function: Callable[..., Tree], args: tuple, around: Tree, otherwise: Tree = None) -> Tree:
        """Every member's answer, honest or not; where a member is not active, the row of `otherwise` (zeros if none)."""
        mapped = self.map(function, *args)
        assert isinstance(mapped, Rows)
        rows = mapped.rows
        return self._believed(rows, rows, around, otherwise)

    def _believed(self, sent: Tree, rows: Tree, around: Tree, otherwise: Tree) -> Tree:
        """The rows that the server has from what was sent, honest or not, with others for members that are not active."""
        self._reply(jax.tree.map(lambda r: r[0], sent))
        if self._clients.attack is not None:
            key = self._clients.key_for(ATTACKING)
            rows = self._clients.attack.corrupted(self._ids, self.active, rows, around, key)
        if self._active is None:
            return rows
        otherwise = jax.tree.map(jnp.zeros_like, rows) if otherwise is None else otherwise
        return jax.tree.map(partial(_where, self._active), rows, otherwise)

    def _combine(self, each: Array, rows: Tree, around: Tree) -> Tree:
        """What the rule makes of all answers."""
        return everywhere(self._clients.aggregation.combine(each, rows, around, self._clients.key_for(COMBINING)))

    def _weights(self) -> Array:
        weights = self._clients.population.weights[self._ids]
        return weights if self._active is None else weights * self._active

    def _unbiased(self) -> Array:
        """(M / |S|) w_i"""
        weights, count = self._weights(), jnp.maximum(self._count, 1)
        return weights * self._clients.population.size / count.astype(weights.dtype)

    def _average(self) -> Array:
        """The same; 1 / |S| where all weights are equal."""
        weights = self._weights()
        return weights / weights.sum() if self._clients.population.equal_weights else self._unbiased()

    def _share(self, each: Array) -> Array | None:
        """The sum of these; None where it is known to be 1."""
        return None if self._clients.population.equal_weights else each.sum()

    def _estimate(self, each: Array, function: Callable[..., Tree], args: tuple, around: Tree) -> Tree:
        if not self._clients.streams:
            return self._combine(each, self._heard(function, args, around), around)
        return recentred(self._sum(each, function, args)[0], self._share(each), around)

    def _sum(
        self,
        weights: Array,
        function: Callable[..., Tree],
        args: tuple,
        spread: Callable[[Array, Tree, Tree], _Spread | None] = lambda weights, each, total: None,
    ) -> tuple[Tree, Any]:
        """The weighted sum of the answers, and how far they are apart if that is asked for."""
        compute, rows = self._call(function, args)
        n, size = len(self._ids), self._together(compute, rows)

        def weighted(weights: Array, rows: Tree) -> tuple[tuple[Tree, _Spread | None], Tree]:
            """The sum over some clients, how far they are apart, and one client's part of it."""
            each = _at_once(compute, rows)
            if self._active is not None:  # whatever an absent member would have sent does not count
                each = jax.tree.map(lambda r: _where(weights > 0, r, jnp.zeros_like(r)), each)
            total = weighted_sum(weights, each)
            return everywhere((total, spread(weights, each, total))), jax.tree.map(lambda r: r[0], each)

        if size >= n:
            both, one = weighted(weights, rows)
            self._reply(one)
            return both

        chunks, index = _chunks(n, size)
        parts = jnp.concatenate([weights, jnp.zeros(chunks * size - n, weights.dtype)]).reshape(chunks, size)

        def add(so_far: Any, chunk: tuple[Array, Array]) -> tuple[Any, None]:
            weights, index = chunk
            (total, apart), _ = weighted(weights, jax.tree.map(lambda r: r[index], rows))
            before, known = so_far
            merged = known if known is None else known.merged(before, apart, total)
            return (jax.tree.map(jnp.add, before, total), merged), None

        shapes, one = jax.eval_shape(weighted, weights, rows)
        self._reply(one)
        return lax.scan(add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), (parts, index))[0]

    def _together(self, compute: Callable[[Tree], Tree], rows: Tree) -> int:
        """How many clients are computed at once: as many as were asked for, or on a CPU as many as its cache serves best."""
        n, given = len(self._ids), self._clients.chunk_size
        if given is None and jax.default_backend() == "cpu" and jax.device_count() == 1:
            row = jax.tree.map(lambda r: jax.ShapeDtypeStruct(r.shape[1:], r.dtype), rows)
            given = fitting(sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(jax.eval_shape(compute, row))))
        return n if given is None else -(-n // -(-n // given))  # chunks of one size, as far as that goes


class _Spread(NamedTuple):
    """Σ a_i and Σ a_i |h_i - h|², h the average of the h_i: kept apart from their sum, so that no digits cancel."""

    share: Array
    square: Array

    @classmethod
    def of(cls, weights: Array, each: Tree, total: Tree) -> _Spread:
        """How far the rows of some clients are apart, given their weighted sum."""
        share = weights.sum()
        squares = jax.vmap(lambda h: squared_distance(h, _divided(total, share)))(each)
        return cls(share, weights @ squares.astype(weights.dtype))

    def merged(self, total: Tree, other: _Spread, others_total: Tree) -> _Spread:
        """With the rows of further clients (Chan, Golub and LeVeque, 1979)."""
        between = squared_distance(_divided(total, self.share), _divided(others_total, other.share))
        share = self.share + other.share
        return _Spread(share, self.square + other.square + between * self.share * other.share / _some(share))


def _divided(tree: Tree, share: Array) -> Tree:
    return jax.tree.map(lambda a: a / _some(share).astype(a.dtype), tree)


def _some(share: Array) -> Array:
    """The share, or 1 if there is none."""
    return jnp.where(share > 0, share, 1.0)


def _at_once(compute: Callable[[Tree], Tree], rows: Tree) -> Tree:
    """Every client's result; each device computes its share of the clients."""
    n = len(jax.tree.leaves(rows)[0])
    each = each_its_share(jax.vmap(compute)(each_its_share(padded(rows))))
    return jax.tree.map(lambda r: r[:n], each)


def _chunks(n: int, size: int) -> tuple[int, Array]:
    """The number of chunks of `size` for n members, and which members each has; the last chunk repeats the last member."""
    chunks = -(-n // size)
    return chunks, jnp.minimum(jnp.arange(chunks * size), n - 1).reshape(chunks, size)


def _where(active: Array, new: Array, old: Array) -> Array:
    return jnp.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
