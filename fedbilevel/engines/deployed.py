"""The deployed federation: the same algorithms, their client functions called by name over a transport.

What a client is to compute is an expression: a client function's name, a key, and arguments that are arrays,
values kept at the client, or further expressions. It is sent when the server needs the answer, so that
`S.mean(h, S.map(g, x))` is one round trip. Values stay at the client under a number as long as the server
needs them: each request says which these are.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.clients import Clients, Cohort, PerClient
from fedbilevel.core.participation import Participation, present
from fedbilevel.core.problem import LOSSES, Tree
from fedbilevel.core.sets import UNCONSTRAINED, Sets
from fedbilevel.core.traffic import Totals, floats
from fedbilevel.engines import wire
from fedbilevel.engines.call_shapes import Signatures, check_finite, check_result
from fedbilevel.engines.messages import Call, Evaluate, Kept, Part, Request, Save, Saved, Store, sent_floats
from fedbilevel.errors import InputError, NotFinite


class Transport(Protocol):
    """Carries bytes between the server and the clients; the one seam between us and a federated engine."""

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], dict[int, str]]:
        """Send each client its request at the same time: the replies, and for the others what went wrong."""


class Unsent(str):
    """What went wrong with a request that never left the server, and so is no traffic."""


logger = logging.getLogger(__name__)
NEVER = -1  # the step at which a client that was never asked to saved its values


class Held:
    """One client's value, as the server knows it: still to be computed there, or kept there."""

    def __init__(self, federation: RemoteFederation, m: int, make: Make):
        self.slot = federation.new_slot()
        self.make: Make | None = make
        federation.needed[m].add(self.slot)
        weakref.finalize(self, federation.needed[m].discard, self.slot)

    def expression(self, computed: list[Held]) -> Any:
        """For a request; `computed` gains what the client will keep after it."""
        if self.make is None or any(self is c for c in computed):
            return Kept(self.slot)
        expression = self.make(self.slot, computed)
        computed.append(self)
        return expression


Make = Callable[[int, list[Held]], Call | Store | Saved]  # the expression that has a value kept under a slot
Wanted = dict[int, tuple[Any, list[Held]]]  # by client, what it is to compute, and what it keeps after that


class HeldPart(NamedTuple):
    """A held value, or a part of it."""

    held: Held
    path: tuple[int, ...] = ()

    def expression(self, computed: list[Held]) -> Any:
        """As `Held.expression`."""
        whole = self.held.expression(computed)
        return Part(whole, self.path) if self.path else whole


class RemoteRows(PerClient):
    """A held value for each client, by its number; made when first asked for, since a cohort's members can still change."""

    def __init__(self, at: Callable[[int], HeldPart]):
        self.at: Callable[[int], HeldPart] = cache(at)

    def __getitem__(self, index: int) -> RemoteRows:
        def part(m: int) -> HeldPart:
            whole = self.at(m)
            return HeldPart(whole.held, (*whole.path, index))

        return RemoteRows(part)

    def made(self, population: int) -> RemoteRows:
        """The same for all clients, made by now, so that it keeps alive nothing that it was made from."""
        return RemoteRows([self.at(m) for m in range(population)].__getitem__)


class RemoteFederation:
    """Clients behind a transport, seen from the server. `init` and `step` mirror `simulate.Simulator`."""

    def __init__(
        self,
        transport: Transport,
        weights: Array,
        participation: Participation,
        sets: Sets = UNCONSTRAINED,
        signatures: Signatures | None = None,
        metric_names: Sequence[str] = LOSSES,
    ):
        self.metric_names = metric_names
        self.transport, self.weights, self.participation, self.sets = transport, np.asarray(weights), participation, sets
        self.needed: dict[int, set[int]] = {m: set() for m in range(len(weights))}  # slots, by client
        self.absences = 0  # answers of clients that were missing since the last evaluation
        self._signatures = signatures
        self._slots = 0
        self._saved = np.full(len(weights), NEVER, np.int32)  # by client, the step of the values on its disk
        self._troubles: dict[int, str] = {}

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

    def rounds(self, algorithm: Algorithm, key: Array) -> Array | int:
        """The rounds that the step with this key takes, by the algorithm's own formula."""
        server_key, _ = jax.random.split(key)
        return algorithm.rounds(server_key, self.participation.capacity(len(self.weights)))

    def repeat(self, goes_on: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
        """`carry` after `body` was applied while `goes_on`."""
        while goes_on(carry):
            carry = body(carry)
        return carry

    def evaluate(self, state: Any) -> dict[str, float]:
        """The problem's `measures` of all data of the clients that answer, and how many answers were missing until now."""
        wanted: Wanted = {}
        for m in range(len(self.weights)):
            computed: list[Held] = []
            y = state.y.at(m).expression(computed) if isinstance(state.y, RemoteRows) else state.y
            wanted[m] = Evaluate(state.x, y), computed
        replies, errors = self.ask(wanted, reply=True, types={})
        if not replies:
            raise silence(errors)
        weights = self.weights[list(replies)]
        means = weights / weights.sum() @ np.stack(list(replies.values()))
        absences, self.absences = self.absences + len(errors), 0
        return {**dict(zip(self.metric_names, map(float, means), strict=True)), "absences": absences}

    def save(self, state: Any, step: int) -> Any:
        """The state as a checkpoint holds it, once the clients have put their parts on their own disks, and the absences.

        In the place of the clients' values it has the step at which each client last saved its own. A client keeps
        those of the checkpoint before too, until the next call says that this one is durable. Raises `RuntimeError`
        if no client could save its own.
        """
        rows = [leaf for leaf in _leaves(state) if isinstance(leaf, RemoteRows)]
        wanted: Wanted = {}
        for m in range(len(self.weights)) if rows else ():
            computed: list[Held] = []
            values = [leaf.at(m).expression(computed) for leaf in rows]
            wanted[m] = Save(step, values, int(self._saved[m])), computed
        replies, errors = self.ask(wanted, reply=False, types={})
        if rows and not replies:
            m, trouble = next(iter(errors.items()))
            raise RuntimeError(f"no client has saved its values for a checkpoint; client {m}: {trouble}")
        self._saved[list(replies)] = step
        where = self._saved.copy()
        saved = jax.tree.map(lambda leaf: where if isinstance(leaf, RemoteRows) else leaf, state, is_leaf=_is_rows)
        return saved, np.int32(self.absences)

    def saved_shapes(self, shapes: Any) -> Any:
        """The shapes of what `save` gives, from those of a simulated state."""
        where = jax.ShapeDtypeStruct(self._saved.shape, self._saved.dtype)
        saved = jax.tree.map(lambda leaf: where if isinstance(leaf, PerClient) else leaf, shapes, is_leaf=_is_rows)
        return saved, jax.ShapeDtypeStruct((), np.int32)

    def restored(self, saved: Any, shapes: Any, start: Callable[[], Any]) -> Any:
        """The state from what `save` gave; `start()` is the run's first one, for clients that never saved theirs."""
        saved_state, absences = saved
        kinds, leaves = _leaves(shapes), _leaves(saved_state)
        rows = [leaf for kind, leaf in zip(kinds, leaves, strict=True) if isinstance(kind, PerClient)]
        if rows:
            self._saved = np.array(rows[0])
        first = _leaves(start()) if rows and NEVER in self._saved else []
        self.absences = int(absences)
        never = [leaf for leaf in first if isinstance(leaf, RemoteRows)]

        def held(place: int) -> RemoteRows:
            return RemoteRows([part(place, m, int(step)) for m, step in enumerate(self._saved)].__getitem__)

        def part(place: int, m: int, step: int) -> HeldPart:
            if step == NEVER:
                return never[place].at(m)
            return HeldPart(Held(self, m, lambda slot, _: Saved(step, place, slot)))

        places = iter(range(len(rows)))
        values = [held(next(places)) if isinstance(k, PerClient) else v for k, v in zip(kinds, leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shapes, is_leaf=_is_rows), values)

    def ask(self, wanted: Wanted, reply: bool, types: Mapping[str, type]) -> tuple[dict[int, Tree], dict[int, str]]:
        """Have each client compute its expression; what the expressions hold is then kept there."""
        if not wanted:
            return {}, {}
        requests = {m: wire.encode(Request(e, reply, sorted(self.needed[m]))) for m, (e, _) in wanted.items()}
        answers, errors = self.transport.ask(requests)
        replies: dict[int, Tree] = {}
        for m, answer in answers.items():
            try:
                value = wire.decode(answer, types)
                if reply:
                    self._check(wanted[m][0], value)
            except Exception as error:  # whatever one client sends is that client's trouble alone
                errors[m] = f"{type(error).__name__}: {error}"
                continue
            replies[m] = value
            for held in wanted[m][1]:
                held.make = None
        self._report(replies, errors)
        return {m: replies[m] for m in wanted if m in replies}, errors

    def _check(self, expression: Any, value: Tree) -> None:
        """Raise unless the value can be what the expression gives."""
        if isinstance(expression, Call) and self._signatures is not None:
            check_result(self._signatures, expression.function, value)
        if isinstance(expression, Evaluate) and np.shape(value) != (len(self.metric_names),):
            raise InputError(
                f"{len(self.metric_names)} numbers were asked for, and an array of shape {np.shape(value)} came: refused"
            )
        check_finite("an answer", value)

    def _report(self, replies: dict[int, Tree], errors: dict[int, str]) -> None:
        """Log who has fallen silent or is refused, and who is back, once each."""
        for m, error in errors.items():
            if self._troubles.get(m) != error:
                logger.warning("client %d is left out of this round: %s", m, error)
                self._troubles[m] = error
        for m in replies:
            if self._troubles.pop(m, None) is not None:
                logger.warning("client %d takes part again", m)


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

    def ask(self, wanted: Wanted, reply: bool) -> tuple[dict[int, Tree], dict[int, str]]:
        """As the federation's `ask`, counted as traffic."""
        replies, errors = self.federation.ask(wanted, reply, self._types)
        down = sum(sent_floats(e) for m, (e, _) in wanted.items() if not isinstance(errors.get(m), Unsent))
        up = sum(floats(r) for r in replies.values())
        rounds, before_up, before_down = self.totals
        self.totals = Totals(rounds + (reply and bool(wanted)), before_up + up, before_down + down)
        self.federation.absences += len(errors) if reply else 0
        return replies, errors

    def settled(self, state: Any) -> Any:
        """The state, once the clients have computed what it leaves with them."""
        wanted: Wanted = {}
        population = len(self.federation.weights)
        state = jax.tree.map(lambda leaf: leaf.made(population) if _is_rows(leaf) else leaf, state, is_leaf=_is_rows)
        for rows in _leaves(state):
            for m in range(population) if isinstance(rows, RemoteRows) else ():
                part = rows.at(m)
                if part.held.make is not None:
                    expressions, computed = wanted.setdefault(m, ([], []))
                    expressions.append(part.expression(computed))
        self.ask(wanted, reply=False)
        return state


class RemoteCohort(Cohort):
    """Some clients behind the transport.

    One that fails to answer is not asked again in this cohort. Where nobody is left, others stand in: a mean is never
    over nobody, as in a simulation with dropouts.
    """

    def __init__(self, clients: RemoteClients, ids: np.ndarray, active: np.ndarray):
        self._clients, self._ids, self._active = clients, np.array(ids), np.array(active)
        self._errors: dict[int, str] = {}  # of those that failed to answer

    @property
    def active(self) -> Array:
        return jnp.asarray(self._active)

    def map(self, function: Callable[..., Tree], *args: Tree) -> PerClient:
        call = self._call(function, args)
        return self._hold(lambda m: partial(call, m))

    def mean(self, function: Callable[..., Tree], *args: Tree) -> Tree:
        replies, weights = self._ask(function, args)
        return _weighted_sum(weights / weights.sum(), replies)

    def unbiased_mean(self, function: Callable[..., Tree], *args: Tree) -> Tree:
        replies, weights = self._ask(function, args)
        return _weighted_sum(weights * (len(self._clients.federation.weights) / max(len(replies), 1)), replies)

    def gather(self, function: Callable[..., Tree], *args: Tree, otherwise: Tree = None) -> Tree:
        replies, _ = self._ask(function, args, stand_in=otherwise is None)
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
        check_finite("what the server scatters", rows)

        def store(m: int) -> Make:
            (row,) = np.flatnonzero(self._ids == m)
            return lambda slot, _: Store(jax.tree.map(lambda r: r[row], rows), slot)

        return self._hold(store)

    def take(self, everyone: PerClient) -> PerClient:
        assert isinstance(everyone, RemoteRows)
        return everyone

    def put(self, everyone: PerClient, part: PerClient) -> PerClient:
        assert isinstance(everyone, RemoteRows) and isinstance(part, RemoteRows)
        mine = set(self._ids[self._active])
        population = len(self._clients.federation.weights)
        return RemoteRows([(part if m in mine else everyone).at(m) for m in range(population)].__getitem__)

    def _hold(self, make: Callable[[int], Make]) -> RemoteRows:
        federation = self._clients.federation
        return RemoteRows(lambda m: HeldPart(Held(federation, m, make(m))))

    def _call(self, function: Callable[..., Tree], args: tuple) -> Callable[[int, int | None, list[Held]], Call]:
        key = np.asarray(jax.random.key_data(self._clients.next_key()))
        check_finite(f"what the server sends to {function.__name__}", [a for a in args if not isinstance(a, RemoteRows)])

        def call(m: int, slot: int | None, computed: list[Held]) -> Call:
            here = tuple(a.at(m).expression(computed) if isinstance(a, RemoteRows) else a for a in args)
            return Call(function.__name__, key, here, slot)

        return call

    def _ask(self, function: Callable[..., Tree], args: tuple, stand_in: bool = True) -> tuple[list[Tree], np.ndarray]:
        """The replies of the members who answer, or of those who stand in for them if none does, and their weights."""
        call = self._call(function, args)
        replies: dict[int, Tree] = {}
        while not replies and self._active.any():
            wanted: Wanted = {}
            for m in map(int, self._ids[self._active]):
                computed: list[Held] = []
                wanted[m] = call(m, None, computed), computed
            replies, errors = self._clients.ask(wanted, reply=True)
            self._errors |= errors
            asked, self._active = self._active, self._active & ~np.isin(self._ids, list(errors))
            if stand_in and not replies:
                self._replace(np.flatnonzero(asked))
        members = self._ids[self._active]
        return [replies[m] for m in members], self._clients.federation.weights[members]

    def _replace(self, rows: np.ndarray) -> None:
        """Put clients that have not failed yet, in random order, into the rows of members that have."""
        others = np.asarray(jax.random.permutation(self._clients.next_key(), len(self._clients.federation.weights)))
        others = others[~np.isin(others, list(self._errors))]
        if not len(others):
            raise silence(self._errors)
        for row, m in zip(rows, others, strict=False):
            self._ids[self._ids == m] = self._ids[row]
            self._ids[row], self._active[row] = m, True


def silence(errors: Mapping[int, str]) -> NotFinite | RuntimeError:
    """What to raise where no client of the federation has answered."""
    diverged = sum(error.startswith(NotFinite.__name__) for error in errors.values())
    if 2 * diverged > len(errors):
        return NotFinite(f"what {diverged} of {len(errors)} clients computed is not finite")
    m, trouble = next(iter(errors.items()))
    return RuntimeError(f"none of {len(errors)} clients answered; client {m}: {trouble}")


def _is_rows(node: Any) -> bool:
    return isinstance(node, PerClient)


def _leaves(state: Any) -> list[Any]:
    """The arrays of a state, and what its clients hold."""
    return jax.tree.leaves(state, is_leaf=_is_rows)


def _weighted_sum(weights: np.ndarray, replies: list[Tree]) -> Tree:
    def add(*leaves: np.ndarray) -> Array:
        total = weights[0] * leaves[0]
        for weight, leaf in zip(weights[1:], leaves[1:], strict=True):
            total += weight * leaf
        return jnp.asarray(total)

    return jax.tree.map(add, *replies)
