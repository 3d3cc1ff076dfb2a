"""Secure sums over an exchange: the server's requests, two for a sum once clients have keys, and a client's answers to them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from fedbilevel.aggregations.secure import TOO_LARGE, HiddenSum
from fedbilevel.core.problem import Tree
from fedbilevel.engines import wire
from fedbilevel.engines.exchange import Exchange
from fedbilevel.engines.failure import Failure, Failures, Kind
from fedbilevel.engines.held import Wanted
from fedbilevel.engines.messages import Advertise, Encode, Evaluate, Masked, ShareKeys, Unmask, in_common
from fedbilevel.errors import InputError, NotFinite

if TYPE_CHECKING:
    from fedbilevel.engines.secure_sum import Advert, Identity, Participant, Prepared, Shares, Signatures

Parsed = TypeVar("Parsed")
Rows = tuple[np.ndarray, np.ndarray]  # clients, and as many bytes for each
UNUSABLE = Failure(Kind.INVALID, "what it sent for a secure sum is not what was asked, or not signed: left out")


class SecureExchange:
    """The server's side: what clients compute reaches it as a sum alone.

    While a sum is made all clients prepare keys for the next one, whose members are not known yet.
    """

    def __init__(self, exchange: Exchange, rule: HiddenSum, signatures: Signatures, clients: int):
        from fedbilevel.engines.secure_sum import Collector

        self._exchange, self._least, self._clients = exchange, rule.at_least, clients
        self._collector = Collector(rule.at_least, signatures)
        self._prepared: Prepared | None = None  # for the next sum

    def total(self, wanted: Wanted, size: int) -> tuple[np.ndarray, list[int], Failures]:
        """The sum of so many whole numbers of each client, whose clients are in it, and why the others are not.

        Raises `RuntimeError` if too few are left, and `NotFinite` if a client's number is too large, which the sum tells.
        """
        from fedbilevel.engines.secure_sum import Prepared

        if len(wanted) < self._least:
            raise RuntimeError(f"a secure sum needs {self._least} clients, and {len(wanted)} take part in it")
        failures = Failures()
        prepared = self._prepared_for(wanted, failures)
        members = sorted(prepared.clients & wanted.keys())
        self._require_enough(members, failures)
        asked = _hash(wanted[members[0]][0])
        requests: Wanted = {m: (Advertise(), []) for m in range(self._clients) if m not in failures}
        for m in members:
            expression, computed = wanted[m]
            requests[m] = Masked(_rows(prepared.sealed_for(m, members)), expression), computed
        replies = self._ask(requests, wanted, failures)
        hidden = _read(replies, members, partial(_hidden, size + 1))
        idle = _read(replies, replies.keys() - set(members), _advert)
        keys = self._collector.usable({m: advert for m, (_, advert) in hidden.items()} | idle)
        the_sum = prepared.sum_of(members, asked)
        masked = {m: numbers for m, (numbers, _) in hidden.items() if m in keys and keys[m].masked == the_sum}
        failures.update({m: UNUSABLE for m in members if m in replies and m not in masked})
        self._require_enough(masked, failures)
        arrived, everyone = sorted(masked), _packed(keys)
        requests = {m: (Unmask(arrived, everyone) if m in masked else ShareKeys(everyone), []) for m in keys}
        replies = self._ask(requests, wanted, failures)
        helped = _read(replies, arrived, _unmasking)
        sealed = {m: texts for m, (_, texts) in helped.items()} | _read(replies, replies.keys() - masked.keys(), _by_client)
        self._prepared = Prepared(keys, sealed)
        unmasking = {m: shares for m, (shares, _) in helped.items()}
        total = self._collector.total(prepared, members, asked, masked, unmasking).view(np.int32)
        if total[-1]:
            raise NotFinite("a client's number is too large for secure sums: raise bound in the aggregation's settings")
        return total[:-1], arrived, failures

    def _prepared_for(self, wanted: Wanted, failures: Failures) -> Prepared:
        """The keys and shares of clients for one sum: those that came with the sum before, if there are no others to be had."""
        from fedbilevel.engines.secure_sum import Prepared

        prepared, self._prepared = self._prepared or Prepared({}, {}), None
        missing = wanted.keys() - prepared.clients
        sent = self._ask({m: (Advertise(), []) for m in wanted if m in missing}, wanted, failures)
        if not sent:
            return prepared
        sent |= self._ask({m: (Advertise(), []) for m in wanted if m not in missing}, wanted, failures)
        keys = self._collector.usable(_read(sent, sent, _advert))
        failures.update({m: UNUSABLE for m in sent.keys() - keys.keys()})
        self._require_enough(keys, failures)
        everyone = _packed(keys)
        shares = self._ask({m: (ShareKeys(everyone), []) for m in keys}, wanted, failures)
        prepared = Prepared(keys, _read(shares, shares, _by_client))
        failures.update({m: UNUSABLE for m in shares.keys() - prepared.clients})
        return prepared

    def _ask(self, requests: Wanted, wanted: Wanted, failures: Failures) -> dict[int, Any]:
        """What clients answer; why others do not matters for those who are wanted."""
        replies, failed = self._exchange.ask(requests, reply=True, types={})
        failures.update({m: failure for m, failure in failed.items() if m in wanted})
        return replies

    def _require_enough(self, clients: Collection[int], failures: Failures) -> None:
        if len(clients) < self._least:
            why = next(iter(failures.values()))
            raise RuntimeError(f"a secure sum needs {self._least} clients, and {len(clients)} answered: {why}")


class SecureClient:
    """A client's side: it in the newest sum and in the one to come. What it computes leaves it masked."""

    def __init__(self, number: int, rule: HiddenSum, identity: Identity):
        self._number, self._least, self._identity = number, rule.at_least, identity
        self._now: Participant | None = None
        self._coming: Participant | None = None

    def answer(self, request: Advertise | ShareKeys | Masked | Unmask, value: Tree = None) -> Tree:
        """The reply to one of the four requests; `value` is what is to be masked."""
        from fedbilevel.engines.secure_sum import Participant

        match request:
            case Advertise():
                self._coming = Participant(self._number, self._least, self._identity)
                return _array(b"".join(self._coming.advertise()))
            case ShareKeys(adverts=adverts) if self._coming is not None:
                return _rows(self._coming.share(_unpacked(adverts)))
            case Masked(shares=shares, expression=expression) if self._coming is not None:
                numbers = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(value)])
                hidden, advert = self._coming.mask(_by_client(shares), _hash(expression), _counted(numbers))
                self._now, self._coming = self._coming, self._coming.following
                return hidden, _array(b"".join(advert))
            case Unmask(arrived=arrived, adverts=adverts) if self._now is not None:
                (seeds, keys), sealed = self._now.unmask(arrived, _unpacked(adverts))
                return [_rows(seeds), _rows(keys), _rows(sealed)]
        raise InputError("this secure sum was not begun here: refused")


def _counted(numbers: np.ndarray) -> np.ndarray:
    """The numbers, then 0; if one is too large, random ones, then 1: the sum tells how many clients have one, and no more."""
    too_large = bool((numbers == TOO_LARGE).any())
    shown = np.frombuffer(os.urandom(4 * numbers.size), np.uint32) if too_large else numbers.view(np.uint32)
    return np.append(shown, np.uint32(too_large))


def _hash(expression: Encode | Evaluate) -> bytes:
    """That of what all clients are asked alike."""
    return hashlib.sha256(wire.encode(in_common(expression))).digest()


def _read(replies: Mapping[int, Any], clients: Iterable[int], parse: Callable[[Any], Parsed]) -> dict[int, Parsed]:
    """What these clients have sent; one that has sent something else has dropped out."""
    found = {}
    for m in clients:
        with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError, KeyError):
            found[m] = parse(replies[m])
    return found


def _hidden(size: int, sent: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, Advert]:
    """A member's masked numbers, and its keys for the next sum."""
    numbers, advert = sent
    if numbers.shape != (size,) or numbers.dtype != np.uint32:
        raise ValueError
    return numbers, _advert(advert)


def _unmasking(sent: list[Rows]) -> tuple[Shares, dict[int, bytes]]:
    """A member's shares, and those for the next sum."""
    from fedbilevel.engines.secure_sum import Shares

    seeds, keys, sealed = map(_by_client, sent)
    return Shares(seeds, keys), sealed


def _advert(sent: np.ndarray) -> Advert:
    from fedbilevel.engines.secure_sum import Advert

    return Advert.read(_bytes(sent))


def _packed(adverts: Mapping[int, Advert]) -> dict[str, np.ndarray]:
    """Everybody's keys, for a message."""
    return {str(m): _array(b"".join(advert)) for m, advert in adverts.items()}


def _unpacked(adverts: Mapping[str, np.ndarray]) -> dict[int, Advert]:
    return {int(m): _advert(sent) for m, sent in adverts.items()}


def _rows(texts: Mapping[int, bytes]) -> Rows:
    """Texts of one length by client, for a message."""
    rows = np.frombuffer(b"".join(texts.values()), np.uint8)
    return np.asarray([*texts], np.int32), rows.reshape(len(texts), rows.size // max(len(texts), 1))


def _by_client(rows: Rows) -> dict[int, bytes]:
    clients, texts = rows
    return {int(m): _bytes(text) for m, text in zip(clients, texts, strict=True)}


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _bytes(array: np.ndarray) -> bytes:
    return np.asarray(array, np.uint8).tobytes()
