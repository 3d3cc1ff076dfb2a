"""Requests to clients over a transport, and their checked answers: a bad answer affects only its own client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from fedbilevel.core.aggregation import Aggregation, Mean
from fedbilevel.core.problem import Tree
from fedbilevel.engines import wire
from fedbilevel.engines.call_shapes import CallShapes, check_finite, check_message, check_result
from fedbilevel.engines.failure import Failure, Failures, Kind
from fedbilevel.engines.held import Slots, Wanted
from fedbilevel.engines.messages import Call, Encode, Evaluate, Request
from fedbilevel.errors import InputError, NotFinite, in_words

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """Carries bytes between the server and the clients; the one interface to the software that connects them."""

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], Failures]:
        """Send all clients their requests at the same time; returns the replies, and what went wrong at the others."""


Send = Callable[[dict[int, bytes]], tuple[dict[int, bytes], Failures]]


class Exchange:
    """The clients behind a transport. Where call shapes are given, answers of any other shape are refused."""

    def __init__(
        self,
        transport: Transport,
        clients: int,
        metrics: int,
        call_shapes: CallShapes | None = None,
        aggregation: Aggregation = Mean(),  # noqa: B008 (frozen)
    ):
        self.transport, self.slots = transport, Slots(clients)
        self.absences = 0  # answers missing since the last evaluation
        self._metrics, self._call_shapes, self._aggregation = metrics, call_shapes, aggregation
        self._troubles: Failures = {}

    def ask(
        self, wanted: Wanted, reply: bool, types: Mapping[str, type], send: Send | None = None
    ) -> tuple[dict[int, Tree], Failures]:
        """Have each client compute its expression, and keep the values that the expression holds.

        The requests go out by the transport's `ask` unless `send` is given.
        """
        if not wanted:
            return {}, {}
        requests = {m: wire.encode(Request(e, reply, sorted(self.slots.needed[m]))) for m, (e, _) in wanted.items()}
        answers, failures = (send or self.transport.ask)(requests)
        replies: dict[int, Tree] = {}
        for m, answer in answers.items():
            value = self.read(m, wanted[m][0] if reply else None, answer, types, failures)
            if m in failures:
                continue
            replies[m] = value
            for held in wanted[m][1]:
                held.make = None
        self.log(replies, failures)
        return {m: replies[m] for m in wanted if m in replies}, failures

    def read(self, m: int, expression: Any, answer: bytes, types: Mapping[str, type], failures: Failures) -> Tree:
        """What a client has answered; what is wrong with it goes to `failures`."""
        try:
            value = wire.decode(answer, types)
            if expression is not None:
                self._check(expression, value)
            return value
        except NotFinite as error:
            failures[m] = Failure.of(error)
        except Exception as error:
            failures[m] = Failure(Kind.INVALID, in_words(error))
        return None

    def _check(self, expression: Any, value: Tree) -> None:
        """Raise unless the value can be the result of the expression."""
        if isinstance(expression, Call) and self._call_shapes is not None:
            check_result(self._call_shapes, expression.function, value)
        if isinstance(expression, Encode) and self._call_shapes is not None:
            check_message(self._call_shapes, expression.call.function, value, self._aggregation)
        if isinstance(expression, Evaluate) and np.shape(value) != (self._metrics,):
            raise InputError(f"expected {self._metrics} numbers, got an array of shape {np.shape(value)}: refused")
        check_finite("an answer", value)

    def log(self, replies: Mapping[int, Tree], failures: Failures) -> None:
        """Log once who has fallen silent or is refused, and who is back."""
        for m, failure in failures.items():
            if failure.kind is not Kind.UNDER_WAY and self._troubles.get(m) != failure:
                logger.warning("client %d is left out of this round: %s", m, failure)
                self._troubles[m] = failure
        for m in replies:
            if self._troubles.pop(m, None) is not None:
                logger.warning("client %d takes part again", m)
