"""Clients that sign, as several tests of secure sums need them."""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedbilevel.errors import InputError


class Keys:
    """Everybody's signing keys."""

    def __init__(self, clients):
        self.private = {m: Ed25519PrivateKey.generate() for m in range(clients)}

    def signed(self, client, advert):
        """An advert with that client's signature, as if it had made it."""
        return advert._replace(signature=self.private[client].sign(advert.to_sign(client)))


class Signer:
    def __init__(self, keys, number):
        self.keys, self.number = keys, number

    def sign(self, message):
        return self.keys.private[self.number].sign(message)

    def verify(self, client, message, signature):
        try:
            self.keys.private[client].public_key().verify(signature, message)
        except InvalidSignature:
            raise InputError(f"client {client} has not signed this: refused") from None
