"""Shamir's secret sharing: any `least` of the shares of a secret make it, and fewer say nothing about it.

A. Shamir, How to share a secret, CACM 1979. The secret is f(0) and share k is f(k), modulo a prime above 2²⁵⁶, for a
polynomial f of degree `least` - 1 whose other coefficients are random. So the secret is Σ_k λ_k f(k), with Lagrange's
λ_k = Π_{j≠k} j / (j - k), which depend on the places alone: whoever recombines many secrets computes them once.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache

SECRET = 32  # bytes
SHARE = 33  # bytes
PRIME = 2**256 + 297


def split(secret: bytes, least: int, shares: int) -> list[bytes]:
    """The shares in the places 1, 2, ... of a secret of 32 bytes."""
    if len(secret) != SECRET or not 1 <= least <= shares:
        raise ValueError(f"{least} of {shares} shares of {len(secret)} bytes")
    f = [*(secrets.randbelow(PRIME) for _ in range(least - 1)), int.from_bytes(secret, "big")]

    def at(place: int) -> int:
        value = 0
        for coefficient in f:
            value = (value * place + coefficient) % PRIME
        return value

    return [at(place).to_bytes(SHARE, "big") for place in range(1, shares + 1)]


def combined(places: tuple[int, ...], shares: Sequence[bytes]) -> bytes:
    """The secret that the shares in these places make, which are as many as are needed; if one is false, other bytes."""
    terms = (weight * int.from_bytes(share, "big") for weight, share in zip(_weights(places), shares, strict=True))
    return (sum(terms) % PRIME).to_bytes(SHARE, "big")[-SECRET:]


@lru_cache(maxsize=256)
def _weights(places: tuple[int, ...]) -> list[int]:
    """Lagrange's λ, for the value at 0."""

    def weight(k: int) -> int:
        above = below = 1
        for j in places:
            if j != k:
                above, below = above * j % PRIME, below * (j - k) % PRIME
        return above * pow(below, -1, PRIME) % PRIME

    return [weight(k) for k in places]
