"""The deployed engine: the same algorithms, with client functions called by name at clients behind a transport."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from fedbilevel.aggregations.buffered import Buffered
from fedbilevel.aggregations.secure import HiddenSum
from fedbilevel.algorithms import called
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core import randomness
from fedbilevel.core.aggregation import Aggregation, Mean
from fedbilevel.core.clients import PerClient
from fedbilevel.core.participation import Everyone, Participation
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.engines import wire
from fedbilevel.engines.arrivals import ArrivalsFile
from fedbilevel.engines.buffered_exchange import BufferedExchange, LateTransport, Patient
from fedbilevel.engines.call_shapes import CallShapes, Shape
from fedbilevel.engines.deployed_clients import DeployedClients
from fedbilevel.engines.engine import (
    ABSENCES,
    Limits,
    Step,
    Stretch,
    advance,
    complete_report,
    recalled,
    remembering,
    unflattened,
)
from fedbilevel.engines.exchange import Exchange, Transport
from fedbilevel.engines.failure import Failures, silence
from fedbilevel.engines.held import Held, HeldPart, HeldRows, Wanted, is_per_client, leaves
from fedbilevel.engines.messages import Evaluate, Save, Saved, Store
from fedbilevel.engines.secure_exchange import OpenedSums, SecureExchange
from fedbilevel.engines.server_metrics import known_at_server
from fedbilevel.engines.simulated import SimulatedEngine, nothing_left
from fedbilevel.errors import InputError
from fedbilevel.tasks.base import Task

NEVER = -1  # instead of a step, for a client that has never saved its values


class DeployedEngine:
    """Clients behind a transport, seen from the server, which knows the population's problem and weights but not its rows."""

    def __init__(
        self,
        transport: Transport,
        population: Population,
        participation: Participation,
        call_shapes: CallShapes | None = None,
        test_rows: Sequence[int] | None = None,
        aggregation: Aggregation = Mean(),  # noqa: B008 (frozen)
        own: Callable[[bytes], np.ndarray] | None = None,  # where the server adds noise: its own key for a question
        arrivals: ArrivalsFile | None = None,
        signatures: Any = None,  # for secure sums, `Signatures`
        opened: OpenedSums | None = None,  # for secure sums, if steps may be repeated
    ):
        self.population, self.participation, self.aggregation = population, participation, aggregation
        self._own, self._opened, self._step = own, opened, 0
        numbers = len(population.problem.metric_names) + len(population.problem.tests)
        late = transport if isinstance(transport, LateTransport) else None
        asking = Patient(late) if late and aggregation.buffers else transport
        self.exchange = Exchange(asking, population.size, numbers, call_shapes, aggregation)
        self._buffered: BufferedExchange | None = None
        if isinstance(aggregation, Buffered):
            assert late is not None, "a mean of first answers needs a transport that keeps late ones"
            self._buffered = BufferedExchange(self.exchange, late, aggregation, arrivals)
        self.secure: SecureExchange | None = None
        if isinstance(aggregation, HiddenSum):
            self.secure = SecureExchange(self.exchange, aggregation, signatures, population.size, opened)
        held_out = np.zeros(population.size) if population.test is None else population.test.size
        self._test_rows = np.asarray(held_out if test_rows is None else test_rows, float)  # that each client holds out
        self._saved = np.full(population.size, NEVER, np.int32)  # by client, the step of the values on its disk
        self._averaged: dict[str, Shape] = {}  # by client function, the shape of answers that are averaged and encoded
        self._addressed: dict[str, Tree] = {}  # the shapes of arrays that are sent encoded
        self._known: tuple[Task, Callable[[Array | None, Array | None], Mapping[str, Array]]] | None = None

    def require(self, task: Task, algorithm: Algorithm) -> None:
        """Raise `InputError` unless this engine can run the algorithm on the task."""
        self.participation.capacity(self.population.size)
        self.aggregation.require(self.population, self.participation)
        self.aggregation.require_algorithm(called(algorithm), algorithm.single_answers, algorithm.late_answers)
        if algorithm.pooled:
            name = called(algorithm)
            raise InputError(f"{name} pools the data of all clients, but a federation's data stays in place: simulate it")

    def init(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> Step:
        """The algorithm's first state."""
        self._find_averaged(algorithm, x, y, key)
        clients = self._clients(algorithm, key, self._first_memory())
        with self.secure.beginning() if self.secure else contextlib.nullcontext():
            state = algorithm.init(x, y, clients)
        return Step(clients.settled(remembering(state, clients.memory)), clients.totals, {})

    def step(self, algorithm: Algorithm, state: Any, key: Array) -> Step:
        """One outer step."""
        server_key, clients_key = jax.random.split(key)
        state, memory = recalled(state)
        clients = self._clients(algorithm, clients_key, memory)
        state = algorithm.step(state, clients, server_key)
        state = clients.settled(remembering(state, clients.memory))
        return Step(state, clients.totals, complete_report(algorithm, clients.reported))

    def rounds(self, algorithm: Algorithm, key: Array) -> Array | int:
        """The rounds that the step with this key takes, by the algorithm's own formula."""
        server_key, _ = jax.random.split(key)
        return algorithm.rounds(server_key, self.participation.capacity(self.population.size))

    def repeat(self, goes_on: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
        """Apply `body` to `carry` while `goes_on` holds."""
        while goes_on(carry):
            carry = body(carry)
        return carry

    def start(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> Step:
        """See `init`."""
        return self.init(algorithm, x, y, key)

    def advance(self, algorithm: Algorithm, state: Any, step: int, key: Array, limits: Limits) -> Stretch:
        """A stretch of steps, one after another."""
        made = advance(self, algorithm, state, step, key, limits)
        self._step = int(made.step)
        return made

    def point(self, state: Any) -> tuple[Any, Any]:
        """x and y of a state; `PerClient` where clients keep theirs."""
        return state.x, state.y

    def evaluate(self, task: Task, state: Any) -> Mapping[str, Any]:
        """The metrics on the data of the clients that answer, the number of missing answers, and what the server knows."""
        wanted: Wanted = {}
        for m in range(self.population.size):
            computed: list[Held] = []
            at = [v.at(m).expression(computed) if isinstance(v, HeldRows) else v for v in (state.x, state.y)]
            wanted[m] = Evaluate(*at), computed
        found, failures = self._mean_metrics(wanted)
        absences, self.exchange.absences = self.exchange.absences + len(failures), 0
        if self._known is None or self._known[0] is not task:
            self._known = task, jax.jit(known_at_server(task))
        known = self._known[1](*(None if is_per_client(v) else v for v in (state.x, state.y)))
        return {**found, ABSENCES: absences, **known}

    def _mean_metrics(self, wanted: Wanted) -> tuple[dict[str, float], Failures]:
        """The weighted means of what clients measure, by name, and who is missing.

        In a secure sum tests are told only if all clients hold out equally many rows.
        """
        problem = self.population.problem
        names, tests = problem.metric_names, problem.test_names
        if self.secure is not None:
            assert isinstance(self.aggregation, HiddenSum)
            rule = self.aggregation.for_metrics(len(names) + len(tests))
            total, members, failures = self.secure.total(wanted, len(names) + len(tests), self._step)
            mean = rule.combine(jax.numpy.ones(len(members)), total[None], None, randomness.key(0))
            found = dict(zip((*names, *tests), map(float, mean), strict=True))
            alike = len(set(self._test_rows)) == 1 and self._test_rows[0] > 0
            return {name: value for name, value in found.items() if alike or name in names}, failures
        replies, failures = self.exchange.ask(wanted, reply=True, types={})
        if not replies:
            raise silence(failures)
        members, each = list(replies), np.stack(list(replies.values()))
        metrics, tested = np.split(each, [len(names)], axis=1)
        weights = np.asarray(self.population.weights)
        return _means(names, metrics, weights[members]) | _means(tests, tested, self._test_rows[members]), failures

    def refusal(self, state: Any) -> str:
        """Nothing: a client that cannot encode its answer says so itself."""
        return ""

    def save(self, state: Any, step: int) -> list[np.ndarray]:
        """The state as a checkpoint holds it, once the clients have put their parts on their own disks, and the absences.

        Instead of the clients' values it has the step at which each client last saved its own. A client also keeps
        those of the previous checkpoint, until the next call says that this one is durable. Raises `RuntimeError`
        if no client could save its own.
        """
        if self._opened is not None:
            self._opened.checkpoint()
        rows = [leaf for leaf in leaves(state) if isinstance(leaf, HeldRows)]
        wanted: Wanted = {}
        for m in range(self.population.size) if rows else ():
            computed: list[Held] = []
            values = [leaf.at(m).expression(computed) for leaf in rows]
            wanted[m] = Save(step, values, int(self._saved[m])), computed
        replies, failures = self.exchange.ask(wanted, reply=False, types={})
        if rows and not replies:
            m, failure = next(iter(failures.items()))
            raise RuntimeError(f"no client has saved its values for a checkpoint; client {m}: {failure}")
        self._saved[list(replies)] = step
        own = [self._saved.copy() if isinstance(leaf, HeldRows) else np.asarray(leaf) for leaf in leaves(state)]
        waiting = [self._buffered.saved()] if self._buffered else []
        return [*own, np.asarray(self.exchange.absences, np.int32), *waiting]

    def restore(self, arrays: list[np.ndarray], algorithm: Algorithm, x: Array, y: Array, key: Array) -> Any:
        """The state from what `save` returned; `InputError` if the arrays are not this run's."""
        self._find_averaged(algorithm, x, y, key)
        if self._buffered:
            *arrays, waiting = arrays
        shapes = self._simulated.state_shapes(algorithm, x, y, key)
        kinds, structure = jax.tree.flatten(shapes, is_leaf=is_per_client)
        where = jax.ShapeDtypeStruct(self._saved.shape, self._saved.dtype)
        own = [where if is_per_client(kind) else kind for kind in kinds]
        *values, absences = unflattened(arrays, [*own, jax.ShapeDtypeStruct((), np.int32)])
        saved = [np.array(value) for kind, value in zip(kinds, values, strict=True) if is_per_client(kind)]
        if saved:
            self._saved = saved[0]
        with self._buffered.unrecorded() if self._buffered else contextlib.nullcontext():
            first = leaves(self.init(algorithm, x, y, key).state) if saved and NEVER in self._saved else []
        self.exchange.absences = int(absences)
        if self._buffered:
            self._buffered.restore(waiting, wire.named_tuples(type(algorithm)))
        never = [leaf for leaf in first if isinstance(leaf, HeldRows)]

        def held(place: int) -> HeldRows:
            return HeldRows([part(place, m, int(step)) for m, step in enumerate(self._saved)].__getitem__)

        def part(place: int, m: int, step: int) -> HeldPart:
            if step == NEVER:
                return never[place].at(m)
            return HeldPart(Held(self.exchange.slots, m, lambda slot, _: Saved(step, place, slot)))

        places = iter(range(len(saved)))
        state = [held(next(places)) if isinstance(k, PerClient) else v for k, v in zip(kinds, values, strict=True)]
        return jax.tree.unflatten(structure, state)

    @property
    def _simulated(self) -> SimulatedEngine:
        """Simulated clients that give states and messages the same shapes."""
        return SimulatedEngine(self.population, Everyone(), aggregation=self.aggregation)

    def _find_averaged(self, algorithm: Algorithm, x: Array, y: Array, key: Array) -> None:
        if self.aggregation.encodes:
            averaged, self._addressed = self._simulated.encoded(algorithm, x, y, key)
            self._averaged = {name: Shape.of(one) for name, one in averaged.items()}

    def _first_memory(self) -> dict[str, Any]:
        def nothing() -> HeldRows:
            return HeldRows(lambda m: HeldPart(Held(self.exchange.slots, m, lambda slot, _: Store(None, slot))))

        return {**{name: nothing() for name in self._averaged}, **nothing_left(self._addressed)}

    def _clients(self, algorithm: Algorithm, key: Array, memory: dict[str, Any]) -> DeployedClients:
        how = self.participation, algorithm, key, self.aggregation, memory, self._averaged, self.secure, self._own
        return DeployedClients(self.exchange, self.population, *how, self._buffered)


def _means(names: Sequence[str], each: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """The weighted means of what the clients have answered, by name; nothing if all weights are zero."""
    if not weights.sum() > 0:
        return {}
    return dict(zip(names, map(float, weights / weights.sum() @ each), strict=True))
