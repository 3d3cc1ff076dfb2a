"""Secure sums over an exchange: the server's requests, two for a sum once clients have keys, and a client's answers to them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from fedbilevel.aggregations.secure import TOO_LARGE, HiddenSum
from fedbilevel.core.problem import Tree
from fedbilevel.engines import wire
from fedbilevel.engines.exchange import Exchange
from fedbilevel.engines.failure import Failure, Failures, Kind
from fedbilevel.engines.held import Wanted
from fedbilevel.engines.messages import Advertise, Encode, Evaluate, Masked, ShareKeys, Unmask, in_common, is_held
from fedbilevel.errors import InputError, NotFinite

if TYPE_CHECKING:
    from fedbilevel.engines.secure_sum import Advert, Identity, Participant, Prepared, Shares, Signatures

Parsed = TypeVar("Parsed")
Rows = tuple[np.ndarray, np.ndarray]  # clients, and as many bytes for each
UNUSABLE = Failure(Kind.INVALID, "what it sent for a secure sum is not what was asked, or not signed: left out")
NOT_IN_IT = Failure(Kind.LATE, "it was not in this sum the first time, which is made over the same clients again", sent=False)


class Opened(NamedTuple):
    """A sum: over which clients it is, and, once it is known, what it is and why other clients are not in it."""

    members: list[int]
    total: np.ndarray | None = None
    failures: Failures = {}  # noqa: RUF012 (never modified)


class OpenedSums(Protocol):
    """Storage in which the sums that a run's server has opened outlive its process.

    A step that is repeated from a checkpoint has them from here: asked again of other clients, a sum would differ from the
    first by single answers.
    """

    def found(self, question: bytes) -> Opened | None:
        """What there is for a question."""

    def add(self, question: bytes, opened: Opened, lasts: bool) -> None:
        """Store a sum before this returns: until the checkpoint after the next one, or for good."""

    def checkpoint(self) -> None:
        """Forget what was stored before the last call: the checkpoint that was then to be written is there."""


class AnsweredSums(Protocol):
    """Storage in which the questions that a client has answered in sums outlive its process, and over whom these sums were."""

    def require(self, question: bytes, members: Collection[int]) -> None:
        """Raise `InputError` if the client has answered the question in a sum over others than these."""

    def add(self, question: bytes, members: Collection[int]) -> None:
        """Store that it answers the question in a sum over these before this returns; `InputError` as above."""


class SecureExchange:
    """The server's side: what clients compute reaches it as a sum alone.

    While a sum is made all clients prepare keys for the next one, whose members are not known yet. Where opened sums are
    stored, no question is asked again that has been answered, and one that may have been is asked of the same clients.
    """

    def __init__(
        self, exchange: Exchange, rule: HiddenSum, signatures: Signatures, clients: int, opened: OpenedSums | None = None
    ):
        from fedbilevel.engines.secure_sum import Collector

        self._exchange, self._least, self._clients, self._opened = exchange, rule.at_least, clients, opened
        self._begins = False
        self._collector = Collector(rule.at_least, signatures)
        self._prepared: Prepared | None = None  # for the next sum

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """During the block, sums are of the run's beginning, where clients may begin at any time: so what is opened lasts."""
        self._begins = True
        try:
            yield
        finally:
            self._begins = False

    def total(self, wanted: Wanted, size: int, step: int = 0) -> tuple[np.ndarray, list[int], Failures]:
        """The sum of so many whole numbers of each client, whose clients are in it, and why the others are not.

        Raises `RuntimeError` if too few are left, and `NotFinite` if a client's number is too large, which the sum tells. The
        step is that of metrics: values that clients keep change from one to the next, and nothing in the question says so.
        """
        if len(wanted) < self._least:
            raise RuntimeError(f"a secure sum needs {self._least} clients, and {len(wanted)} take part in it")
        expression, _ = next(iter(wanted.values()))
        measured = isinstance(expression, Evaluate)
        of_kept = measured and any(map(is_held, expression))
        question = _hash(expression) + (step.to_bytes(8, "big") if of_kept else b"")
        lasts = self._begins or (measured and not of_kept)
        begun = self._opened.found(question) if self._opened else None
        if begun is None or begun.total is None:
            begun = self.make(wanted, size, begun, lambda opened: self._store(question, opened, lasts))
            self._store(question, begun, lasts)
        else:
            again = {m: wanted[m] for m in begun.members if wanted[m][1]}
            self._exchange.ask(again, reply=False, types={})  # for what they keep
        assert begun.total is not None
        if begun.total[-1]:
            raise NotFinite("a client's number is too large for secure sums: raise bound in the aggregation's settings")
        return begun.total[:-1], begun.members, Failures(begun.failures)

    def _store(self, question: bytes, opened: Opened, lasts: bool) -> None:
        if self._opened is not None:
            self._opened.add(question, opened, lasts)

    def make(self, wanted: Wanted, size: int, begun: Opened | None, store: Callable[[Opened], None]) -> Opened:
        """A sum over those who are there, or over those with whom it was begun; `store` is shown them before it is opened."""
        from fedbilevel.engines.secure_sum import Prepared

        failures = Failures()
        prepared = self._prepared_for(wanted, failures)
        there = prepared.clients & wanted.keys()
        again = begun is not None and there.issuperset(begun.members)
        members = begun.members if begun is not None and again else sorted(there)
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
        if begun is not None and len(masked) < self._least:  # those who have answered before refuse to be in it with others
            raise _incomplete(begun.members, masked, failures)
        self._require_enough(masked, failures)
        arrived, everyone = sorted(masked), _packed(keys)
        if again and arrived != members:
            raise _incomplete(members, arrived, failures)
        store(Opened(arrived))
        requests = {m: (Unmask(arrived, everyone) if m in masked else ShareKeys(everyone), []) for m in keys}
        replies = self._ask(requests, wanted, failures)
        helped = _read(replies, arrived, _unmasking)
        sealed = {m: texts for m, (_, texts) in helped.items()} | _read(replies, replies.keys() - masked.keys(), _by_client)
        self._prepared = Prepared(keys, sealed)
        unmasking = {m: shares for m, (shares, _) in helped.items()}
        total = self._collector.total(prepared, members, asked, masked, unmasking).view(np.int32)
        return Opened(arrived, total, failures | {m: NOT_IN_IT for m in there.difference(members)})

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

    def __init__(self, number: int, rule: HiddenSum, identity: Identity, answered: AnsweredSums | None = None):
        self._number, self._least, self._identity, self._answered = number, rule.at_least, identity, answered
        self._question = b""  # of the newest sum
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
                question = _question(expression, numbers)
                if self._answered is not None:
                    self._answered.require(question, {self._number, *_by_client(shares)})
                hidden, advert = self._coming.mask(_by_client(shares), _hash(expression), _counted(numbers))
                self._now, self._coming, self._question = self._coming, self._coming.following, question
                return hidden, _array(b"".join(advert))
            case Unmask(arrived=arrived, adverts=adverts) if self._now is not None:
                (seeds, keys), sealed = self._now.unmask(arrived, _unpacked(adverts))
                if self._answered is not None:
                    self._answered.add(self._question, arrived)
                return [_rows(seeds), _rows(keys), _rows(sealed)]
        raise InputError("this secure sum was not begun here: refused")


def _incomplete(members: Collection[int], there: Collection[int], failures: Failures) -> RuntimeError:
    """The error that a sum cannot be made again over the same clients."""
    m = min(set(members) - set(there), key=lambda m: failures[m].kind is Kind.REFUSED)
    return RuntimeError(
        "the run was stopped while a secure sum was opened, which must not be opened again over other clients, and "
        f"client {m} is missing: {failures[m]}. Bring it back and resume the run, or start another"
    )


def _counted(numbers: np.ndarray) -> np.ndarray:
    """The numbers, then 0; if one is too large, random ones, then 1: the sum tells how many clients have one, and no more."""
    too_large = bool((numbers == TOO_LARGE).any())
    shown = np.frombuffer(os.urandom(4 * numbers.size), np.uint32) if too_large else numbers.view(np.uint32)
    return np.append(shown, np.uint32(too_large))


def _hash(expression: Encode | Evaluate) -> bytes:
    """That of what all clients are asked alike."""
    return hashlib.sha256(wire.encode(in_common(expression))).digest()


def _question(expression: Encode | Evaluate, numbers: np.ndarray) -> bytes:
    """What a client's answer follows from: not from the point that it is near, which the server may subtract as it likes.

    Metrics have no key that is another whenever they are of other values that are kept here: then they have other numbers.
    """
    if isinstance(expression, Encode):
        return _hash(expression._replace(around=[], key=np.zeros(2, np.uint32)))
    return hashlib.sha256(_hash(expression) + numbers.tobytes()).digest()


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
