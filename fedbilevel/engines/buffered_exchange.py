"""Exchanges that go on with the first answers, and what becomes of those that come later."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fedbilevel.aggregations.buffered import Buffered
from fedbilevel.core.problem import Tree
from fedbilevel.engines import wire
from fedbilevel.engines.arrivals import Arrival, ArrivalsFile
from fedbilevel.engines.exchange import Exchange, Transport
from fedbilevel.engines.failure import Failures, Kind
from fedbilevel.engines.held import Wanted
from fedbilevel.engines.messages import Call


@runtime_checkable
class LateTransport(Transport, Protocol):
    """A transport that does not lose the answers of clients it has not waited for."""

    def ask_first(self, call: str, requests: dict[int, bytes], enough: int) -> tuple[dict[int, bytes], Failures]:
        """Like `ask`, until that many clients have answered; the others' answers are under way. Busy clients are not asked."""

    def late(self) -> tuple[dict[int, bytes], Failures]:
        """The replies to earlier requests that have come since, and which of them failed."""

    def wait(self, clients: Iterable[int]) -> None:
        """Wait until these clients have answered earlier requests, or are too late even for that."""

    def saved(self) -> dict[str, Any]:
        """What a checkpoint has to hold; nothing where answers under way are lost with the process."""

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `saved` returned."""


class Patient:
    """A transport that waits for busy clients before it asks them."""

    def __init__(self, transport: LateTransport):
        self._transport = transport

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], Failures]:
        """See `Transport.ask`."""
        self._transport.wait(requests)
        return self._transport.ask(requests)


class Asked(NamedTuple):
    """An exchange that a client has not answered in time."""

    call: str
    function: str
    exchange: int  # its number among those of the function
    around: Tree


class LateAnswer(NamedTuple):
    """An answer to it."""

    client: int
    asked: Asked
    answer: Tree


class BufferedExchange:
    """The server's side: `exchange` checks what comes."""

    def __init__(self, exchange: Exchange, transport: LateTransport, rule: Buffered, record: ArrivalsFile | None):
        self._exchange, self._transport, self._rule, self._record = exchange, transport, rule, record
        self._under_way: dict[int, Asked] = {}  # by client
        self._waiting: list[LateAnswer] = []  # that have come, for the next exchange of their function
        self._exchanges: Counter[str] = Counter()  # by function
        self._last = ("", 0)  # call and attempt

    def ask(
        self, wanted: Wanted, around: Tree, types: Mapping[str, type]
    ) -> tuple[dict[int, Tree], Failures, list[LateAnswer]]:
        """The answers to a call that came in time, why others did not, and late answers to earlier calls of the function."""
        call: Call = next(iter(wanted.values()))[0]
        name, key = call.function, np.asarray(call.key).tobytes().hex()
        self._last = key, self._last[1] + 1 if key == self._last[0] else 0
        before = self._collect(types)
        send = partial(self._transport.ask_first, key, enough=self._rule.first)
        replies, failures = self._exchange.ask(wanted, True, types, send)
        come = [*before, *self._collect(types)]
        late = self._taken(name) if replies else []
        if self._record is not None:
            asked = sorted(m for m in wanted if m in replies or failures[m].sent)
            self._record.add(Arrival(*self._last, name, asked, sorted(replies), come))
        for m, failure in failures.items():
            if failure.kind is Kind.UNDER_WAY and failure.sent:
                self._under_way[m] = Asked(key, name, self._exchanges[name], around)
        self._exchanges[name] += bool(replies)
        return replies, failures, late

    def _taken(self, function: str) -> list[LateAnswer]:
        """The late answers of a function, which wait no longer; in an order that does not depend on when they came."""
        taken = [one for one in self._waiting if one.asked.function == function]
        self._waiting = [one for one in self._waiting if one.asked.function != function]
        return sorted(taken, key=lambda one: (one.asked.exchange, one.client))

    def age(self, late: LateAnswer) -> int:
        """How many exchanges of its function were made since the answer was asked for, when it has just been taken in."""
        return self._exchanges[late.asked.function] - 1 - late.asked.exchange

    def _collect(self, types: Mapping[str, type]) -> list[tuple[int, str]]:
        """Have the answers wait that have come since; returns their clients, and the calls that they answer."""
        replies, failures = self._transport.late()
        come = []
        for m, data in replies.items():
            asked = self._under_way.pop(m, None)
            if asked is None:
                continue
            answer = self._exchange.read(m, Call(asked.function, np.zeros(0), (), None), data, types, failures)
            if m not in failures:
                self._waiting.append(LateAnswer(m, asked, answer))
                come.append((m, asked.call))
        self._exchange.absences += len(failures)
        self._exchange.log({}, failures)
        for m in failures:
            self._under_way.pop(m, None)
        return come

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """During the block, exchanges are repeated whose record stays as it is."""
        record, self._record = self._record, None
        try:
            yield
        finally:
            self._record = record

    def saved(self) -> np.ndarray:
        """What a checkpoint has to hold: answers that wait, and what the transport can save of those under way."""
        if self._record is not None:
            self._record.make_durable()
        transport = self._transport.saved()
        under_way = {str(m): asked for m, asked in self._under_way.items()} if transport else {}
        content = {"waiting": self._waiting, "under_way": under_way, "exchanges": dict(self._exchanges), "transport": transport}
        return np.frombuffer(wire.encode(content), np.uint8)

    def restore(self, saved: np.ndarray, types: Mapping[str, type]) -> None:
        """Continue from what `saved` returned."""
        content = wire.decode(saved.tobytes(), {**types, "Asked": Asked, "LateAnswer": LateAnswer})
        self._waiting, self._exchanges = content["waiting"], Counter(content["exchanges"])
        self._under_way = {int(m): asked for m, asked in content["under_way"].items()}
        if content["transport"]:
            self._transport.restore(content["transport"])
