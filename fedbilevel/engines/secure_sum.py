"""Sums that the server learns without any of their terms, in two exchanges.

K. Bonawitz, V. Ivanov, B. Kreuter, A. Marcedone, H. B. McMahan, S. Patel, D. Ramage, A. Segal and K. Seth, Practical Secure
Aggregation for Privacy-Preserving Machine Learning, CCS 2017, Figure 4, with the authenticated keys of its active variant.
Every sum has fresh keys. For it client u sends

    keys     two X25519 keys, c_u and s_u, and a hash of a random seed b_u, signed
    shares   Shamir shares, t of n, of the secret behind s_u and of b_u: for each v whose keys are in K, encrypted for v alone
    mask     y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) - Σ_{v<u} PRG(s_uv)  mod 2³²,   s_uv agreed between s_u and s_v for A,
             over the members v of the sum, all of whom have shared
    unmask   for each member v whose y_v arrived its share of b_v, and for each other member its share of s_v

K is the set of all clients' keys; A is the sum: the hash of K, of its members, and of what they are asked. The masks s_uv
cancel in Σ y_u; the server removes PRG(b_u), and the half pairs of the members that dropped out.

The keys for the next sum come with y_u, and the shares for the next sum with those that unmask this one. Only the first sum
takes four exchanges, and one for which a client is back that has no keys. Clients that are no members of a sum prepare keys
alongside, so that any of them can be in the next. Such keys are made before anybody knows what they are for, so a client
signs A later, with y_u: together with its next keys, in one signature. That gives away nothing:

- Who reads shares, agrees on K. They are encrypted with a key agreed between c_u and c_v for K, and a client shares once. As
  a member has read the shares of all others, each of them was there after this client had made its keys, and has the same K.
  The server cannot replay keys of an earlier sum, whose s_v it may know: with the old c_v only v could encrypt, and will not.
- Who masks, agrees on A. Between clients that are asked for different things, or with other members or keys, masks do not
  cancel: s_uv is derived for A. And a client hands out shares only if all whose y_v arrived have signed the A that it signed.
- A client hands out one kind of share for each v, once: a y_v that arrives after its masks were recovered stays hidden by b_v.
- Keys mask one y: they are used up by the first attempt, and are in memory alone, so that a restart begins with others.
- A client takes part in no stage with fewer than t clients, and believes no key without a valid signature.

PRG is ChaCha20; s_uv is HKDF-SHA256 of the agreed secret; shares are encrypted with ChaCha20-Poly1305.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, Protocol, Self

import numpy as np

from fedbilevel.errors import InputError

try:
    from Crypto.Protocol.SecretSharing import Shamir
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise InputError("secure sums need further packages: pip install 'fedbilevel[secure]'") from None

HASH = 32  # bytes of a hash, and of a key
SECRET = 16  # bytes of what is shared, and of a share: what keys and masks are derived from
NONCE = bytes(12)  # every key encrypts one message
OWN = b"own mask"  # the purpose of b_u
NO_SUM = bytes(HASH)  # in place of the hash of a sum
MOST_GROUPS = 100  # of helpers whose shares are tried for a secret
BLOCK = 1 << 14  # numbers of a stream that are made at once, so that they stay in the processor's cache
ZEROS = bytes(4 * BLOCK)


class Advert(NamedTuple):
    """A client's public keys for a sum to come, and the sum for which it has sent masked values together with them."""

    cipher_key: bytes
    mask_key: bytes
    seed_hash: bytes  # by which the server knows that a recovered seed is right
    masked: bytes  # the hash of that sum, or `NO_SUM`
    signature: bytes = b""

    @classmethod
    def read(cls, data: bytes) -> Self:
        """The one in these bytes, which may be of any length."""
        cipher_key, mask_key, seed_hash, masked = (data[k * HASH : (k + 1) * HASH] for k in range(4))
        return cls(cipher_key, mask_key, seed_hash, masked, data[4 * HASH :])

    def to_sign(self, client: int) -> bytes:
        """What that client signs: all lengths are fixed."""
        return b"fedbilevel keys of a secure sum" + client.to_bytes(8, "big") + b"".join(self[:4])


class Shares(NamedTuple):
    """What a client hands out to unmask a sum: by client, its share of a seed or of a key."""

    seeds: dict[int, bytes]  # of those whose values are in the sum
    keys: dict[int, bytes]  # of those who dropped out before


class Signatures(Protocol):
    """How the clients' signatures are known."""

    def verify(self, client: int, message: bytes, signature: bytes) -> None:
        """Raise `InputError` unless that client signed the message."""


class Identity(Signatures, Protocol):
    """How a client signs, and how it knows others' signatures."""

    def sign(self, message: bytes) -> bytes:
        """This client's signature."""


class Participant:
    """A client in one sum; its methods are what it sends for it, in that order, each once."""

    def __init__(self, number: int, least: int, identity: Identity):
        if least < 2:
            raise InputError(f"a secure sum over fewer than 2 clients hides nothing: at_least is {least}")
        self._number, self._least, self._identity = number, least, identity
        self._mask_secret, self._seed = os.urandom(SECRET), os.urandom(SECRET)
        self._cipher, self._mask, self._stage = X25519PrivateKey.generate(), _mask_key(self._mask_secret), 0
        self._adverts: Mapping[int, Advert] = {}
        self._keys, self._sum = b"", b""
        self._secrets: dict[int, bytes] = {}  # agreed with each other client
        self._shared: dict[int, bytes] = {}  # by member, its shares for this one: of its key, then of its seed
        self._following: Participant | None = None

    @property
    def following(self) -> Participant:
        """This client in the sum after this one, whose keys went out with the masked values."""
        if self._following is None:
            raise InputError("the exchanges of a secure sum are out of order, or one is repeated: refused")
        return self._following

    def advertise(self, masked: bytes = NO_SUM) -> Advert:
        """This client's keys, and the sum for which it sends masked values with them."""
        self._enter(1)
        keys = self._cipher.public_key().public_bytes_raw(), self._mask.public_key().public_bytes_raw()
        advert = Advert(*keys, hashlib.sha256(self._seed).digest(), masked)
        return advert._replace(signature=self._identity.sign(advert.to_sign(self._number)))

    def share(self, adverts: Mapping[int, Advert]) -> dict[int, bytes]:
        """For every other client whose keys are given the shares that only it can read."""
        self._enter(2)
        self._require_enough(adverts)
        keys = [key for advert in adverts.values() for key in advert[:2]]
        if self._number not in adverts or len(set(keys)) < len(keys):
            raise InputError("the keys for a secure sum lack this client's own or hold one twice: refused")
        for client, advert in adverts.items():
            self._identity.verify(client, advert.to_sign(client), advert.signature)
        if adverts[self._number].mask_key != self._mask.public_key().public_bytes_raw():
            raise InputError("the keys for a secure sum hold a false one in this client's name: refused")
        self._adverts, self._keys, members = dict(adverts), hash_of_keys(adverts), sorted(adverts)
        pieces = (Shamir.split(self._least, len(members), secret) for secret in (self._mask_secret, self._seed))
        mine = {v: key + seed for v, (_, key), (_, seed) in zip(members, *pieces, strict=True)}
        self._shared[self._number] = mine.pop(self._number)
        for v in mine:
            self._secrets[v] = self._cipher.exchange(X25519PublicKey.from_public_bytes(adverts[v].cipher_key))
        return {v: self._sealing(self._number, v).encrypt(NONCE, text, None) for v, text in mine.items()}

    def mask(self, shares: Mapping[int, bytes], asked: bytes, values: np.ndarray) -> tuple[np.ndarray, Advert]:
        """The values, whole numbers modulo 2³², hidden, and the keys for the next sum.

        `shares` are those that the other members have sent to this client; `asked` says what all of them are asked.
        """
        self._enter(3)
        self._require_enough({self._number, *shares})
        if not shares.keys() <= self._secrets.keys():
            raise InputError("shares for a secure sum come from a client that has no keys in it: refused")
        for v, text in shares.items():
            try:
                self._shared[v] = self._sealing(v, self._number).decrypt(NONCE, text, None)
            except InvalidTag:
                raise InputError(f"the shares that client {v} sent for a secure sum were changed on the way: refused") from None
        self._sum = hash_of_sum(self._keys, self._shared, asked)
        hidden = values.astype(np.uint32)
        _add_stream(hidden, self._seed, OWN, 1)
        for v in shares:
            _add_pair(hidden, self._mask, self._number, v, self._adverts[v].mask_key, self._sum)
        self._following = Participant(self._number, self._least, self._identity)
        return hidden, self._following.advertise(self._sum)

    def unmask(self, arrived: Collection[int], adverts: Mapping[int, Advert]) -> tuple[Shares, dict[int, bytes]]:
        """This client's shares, and its own for the next sum, for each other client whose keys are given.

        The former are of the seeds of those whose values arrived, and of the keys of the other members.
        """
        self._enter(4)
        there = set(arrived)
        self._require_enough(there)
        if not there <= self._shared.keys() or self._number not in there:
            raise InputError("a secure sum is to be unmasked for clients that are not in it: refused")
        sealed = self.following.share(adverts)  # which believes signatures alone
        for v in there:
            if v not in adverts or adverts[v].masked != self._sum:
                raise InputError(f"client {v} has not signed that it is in the same secure sum as this one: refused")
        seeds = {v: text[SECRET:] for v, text in self._shared.items() if v in there}
        return Shares(seeds, {v: text[:SECRET] for v, text in self._shared.items() if v not in there}), sealed

    def _enter(self, stage: int) -> None:
        if stage != self._stage + 1:
            raise InputError("the exchanges of a secure sum are out of order, or one is repeated: refused")
        self._stage = stage

    def _require_enough(self, clients: Collection[int]) -> None:
        if len(clients) < self._least:
            raise InputError(f"a secure sum over {len(clients)} clients, but this one insists on {self._least}: refused")

    def _sealing(self, sender: int, receiver: int) -> ChaCha20Poly1305:
        """What encrypts shares: each direction has a key of its own."""
        secret = self._secrets[receiver if sender == self._number else sender]
        return ChaCha20Poly1305(_derived(secret, self._keys + f" shares {sender} to {receiver}".encode()))


class Prepared:
    """What the server has of clients that can be in a sum: all keys, and the shares of those who sent some to all others."""

    def __init__(self, adverts: Mapping[int, Advert], shares: Mapping[int, Mapping[int, bytes]]):
        self.adverts = dict(adverts)
        self._sealed = {u: dict(sent) for u, sent in shares.items() if sent.keys() == adverts.keys() - {u}}

    @property
    def clients(self) -> set[int]:
        """Those who shared."""
        return set(self._sealed)

    def sealed_for(self, v: int, members: Collection[int]) -> dict[int, bytes]:
        """The shares that the other members have sent to one."""
        return {u: self._sealed[u][v] for u in members if u != v}

    def sum_of(self, members: Collection[int], asked: bytes) -> bytes:
        """The hash of a sum over these members."""
        return hash_of_sum(hash_of_keys(self.adverts), members, asked)


class Collector:
    """The server: it forwards keys and shares, and unmasks the sum of what has arrived.

    It leaves out clients whose keys would have all others refuse the sum, and does without shares that are false.
    """

    def __init__(self, least: int, signatures: Signatures):
        self._least, self._signatures, self._trying = least, signatures, X25519PrivateKey.generate()

    def usable(self, adverts: Mapping[int, Advert]) -> dict[int, Advert]:
        """The keys that the others can use."""
        usable = {m: advert for m, advert in adverts.items() if self._is_usable(m, advert)}
        uses = Counter(key for advert in usable.values() for key in advert[:2])
        return {m: advert for m, advert in usable.items() if all(uses[key] == 1 for key in advert[:2])}

    def total(
        self,
        prepared: Prepared,
        members: Collection[int],
        asked: bytes,
        masked: Mapping[int, np.ndarray],
        unmasking: Mapping[int, Shares],
    ) -> np.ndarray:
        """Σ x_u over those whose masked values arrived, modulo 2³²; `RuntimeError` if too few helped to unmask it."""
        adverts, the_sum = prepared.adverts, prepared.sum_of(members, asked)
        wanted = masked.keys(), set(members) - masked.keys()
        helping = sorted(m for m, given in unmasking.items() if all(map(_are_shares_of, given, wanted)))
        if len(helping) < self._least:
            raise RuntimeError(f"{len(helping)} clients helped to unmask a secure sum, and {self._least} must")
        groups = list(itertools.islice(_groups(helping, self._least), MOST_GROUPS))
        place = {client: k + 1 for k, client in enumerate(sorted(adverts))}

        def recovered(what: str, piece: Callable[[int], bytes], is_right: Callable[[bytes], bool]) -> bytes:
            for k, group in enumerate(groups):
                secret = Shamir.combine([(place[helper], piece(helper)) for helper in group])
                if is_right(secret):
                    groups.insert(0, groups.pop(k))  # the next secret is tried with these helpers first
                    return secret
            raise RuntimeError(f"the shares of client {what}: the secure sum cannot be unmasked")

        total = np.zeros(next(iter(masked.values())).size, np.uint32)
        for u, values in masked.items():
            shown = adverts[u].seed_hash
            seed = recovered(
                f"{u}'s seed do not make its seed",
                lambda helper: unmasking[helper].seeds[u],
                lambda secret: hashlib.sha256(secret).digest() == shown,
            )
            total += values
            _add_stream(total, seed, OWN, -1)
        for v in wanted[1]:
            shown = adverts[v].mask_key
            secret = recovered(
                f"{v}'s key do not make its key",
                lambda helper: unmasking[helper].keys[v],
                lambda secret: _mask_key(secret).public_key().public_bytes_raw() == shown,
            )
            key = _mask_key(secret)
            for u in masked:
                _add_pair(total, key, v, u, adverts[u].mask_key, the_sum)
        return total

    def _is_usable(self, client: int, advert: Advert) -> bool:
        """Whether the client signed its keys, and a secret can be agreed with them."""
        if any(len(part) != HASH for part in advert[:4]):
            return False
        try:
            self._signatures.verify(client, advert.to_sign(client), advert.signature)
            for key in advert[:2]:
                self._trying.exchange(X25519PublicKey.from_public_bytes(key))
        except (InputError, ValueError):
            return False
        return True


def hash_of_keys(adverts: Mapping[int, Advert]) -> bytes:
    """K: who has which keys."""
    return hashlib.sha256(b"".join(adverts[m].to_sign(m) for m in sorted(adverts))).digest()


def hash_of_sum(keys: bytes, members: Collection[int], asked: bytes) -> bytes:
    """A: a sum over some of those who have the keys K, for what `asked` is the hash of."""
    return hashlib.sha256(b"".join([keys, asked, *(m.to_bytes(8, "big") for m in sorted(members))])).digest()


def _are_shares_of(shares: Mapping[int, bytes], clients: Collection[int]) -> bool:
    return shares.keys() == set(clients) and all(len(share) == SECRET for share in shares.values())


def _groups(helping: list[int], least: int) -> Iterator[tuple[int, ...]]:
    """Groups of so many helpers: first neighbours in a ring, which soon leave out any one, and then all groups."""
    for k in range(len(helping)):
        yield tuple((helping[k:] + helping[:k])[:least])
    yield from itertools.combinations(helping, least)


def _mask_key(secret: bytes) -> X25519PrivateKey:
    """s_u, whose private key follows from what is shared of it."""
    return X25519PrivateKey.from_private_bytes(_derived(secret, b"mask key"))


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), HASH, None, purpose).derive(secret)


def _add_stream(to: np.ndarray, secret: bytes, purpose: bytes, sign: int) -> None:
    """Add or subtract numbers that look random to whoever does not have the secret, which is used once for a purpose."""
    key = _derived(secret, purpose)
    stream, block = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor(), np.empty(BLOCK, "<u4")
    for k in range(0, to.size, BLOCK):
        part = to[k : k + BLOCK]
        made = block[: part.size]
        stream.update_into(ZEROS[: made.nbytes], made.data.cast("B"))
        (np.add if sign > 0 else np.subtract)(part, made, out=part)


def _add_pair(to: np.ndarray, own: X25519PrivateKey, u: int, v: int, others: bytes, the_sum: bytes) -> None:
    """Add what u adds for its pair with v, which is minus what v adds."""
    secret = own.exchange(X25519PublicKey.from_public_bytes(others))
    _add_stream(to, secret, the_sum + f" mask {min(u, v)} {max(u, v)}".encode(), 1 if u < v else -1)
