"""Secure sums over an exchange: the server's four requests, and a client's answers to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from fedbilevel.aggregations.secure import TOO_LARGE, SecureSum
from fedbilevel.core.problem import Tree
from fedbilevel.engines.exchange import Exchange
from fedbilevel.engines.failure import Failures, Kind
from fedbilevel.engines.held import Wanted
from fedbilevel.engines.messages import Advertise, Masked, ShareKeys, Unmask
from fedbilevel.errors import InputError, NotFinite

if TYPE_CHECKING:
    from fedbilevel.engines.secure_sum import Identity, Participant

Parsed = TypeVar("Parsed")


class SecureExchange:
    """The server's side: what clients compute reaches it as a sum alone."""

    def __init__(self, exchange: Exchange, rule: SecureSum):
        self._exchange, self._least, self._sums = exchange, rule.at_least, 0

    def total(self, wanted: Wanted, size: int) -> tuple[np.ndarray, list[int], Failures]:
        """The sum of so many whole numbers of each client, whose clients are in it, and why the others are not.

        Raises `RuntimeError` if too few are left, and `NotFinite` if a client's numbers are too large.
        """
        from fedbilevel.engines.secure_sum import Advert, Collector, Shares

        self._sums += 1
        server, failures = Collector(self._least, about(self._sums)), Failures()

        def asked(requests: Wanted) -> dict[int, Any]:
            replies, failed = self._exchange.ask(requests, reply=True, types={})
            failures.update(failed)
            for failure in failed.values():
                if failure.kind is Kind.NOT_FINITE:
                    raise NotFinite(str(failure))
            if len(replies) < self._least:
                why = next(iter(failures.values()), "fewer were asked")
                raise RuntimeError(f"a secure sum needs {self._least} clients, and {len(replies)} answered: {why}")
            return replies

        adverts = asked({m: (Advertise(self._sums), []) for m in wanted})
        keys = server.to_share(_read(adverts, lambda sent: Advert(*map(_bytes, sent))))
        everyone = {str(m): tuple(map(_array, advert)) for m, advert in keys.items()}
        shares = asked({m: (ShareKeys(self._sums, everyone), []) for m in keys})
        handed = server.to_mask(_read(shares, _by_client))
        to_mask: Wanted = {}
        for m, texts in handed.items():
            expression, computed = wanted[m]
            to_mask[m] = Masked(self._sums, {str(u): _array(text) for u, text in texts.items()}, expression), computed
        masked = _read(asked(to_mask), partial(_whole_numbers, size))
        arrived = sorted(masked)
        unmasking = asked({m: (Unmask(self._sums, arrived), []) for m in arrived})
        helped = _read(unmasking, lambda sent: Shares(*map(_by_client, sent)))
        return server.total(masked, helped).view(np.int32), arrived, failures


class SecureClient:
    """A client's side: the state of the newest sum, whose numbers leave it masked."""

    def __init__(self, number: int, rule: SecureSum, identity: Identity):
        self._number, self._least, self._identity = number, rule.at_least, identity
        self._sum = 0
        self._participant: Participant | None = None

    def answer(self, request: Advertise | ShareKeys | Masked | Unmask, value: Tree = None) -> Tree:
        """The reply to one of the four requests; `value` is what is to be masked."""
        from fedbilevel.engines.secure_sum import Advert, Participant

        match request:
            case Advertise(number=number):
                if number <= self._sum:
                    raise InputError("a secure sum was begun before: refused")
                self._sum = number
                self._participant = Participant(self._number, self._least, about(number), self._identity)
                return tuple(map(_array, self._participant.advertise()))
        if self._participant is None or request.number != self._sum:
            raise InputError("this secure sum was not begun here: refused")
        match request:
            case ShareKeys(adverts=adverts):
                keys = {int(m): Advert(*map(_bytes, advert)) for m, advert in adverts.items()}
                return {str(v): _array(text) for v, text in self._participant.share(keys).items()}
            case Masked(shares=shares):
                numbers = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(value)])
                if (numbers == TOO_LARGE).any():
                    raise NotFinite("a number is too large for secure sums: raise bound in the aggregation's settings")
                return self._participant.mask(_by_client(shares), numbers.view(np.uint32))
            case Unmask(arrived=arrived):
                return [{str(v): _array(s) for v, s in kind.items()} for kind in self._participant.unmask(arrived)]


def about(number: int) -> bytes:
    """What the keys of a sum are for."""
    return f"sum {number}".encode()


def _read(replies: Mapping[int, Any], parse: Callable[[Any], Parsed]) -> dict[int, Parsed]:
    """What clients have sent; one that has sent something else has dropped out."""
    found = {}
    for m, sent in replies.items():
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            found[m] = parse(sent)
    return found


def _by_client(sent: Mapping[str, np.ndarray]) -> dict[int, bytes]:
    return {int(client): _bytes(text) for client, text in sent.items()}


def _whole_numbers(size: int, sent: np.ndarray) -> np.ndarray:
    if sent.shape != (size,) or sent.dtype != np.uint32:
        raise ValueError
    return sent


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _bytes(array: np.ndarray) -> bytes:
    return np.asarray(array, np.uint8).tobytes()
