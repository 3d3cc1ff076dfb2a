"""The clients behind an exchange, as an algorithm sees them during one step.

What a client should compute is an expression: a client function's name, a key, and arguments that are arrays,
values kept at the client, or further expressions. It is sent when the server needs the answer, so that
`S.mean(h, S.map(g, x))` is one round trip. Values stay at the client under a number for as long as the server
needs them; each request lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.aggregations.buffered import Buffered
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.aggregation import COMBINING, ENCODING, Aggregation, Mean, beyond, sent_as, sent_down
from fedbilevel.core.clients import Clients, Cohort, PerClient, recentred, squared_distance
from fedbilevel.core.participation import Participation, present
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.core.randomness import wrapped
from fedbilevel.core.sets import Sets
from fedbilevel.core.traffic import Totals, floats, size_in_bytes
from fedbilevel.engines import wire
from fedbilevel.engines.buffered_exchange import BufferedExchange, LateAnswer
from fedbilevel.engines.call_shapes import Shape, check_finite
from fedbilevel.engines.exchange import Exchange
from fedbilevel.engines.failure import Failures, Kind, silence
from fedbilevel.engines.held import Held, HeldPart, HeldRows, Make, Wanted, is_per_client, leaves
from fedbilevel.engines.messages import Call, Encode, Encoded, Store, sent
from fedbilevel.engines.secure_exchange import SecureExchange


class DeployedClients(Clients):
    """The clients during one step."""

    def __init__(
        self,
        exchange: Exchange,
        population: Population,
        participation: Participation,
        algorithm: Algorithm,
        key: Array,
        aggregation: Aggregation = Mean(),  # noqa: B008 (frozen)
        memory: dict[str, Any] | None = None,
        averaged: Mapping[str, Shape] = MappingProxyType({}),
        secure: SecureExchange | None = None,
        own: Callable[[bytes], np.ndarray] | None = None,
        buffered: BufferedExchange | None = None,
    ):
        self.exchange, self._population, self._participation, self._key = exchange, population, participation, key
        self.aggregation, self._secure, self._own, self._buffered = aggregation, secure, own, buffered
        self.memory, self.averaged = dict(memory or {}), averaged  # by client function: what encoding left out, and shapes
        self._types = wire.named_tuples(type(algorithm))
        self._calls, self.totals = 0, Totals()
        self.weights, self.equal_weights = np.asarray(population.weights), population.equal_weights
        self.reported: dict[str, Array | float] = {}

    @property
    def size(self) -> int:
        return self._participation.capacity(len(self.weights))

    @property
    def sets(self) -> Sets:
        return self._population.problem.sets

    def draw(self, active: Array | None = None) -> Cohort:
        ids, there = self._participation.draw(self.next_key(), len(self.weights))
        taking_part = present(active, there)
        return DeployedCohort(
            self, np.asarray(ids), np.ones(len(ids), bool) if taking_part is None else np.asarray(taking_part)
        )

    def everyone(self) -> Cohort:
        population = len(self.weights)
        return DeployedCohort(self, np.arange(population), np.ones(population, bool))

    def loop(self, n: Array | int, body: Callable[[Any, Tree], Tree], value: Tree) -> Tree:
        for k in range(int(n)):
            value = body(k, value)
        return value

    def next_key(self) -> Array:
        """The random key of the next call or draw."""
        self._calls += 1
        return jax.random.fold_in(self._key, self._calls - 1)

    def sent(self, function: str, args: tuple) -> tuple:
        """The arguments of a call, with the server's arrays as they cross."""
        leaves, structure = jax.tree.flatten(args, is_leaf=is_per_client)
        places = [k for k, leaf in enumerate(leaves) if not is_per_client(leaf) and self.aggregation.shrinks(leaf)]
        if not places:
            return args
        large = [leaves[k] for k in places]
        name = sent_as(function, large)
        made = _sent_down(self.aggregation, large, self.memory[name])
        self.memory[name] = made.left
        for k, message in zip(places, made.messages, strict=True):
            leaves[k] = Encoded(message, list(leaves[k].shape), leaves[k].dtype.name)
        return jax.tree.unflatten(structure, leaves)

    def key_for(self, purpose: int) -> Array:
        """A random key for something else than a call or a draw, which leaves theirs as they are."""
        return jax.random.fold_in(jax.random.fold_in(self._key, purpose), self._calls)

    def combining_key(self, answers: Tree) -> Array:
        """A random key for combining answers, which follows from the run's seed unless the server has randomness of its own.

        In that case it also follows from the answers: a step that is repeated with others must not have the same noise.
        """
        key = self.key_for(COMBINING)
        if self._own is None:
            return key
        question = [np.asarray(leaf) for leaf in jax.tree.leaves((jax.random.key_data(key), answers))]
        return wrapped(self._own(wire.encode(question)))

    def ask(self, wanted: Wanted, reply: bool) -> tuple[dict[int, Tree], Failures]:
        """Like `Exchange.ask`, counted as traffic."""
        replies, failures = self.exchange.ask(wanted, reply, self._types)
        self._count(wanted, list(replies.values()), failures, reply)
        return replies, failures

    def ask_first(self, wanted: Wanted, around: Tree) -> tuple[dict[int, Tree], Failures, list[tuple[LateAnswer, int]]]:
        """The first answers, why the others did not come, and late answers to earlier calls, with their ages."""
        assert self._buffered is not None
        replies, failures, late = self._buffered.ask(wanted, around, self._types)
        self._count(wanted, [*replies.values(), *(one.answer for one in late)], failures, True)
        return replies, failures, [(one, self._buffered.age(one)) for one in late]

    def secure_sum(self, wanted: Wanted, like: Shape) -> tuple[Tree, list[int]]:
        """The sum of what the clients compute, whole numbers in arrays of that shape, and whose are in it."""
        assert self._secure is not None
        total, members, failures = self._secure.total(wanted, like.size())
        self._count(wanted, [total] * len(members), failures, True)
        return like.filled(total), members

    def _count(self, wanted: Wanted, up: list[Tree], failures: Failures, reply: bool) -> None:
        down = [sent(e) for m, (e, _) in wanted.items() if m not in failures or failures[m].sent]
        rounds = int(reply and bool(wanted))
        self.totals = self.totals.and_also(Totals(rounds, floats(up), floats(down), size_in_bytes(up), size_in_bytes(down)))
        missing = [failure for failure in failures.values() if failure.kind is not Kind.UNDER_WAY]
        self.exchange.absences += len(missing) if reply else 0

    def report(self, **numbers: Array | float) -> None:
        self.reported |= numbers

    def settled(self, state: Any) -> Any:
        """The state, once the clients have computed the parts that they hold."""
        wanted: Wanted = {}
        population = len(self.weights)
        state = jax.tree.map(lambda leaf: leaf.made(population) if is_per_client(leaf) else leaf, state, is_leaf=is_per_client)
        for rows in leaves(state):
            for m in range(population) if isinstance(rows, HeldRows) else ():
                part = rows.at(m)
                if part.held.make is not None:
                    expressions, computed = wanted.setdefault(m, ([], []))
                    expressions.append(part.expression(computed))
        self.ask(wanted, reply=False)
        return state


class Heard(NamedTuple):
    """The answers that a mean is made of, their clients' weights, and for how many in time they count."""

    replies: list[Tree]
    weights: np.ndarray
    size: float


class DeployedCohort(Cohort):
    """Some clients behind the transport.

    One that fails to answer is not asked again in this cohort. If nobody is left, others stand in: a mean is never
    over nobody, as in a simulation with dropouts.
    """

    def __init__(self, clients: DeployedClients, ids: np.ndarray, active: np.ndarray):
        self._clients, self._ids, self._active = clients, np.array(ids), np.array(active)
        self._failures: Failures = {}  # of those that failed to answer

    @property
    def active(self) -> Array:
        return jnp.asarray(self._active)

    def map(self, function: Callable[..., Tree], *args: Tree) -> PerClient:
        call = self._call(function, args)
        return self._hold(lambda m: partial(call, m))

    def mean(self, function: Callable[..., Tree], *args: Tree, around: Tree = None) -> Tree:
        heard = self._hear(function, args, around)
        return self._estimate(self._average(heard), heard.replies, around)

    def mean_and_drift(self, function: Callable[..., Tree], *args: Tree, around: Tree) -> tuple[Tree, Array]:
        heard = self._hear(function, args, around)
        replies, each = heard.replies, self._average(heard)
        if self._clients.aggregation.only_means:
            return self._combine(each, replies, around), jnp.full((), jnp.nan)
        total, share = _weighted_sum(each, replies), each.sum()
        center = jax.tree.map(lambda h: h / jnp.asarray(share, h.dtype), total)
        squares = np.asarray([squared_distance(reply, center) for reply in replies])
        streams = self._clients.aggregation.streams
        combined = recentred(total, self._share(each), around) if streams else self._combine(each, replies, around)
        return combined, jnp.sqrt(each @ squares / share)

    def unbiased_mean(self, function: Callable[..., Tree], *args: Tree, around: Tree = None) -> Tree:
        heard = self._hear(function, args, around)
        return self._estimate(self._unbiased(heard), heard.replies, around)

    def gather(self, function: Callable[..., Tree], *args: Tree, otherwise: Tree = None) -> Tree:
        replies, _ = self._ask(function, args, stand_in=otherwise is None)
        if not replies and otherwise is None:
            raise RuntimeError(f"nobody was asked for {function.__name__}: give the rows to return as `otherwise`")
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
        check_finite("what the server scatters", rows)

        def store(m: int) -> Make:
            (row,) = np.flatnonzero(self._ids == m)
            return lambda slot, _: Store(jax.tree.map(lambda r: r[row], rows), slot)

        return self._hold(store)

    def take(self, everyone: PerClient) -> PerClient:
        assert isinstance(everyone, HeldRows)
        return everyone

    def put(self, everyone: PerClient, part: PerClient) -> PerClient:
        assert isinstance(everyone, HeldRows) and isinstance(part, HeldRows)
        mine = set(self._ids[self._active])
        population = len(self._clients.weights)
        return HeldRows([(part if m in mine else everyone).at(m) for m in range(population)].__getitem__)

    def _hold(self, make: Callable[[int], Make]) -> HeldRows:
        slots = self._clients.exchange.slots
        return HeldRows(lambda m: HeldPart(Held(slots, m, make(m))))

    def _call(self, function: Callable[..., Tree], args: tuple) -> Callable[[int, int | None, list[Held]], Call]:
        key = np.asarray(jax.random.key_data(self._clients.next_key()))
        check_finite(f"what the server sends to {function.__name__}", [a for a in args if not isinstance(a, HeldRows)])
        args = self._clients.sent(function.__name__, args)

        def call(m: int, slot: int | None, computed: list[Held]) -> Call:
            here = tuple(a.at(m).expression(computed) if isinstance(a, HeldRows) else a for a in args)
            return Call(function.__name__, key, here, slot)

        return call

    def _hear(self, function: Callable[..., Tree], args: tuple, around: Tree) -> Heard:
        """Like `_ask`, for answers that are averaged: decoded changes where clients encode."""
        rule, name = self._clients.aggregation, function.__name__
        if isinstance(rule, Buffered):
            return self._hear_first(rule, function, args, around)
        if not rule.encodes:
            return _heard(*self._ask(function, args))
        key, before = self._clients.key_for(ENCODING), self._clients.memory[name]
        assert isinstance(before, HeldRows)
        told = beyond(around, [a for a in args if not isinstance(a, HeldRows)])
        check_finite("the point that answers are near", told)
        after: dict[int, HeldPart] = {}

        def encoded(m: int, call: Call, computed: list[Held]) -> Encode:
            memory = before.at(m).expression(computed)
            left = Held(self._clients.exchange.slots, m, lambda slot, _: Store(None, slot))
            after[m] = HeldPart(left)
            computed.append(left)
            return Encode(call, told, memory, np.asarray(jax.random.key_data(key)), left.slot)

        if rule.hides:
            messages, weights = self._sum(function, args, encoded)
        else:
            messages, weights = self._ask(function, args, encoded=encoded)
        heard, population = set(map(int, self._ids[self._active])), len(self._clients.weights)
        self._clients.memory[name] = HeldRows([after[m] if m in heard else before.at(m) for m in range(population)].__getitem__)
        return _heard([_decoded(rule, key, message, self._clients.averaged[name]) for message in messages], weights)

    def _hear_first(self, rule: Buffered, function: Callable[..., Tree], args: tuple, around: Tree) -> Heard:
        """The answers that came in time, and late ones to earlier calls of the function as they count now."""
        late: list[tuple[LateAnswer, int]] = []

        def first(wanted: Wanted) -> tuple[dict[int, Tree], Failures]:
            replies, failures, come = self._clients.ask_first(wanted, around)
            late.extend(come)
            return replies, failures

        replies, weights = self._ask(function, args, ask=first)
        counted = [(one, rule.share(age)) for one, age in late if age <= rule.oldest]
        self._clients.exchange.absences += len(late) - len(counted)
        shares = np.asarray([share for _, share in counted])
        more = self._clients.weights[[one.client for one, _ in counted]] * shares
        moved = [_moved(one.answer, one.asked.around, around) for one, _ in counted]
        return Heard([*replies, *moved], np.concatenate([weights, more]), len(replies) + shares.sum())

    def _sum(
        self, function: Callable[..., Tree], args: tuple, encoded: Callable[[int, Call, list[Held]], Call | Encode]
    ) -> tuple[list[Tree], np.ndarray]:
        """The sum of the members' messages as the only one, and the weights of those in it."""
        call, wanted = self._call(function, args), Wanted()
        for m in map(int, self._ids[self._active]):
            computed: list[Held] = []
            wanted[m] = encoded(m, call(m, None, computed), computed), computed
        total, members = self._clients.secure_sum(wanted, self._clients.averaged[function.__name__])
        self._active = self._active & np.isin(self._ids, members)
        return [total], self._clients.weights[self._ids[self._active]]

    def _ask(
        self,
        function: Callable[..., Tree],
        args: tuple,
        stand_in: bool = True,
        encoded: Callable[[int, Call, list[Held]], Call | Encode] = lambda m, call, computed: call,
        ask: Callable[[Wanted], tuple[dict[int, Tree], Failures]] | None = None,
    ) -> tuple[list[Tree], np.ndarray]:
        """The replies of the members who answer, or of those who stand in for them if none does, and their weights."""
        call = self._call(function, args)
        replies: dict[int, Tree] = {}
        while not replies and self._active.any():
            wanted: Wanted = {}
            for m in map(int, self._ids[self._active]):
                computed: list[Held] = []
                wanted[m] = encoded(m, call(m, None, computed), computed), computed
            replies, failures = self._clients.ask(wanted, reply=True) if ask is None else ask(wanted)
            self._failures |= failures
            asked, self._active = self._active, self._active & ~np.isin(self._ids, list(failures))
            if stand_in and not replies:
                self._replace(np.flatnonzero(asked))
        members = self._ids[self._active]
        return [replies[m] for m in members], self._clients.weights[members]

    def _unbiased(self, heard: Heard) -> np.ndarray:
        """(M / |S|) w_i for those who answered"""
        return heard.weights * (len(self._clients.weights) / max(heard.size, 1))

    def _average(self, heard: Heard) -> np.ndarray:
        """The same; 1 / |S| where all weights are equal."""
        return heard.weights / heard.weights.sum() if self._clients.equal_weights else self._unbiased(heard)

    def _share(self, each: np.ndarray) -> float | None:
        """The sum of these; None where it is known to be 1."""
        return None if self._clients.equal_weights else float(each.sum())

    def _estimate(self, each: np.ndarray, replies: list[Tree], around: Tree) -> Tree:
        if not self._clients.aggregation.streams:
            return self._combine(each, replies, around)
        return recentred(_weighted_sum(each, replies), self._share(each), around)

    def _combine(self, each: np.ndarray, replies: list[Tree], around: Tree) -> Tree:
        """What the rule makes of all answers."""
        rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)
        answers = jnp.asarray(each), rows, around
        return _combined(self._clients.aggregation, *answers, self._clients.combining_key(answers))

    def _replace(self, rows: np.ndarray) -> None:
        """Put clients that have not failed yet, in random order, into the rows of members that have."""
        others = np.asarray(jax.random.permutation(self._clients.next_key(), len(self._clients.weights)))
        others = others[~np.isin(others, list(self._failures))]
        if not len(others):
            raise silence(self._failures)
        for row, m in zip(rows, others, strict=False):
            self._ids[self._ids == m] = self._ids[row]
            self._ids[row], self._active[row] = m, True


def _heard(replies: list[Tree], weights: np.ndarray) -> Heard:
    return Heard(replies, weights, len(weights))


def _moved(answer: Tree, then: Tree, now: Tree) -> Tree:
    """An answer that was near one point as one that is near another; one that is near none as it is."""
    if then is None or now is None:
        return answer
    return jax.tree.map(lambda h, old, new: h - np.asarray(old) + np.asarray(new), answer, then, now)


_sent_down = jax.jit(sent_down, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _combined(rule: Aggregation, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
    return rule.combine(weights, rows, around, key)


@partial(jax.jit, static_argnums=(0, 3))
def _decoded(rule: Aggregation, key: Array, message: Tree, like: Shape) -> Tree:
    return rule.decode(key, message, like.empty())


def _weighted_sum(weights: np.ndarray, replies: list[Tree]) -> Tree:
    def add(*leaves: np.ndarray) -> Array:
        total = weights[0] * leaves[0]
        for weight, leaf in zip(weights[1:], leaves[1:], strict=True):
            total += weight * leaf
        return jnp.asarray(total)

    return jax.tree.map(add, *replies)
