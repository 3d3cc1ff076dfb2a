"""Sums that the server learns without any of their terms.

K. Bonawitz, V. Ivanov, B. Kreuter, A. Marcedone, H. B. McMahan, S. Patel, D. Ramage, A. Segal and K. Seth, Practical Secure
Aggregation for Privacy-Preserving Machine Learning, CCS 2017, Figure 4, with the authenticated keys of its active variant.
Client u of a sum over n clients with threshold t sends, in four exchanges, each with those who are still there:

    advertise   two fresh X25519 keys, c_u and s_u, and a hash of b_u below, signed together with the number of the sum
    share       Shamir shares, t of n, of s_u's private key and of a random seed b_u: for each v, encrypted for v alone
    mask        y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) - Σ_{v<u} PRG(s_uv)  mod 2³²,   s_uv agreed between s_u and s_v,
                over all v who shared
    unmask      for each v whose y_v arrived its share of b_v, and for each who dropped out before its share of s_v

The masks s_uv cancel in Σ y_u; the server removes PRG(b_u), and the half pairs of those who dropped out. A client hands out
one kind of share for each v, once: so a y_v that arrives after its masks were recovered stays hidden by b_v. It takes part
in no stage with fewer than t clients, and believes no key without a valid signature.

PRG is ChaCha20; s_uv is HKDF-SHA256 of the agreed secret; shares are encrypted with ChaCha20-Poly1305.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

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

HALF = 16  # bytes of a secret that Shamir's scheme shares at once
SHARE = 2 * HALF  # bytes of a share of a 32-byte secret
NONCE = bytes(12)  # every key encrypts one message
MOST_GROUPS = 100  # of helpers whose shares are tried for a secret


class Advert(NamedTuple):
    """A client's public keys for one sum."""

    cipher_key: bytes
    mask_key: bytes
    seed_hash: bytes  # by which the server knows that a recovered seed is right
    signature: bytes


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
    """A client in one sum; its methods are the four exchanges, in that order, each once."""

    def __init__(self, number: int, least: int, about: bytes, identity: Identity, random: Callable[[int], bytes] = os.urandom):
        if least < 2:
            raise InputError(f"a secure sum over fewer than 2 clients hides nothing: at_least is {least}")
        self._number, self._least, self._about, self._identity = number, least, about, identity
        self._cipher, self._mask = (X25519PrivateKey.from_private_bytes(random(32)) for _ in range(2))
        self._seed, self._stage = random(2 * HALF), 0
        self._adverts: Mapping[int, Advert] = {}
        self._shared: dict[int, bytes] = {}  # by client, its shares for this one: of its key, then of its seed

    def advertise(self) -> Advert:
        """This client's keys."""
        self._enter(1)
        keys = self._cipher.public_key().public_bytes_raw(), self._mask.public_key().public_bytes_raw()
        shown = *keys, hashlib.sha256(self._seed).digest()
        return Advert(*shown, self._identity.sign(to_sign(self._about, self._number, *shown)))

    def share(self, adverts: Mapping[int, Advert]) -> dict[int, bytes]:
        """For every other client the shares that only it can read."""
        self._enter(2)
        self._require_enough(adverts)
        keys = [key for advert in adverts.values() for key in advert[:2]]
        if self._number not in adverts or len(set(keys)) < len(keys):
            raise InputError("the keys for a secure sum lack this client's own or hold one twice: refused")
        for client, advert in adverts.items():
            self._identity.verify(client, to_sign(self._about, client, *advert[:3]), advert.signature)
        if adverts[self._number][1] != self._mask.public_key().public_bytes_raw():
            raise InputError("the keys for a secure sum hold a false one in this client's name: refused")
        self._adverts, members = dict(adverts), sorted(adverts)
        pieces = zip(_split(self._mask.private_bytes_raw(), self._least, len(members)),
                     _split(self._seed, self._least, len(members)), strict=True)  # fmt: skip
        mine = {client: b"".join(pair) for client, pair in zip(members, pieces, strict=True)}
        self._shared[self._number] = mine.pop(self._number)
        return {v: ChaCha20Poly1305(self._agreed(v, self._number)).encrypt(NONCE, text, None) for v, text in mine.items()}

    def mask(self, shares: Mapping[int, bytes], values: np.ndarray) -> np.ndarray:
        """The values, whole numbers modulo 2³², hidden; `shares` are those that the others have sent to this client."""
        self._enter(3)
        self._require_enough({self._number, *shares})
        if not shares.keys() <= self._adverts.keys() - {self._number}:
            raise InputError("shares for a secure sum come from a client that has no keys in it: refused")
        for v, text in shares.items():
            try:
                self._shared[v] = ChaCha20Poly1305(self._agreed(self._number, v)).decrypt(NONCE, text, None)
            except InvalidTag:
                raise InputError(f"the shares that client {v} sent for a secure sum were changed on the way: refused") from None
        hidden = values.astype(np.uint32) + _stream(self._seed, values.size)
        for v in shares:
            hidden += _pair(self._mask, self._number, v, self._adverts[v].mask_key, self._about, values.size)
        return hidden

    def unmask(self, arrived: Collection[int]) -> Shares:
        """This client's shares: of the seeds of those whose values arrived, and of the keys of the others who shared."""
        self._enter(4)
        there = set(arrived)
        self._require_enough(there)
        if not there <= self._shared.keys() or self._number not in there:
            raise InputError("a secure sum is to be unmasked for clients that are not in it: refused")
        seeds = {v: text[SHARE:] for v, text in self._shared.items() if v in there}
        return Shares(seeds, {v: text[:SHARE] for v, text in self._shared.items() if v not in there})

    def _enter(self, stage: int) -> None:
        if stage != self._stage + 1:
            raise InputError("the exchanges of a secure sum are out of order, or one is repeated: refused")
        self._stage = stage

    def _require_enough(self, clients: Collection[int]) -> None:
        if len(clients) < self._least:
            raise InputError(f"a secure sum over {len(clients)} clients, but this one insists on {self._least}: refused")

    def _agreed(self, receiver: int, sender: int) -> bytes:
        """The key for what one of the two sends to the other: each direction has its own."""
        other = sender if receiver == self._number else receiver
        secret = self._cipher.exchange(X25519PublicKey.from_public_bytes(self._adverts[other].cipher_key))
        return _derived(secret, self._about + f" shares {sender} to {receiver}".encode())


class Collector:
    """The server in one sum: it forwards keys and shares, and unmasks the sum of what has arrived.

    It leaves out clients whose keys would have all others refuse the sum, and does without shares that are false.
    """

    def __init__(self, least: int, about: bytes, signatures: Signatures):
        self._least, self._about, self._signatures = least, about, signatures
        self._adverts: dict[int, Advert] = {}
        self._sharing: list[int] = []

    def to_share(self, adverts: Mapping[int, Advert]) -> dict[int, Advert]:
        """What every client gets after the first exchange: the keys of those who sent some that the others can use."""
        usable = {m: advert for m, advert in adverts.items() if self._is_usable(m, advert)}
        uses = Counter(key for advert in usable.values() for key in advert[:2])
        self._adverts = {m: advert for m, advert in usable.items() if all(uses[key] == 1 for key in advert[:2])}
        return self._adverts

    def to_mask(self, shares: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """What each client gets after the second, given what each has sent for the others."""
        whole = {u: sent for u, sent in shares.items() if sent.keys() == self._adverts.keys() - {u}}
        self._sharing = sorted(whole)
        return {v: {u: sent[v] for u, sent in whole.items() if u != v} for v in whole}

    def total(self, masked: Mapping[int, np.ndarray], unmasking: Mapping[int, Shares]) -> np.ndarray:
        """Σ x_u over those whose masked values arrived, modulo 2³²; `RuntimeError` if too few helped to unmask it."""
        wanted = masked.keys(), set(self._sharing) - masked.keys()
        helping = sorted(m for m, given in unmasking.items() if all(map(_are_shares_of, given, wanted)))
        if len(helping) < self._least:
            raise RuntimeError(f"{len(helping)} clients helped to unmask a secure sum, and {self._least} must")
        groups = list(itertools.islice(_groups(helping, self._least), MOST_GROUPS))
        place = {client: k + 1 for k, client in enumerate(sorted(self._adverts))}

        def recovered(what: str, pieces: Callable[[int], bytes], is_right: Callable[[bytes], bool]) -> bytes:
            for k, group in enumerate(groups):
                secret = _combined({place[helper]: pieces(helper) for helper in group})
                if is_right(secret):
                    groups.insert(0, groups.pop(k))  # the next secret is tried with these helpers first
                    return secret
            raise RuntimeError(f"the shares of client {what}: the secure sum cannot be unmasked")

        size = next(iter(masked.values())).size
        total = np.zeros(size, np.uint32)
        for u, values in masked.items():
            shown = self._adverts[u].seed_hash
            seed = recovered(
                f"{u}'s seed do not make its seed",
                lambda helper: unmasking[helper].seeds[u],
                lambda secret: hashlib.sha256(secret).digest() == shown,
            )
            total += values
            total -= _stream(seed, size)
        for v in wanted[1]:
            shown = self._adverts[v].mask_key
            secret = recovered(
                f"{v}'s key do not make its key",
                lambda helper: unmasking[helper].keys[v],
                lambda secret: X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == shown,
            )
            key = X25519PrivateKey.from_private_bytes(secret)
            for u in masked:
                total += _pair(key, v, u, self._adverts[u].mask_key, self._about, size)
        return total

    def _is_usable(self, client: int, advert: Advert) -> bool:
        """Whether the client signed its keys, and a secret can be agreed with them."""
        if [*map(len, advert[:3])] != [SHARE] * 3:
            return False
        try:
            self._signatures.verify(client, to_sign(self._about, client, *advert[:3]), advert.signature)
            for key in advert[:2]:
                X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
        except (InputError, ValueError):
            return False
        return True


def _are_shares_of(shares: Mapping[int, bytes], clients: Collection[int]) -> bool:
    return shares.keys() == set(clients) and all(len(share) == SHARE for share in shares.values())


def _groups(helping: list[int], least: int) -> Iterator[tuple[int, ...]]:
    """Groups of so many helpers: first neighbours in a ring, which soon leave out any one, and then all groups."""
    for k in range(len(helping)):
        yield tuple((helping[k:] + helping[:k])[:least])
    yield from itertools.combinations(helping, least)


def to_sign(about: bytes, client: int, *shown: bytes) -> bytes:
    """What a client signs: lengths are fixed, but for `about`, whose hash stands for it."""
    return b"fedbilevel secure sum" + hashlib.sha256(about).digest() + client.to_bytes(8, "big") + b"".join(shown)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), 32, None, purpose).derive(secret)


def _stream(key: bytes, size: int) -> np.ndarray:
    """Numbers that look random to whoever does not have the key, which is used once."""
    made = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(4 * size))
    return np.frombuffer(made, "<u4").astype(np.uint32, copy=False)


def _pair(own: X25519PrivateKey, u: int, v: int, others: bytes, about: bytes, size: int) -> np.ndarray:
    """What u adds for its pair with v, which is minus what v adds."""
    secret = own.exchange(X25519PublicKey.from_public_bytes(others))
    mask = _stream(_derived(secret, about + f" mask {min(u, v)} {max(u, v)}".encode()), size)
    return mask if u < v else np.zeros(size, np.uint32) - mask


def _split(secret: bytes, least: int, clients: int) -> list[bytes]:
    """Shares of a 32-byte secret, of which `least` make it."""
    halves = [Shamir.split(least, clients, secret[k : k + HALF]) for k in (0, HALF)]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def _combined(shares: Mapping[int, bytes]) -> bytes:
    """The secret that exactly as many shares as are needed make, by their places."""
    return b"".join(Shamir.combine([(k, share[h : h + HALF]) for k, share in shares.items()]) for h in (0, HALF))
