"""Secure sums over an exchange: the server's four requests, and a client's answers to them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from fedbilevel.aggregations.secure import TOO_LARGE, SecureSum
from fedbilevel.core.problem import Tree
from fedbilevel.engines import wire
from fedbilevel.engines.exchange import Exchange
from fedbilevel.engines.failure import Failure, Failures, Kind
from fedbilevel.engines.held import Wanted
from fedbilevel.engines.messages import Advertise, Encode, Evaluate, Masked, ShareKeys, Unmask, in_common
from fedbilevel.errors import InputError, NotFinite

if TYPE_CHECKING:
    from fedbilevel.engines.secure_sum import Identity, Participant, Signatures

Parsed = TypeVar("Parsed")
UNUSABLE = Failure(Kind.INVALID, "what it sent for a secure sum is not what was asked, or not signed: left out")


class SecureExchange:
    """The server's side: what clients compute reaches it as a sum alone."""

    def __init__(self, exchange: Exchange, rule: SecureSum, signatures: Signatures):
        self._exchange, self._least, self._signatures, self._sums = exchange, rule.at_least, signatures, 0

    def total(self, wanted: Wanted, size: int) -> tuple[np.ndarray, list[int], Failures]:
        """The sum of so many whole numbers of each client, whose clients are in it, and why the others are not.

        Raises `RuntimeError` if too few are left, and `NotFinite` if a client's number is too large, which the sum tells.
        """
        from fedbilevel.engines.secure_sum import Advert, Collector, Shares

        if len(wanted) < self._least:
            raise RuntimeError(f"a secure sum needs {self._least} clients, and {len(wanted)} take part in it")
        self._sums += 1
        asked_for = _hash(next(iter(wanted.values()))[0])
        server, failures = Collector(self._least, about(self._sums, asked_for), self._signatures), Failures()

        def asked(requests: Wanted) -> dict[int, Any]:
            replies, failed = self._exchange.ask(requests, reply=True, types={})
            failures.update(failed)
            if len(replies) < self._least:
                why = next(iter(failures.values()))
                raise RuntimeError(f"a secure sum needs {self._least} clients, and {len(replies)} answered: {why}")
            return replies

        def usable(sent: Mapping[int, Any], found: Mapping[int, Parsed]) -> Mapping[int, Parsed]:
            failures.update({m: UNUSABLE for m in sent.keys() - found.keys()})
            return found

        adverts = asked({m: (Advertise(self._sums, _array(asked_for)), []) for m in wanted})
        keys = usable(adverts, server.to_share(_read(adverts, lambda sent: Advert(*map(_bytes, sent)))))
        everyone = {str(m): tuple(map(_array, advert)) for m, advert in keys.items()}
        shares = asked({m: (ShareKeys(self._sums, everyone), []) for m in keys})
        handed = usable(shares, server.to_mask(_read(shares, _by_client)))
        to_mask: Wanted = {}
        for m, texts in handed.items():
            expression, computed = wanted[m]
            to_mask[m] = Masked(self._sums, {str(u): _array(text) for u, text in texts.items()}, expression), computed
        hidden = asked(to_mask)
        masked = usable(hidden, _read(hidden, partial(_whole_numbers, size + 1)))
        arrived = sorted(masked)
        unmasking = asked({m: (Unmask(self._sums, arrived), []) for m in arrived})
        helped = _read(unmasking, lambda sent: Shares(*map(_by_client, sent)))
        total = server.total(masked, helped).view(np.int32)
        if total[-1]:
            raise NotFinite("a client's number is too large for secure sums: raise bound in the aggregation's settings")
        return total[:-1], arrived, failures


class SecureClient:
    """A client's side: the state of the newest sum, whose numbers leave it masked."""

    def __init__(self, number: int, rule: SecureSum, identity: Identity):
        self._number, self._least, self._identity = number, rule.at_least, identity
        self._sum, self._asked_for = 0, b""
        self._participant: Participant | None = None

    def answer(self, request: Advertise | ShareKeys | Masked | Unmask, value: Tree = None) -> Tree:
        """The reply to one of the four requests; `value` is what is to be masked."""
        from fedbilevel.engines.secure_sum import Advert, Participant

        match request:
            case Advertise(number=number, asked=asked):
                if number <= self._sum:
                    raise InputError("a secure sum was begun before: refused")
                self._sum, self._asked_for = number, _bytes(asked)
                self._participant = Participant(self._number, self._least, about(number, self._asked_for), self._identity)
                return tuple(map(_array, self._participant.advertise()))
        if self._participant is None or request.number != self._sum:
            raise InputError("this secure sum was not begun here: refused")
        match request:
            case ShareKeys(adverts=adverts):
                keys = {int(m): Advert(*map(_bytes, advert)) for m, advert in adverts.items()}
                return {str(v): _array(text) for v, text in self._participant.share(keys).items()}
            case Masked(shares=shares):
                numbers = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(value)])
                return self._participant.mask(_by_client(shares), _counted(numbers))
            case Unmask(arrived=arrived):
                return [{str(v): _array(s) for v, s in kind.items()} for kind in self._participant.unmask(arrived)]

    def require_signed(self, expression: Encode | Evaluate) -> None:
        """Raise `InputError` unless the sum is for this, by the hash that all its clients have signed with their keys."""
        if _hash(expression) != self._asked_for:
            raise InputError("a secure sum asks for something else than its clients have signed: refused")


def _counted(numbers: np.ndarray) -> np.ndarray:
    """The numbers, then 0; if one is too large, random ones, then 1: the sum tells how many clients have one, and no more."""
    too_large = bool((numbers == TOO_LARGE).any())
    shown = np.frombuffer(os.urandom(4 * numbers.size), np.uint32) if too_large else numbers.view(np.uint32)
    return np.append(shown, np.uint32(too_large))


def about(number: int, asked_for: bytes) -> bytes:
    """What the keys of a sum are for."""
    return f"sum {number} of {asked_for.hex()}".encode()


def _hash(expression: Encode | Evaluate) -> bytes:
    """That of what all clients are asked alike."""
    return hashlib.sha256(wire.encode(in_common(expression))).digest()


def _read(replies: Mapping[int, Any], parse: Callable[[Any], Parsed]) -> dict[int, Parsed]:
    """What clients have sent; one that has sent something else has dropped out."""
    found = {}
    for m, sent in replies.items():
        with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError):
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
