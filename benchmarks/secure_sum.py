"""What a secure sum costs: seconds of a client and of the server for messages of 600 KB, without the network.

python benchmarks/secure_sum.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedbilevel.engines.secure_sum import Collector, Participant

SIZE = 150_000  # numbers of 4 bytes
ABOUT = b"benchmark"


class Signer:
    """Signatures as fast as they can be: the kits' take a millisecond more."""

    def __init__(self, keys: dict[int, Ed25519PrivateKey], number: int):
        self.keys, self.number = keys, number

    def sign(self, message: bytes) -> bytes:
        return self.keys[self.number].sign(message)

    def verify(self, client: int, message: bytes, signature: bytes) -> None:
        self.keys[client].public_key().verify(signature, message)


def main() -> None:
    for n, lost in ((4, 0), (4, 1), (16, 0), (16, 1), (64, 0), (64, 1)):
        keys = {m: Ed25519PrivateKey.generate() for m in range(n)}
        spent = {"client": 0.0, "server": 0.0}

        def timed(who: str, work: Callable[..., Any], *args: Any) -> Any:
            began = time.process_time()
            made = work(*args)
            spent[who] += time.process_time() - began
            return made

        least, values = n // 2 + 1, np.random.default_rng(0).integers(0, 2**32, SIZE, np.uint32)
        clients = {m: Participant(m, least, ABOUT, Signer(keys, m)) for m in range(n)}
        server = Collector(least, ABOUT)
        adverts = server.to_share({m: timed("client", c.advertise) for m, c in clients.items()})
        shares = server.to_mask({m: timed("client", c.share, adverts) for m, c in clients.items()})
        masked = {m: timed("client", clients[m].mask, shares[m], values) for m in range(n - lost)}
        helped = {m: timed("client", clients[m].unmask, list(masked)) for m in masked}
        total = timed("server", server.total, masked, helped)
        assert np.array_equal(total, values * np.uint32(n - lost))
        print(f"{n} sites, {lost} lost: {1e3 * spent['client'] / n:.1f} ms a site, {1e3 * spent['server']:.1f} ms the server")


if __name__ == "__main__":
    main()
