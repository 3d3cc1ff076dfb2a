"""Who a site is to the others: it signs with its kit's private key, and all believe certificates of their authority alone."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from fedbilevel.errors import InputError

PADDING = PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)
LENGTH = 4  # bytes, for the length of the certificate that precedes a signature


class SiteSignatures:
    """The signatures of the sites of one run, in which client m is the site `sites[m]`, as whoever has a kit knows them."""

    def __init__(self, kit: Path, sites: Sequence[str], run: str):
        self._root = x509.load_pem_x509_certificate((kit / "startup" / "rootCA.pem").read_bytes())
        self._sites, self._run = sites, run
        self._known: dict[int, tuple[bytes, RSAPublicKey]] = {}

    def verify(self, client: int, message: bytes, signature: bytes) -> None:
        """Raise `InputError` unless the site that is that client signed the message, with a certificate of our authority."""
        end = LENGTH + int.from_bytes(signature[:LENGTH], "big")
        try:
            key = self._public_key(client, signature[LENGTH:end])
            key.verify(signature[end:], _of_run(self._run, message), PADDING, SHA256())
        except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError, IndexError):
            raise InputError(f"the keys of client {client} for a secure sum are not signed by its site: refused") from None

    def _public_key(self, client: int, shown: bytes) -> RSAPublicKey:
        known, key = self._known.get(client, (b"", None))
        if key is None or known != shown:
            certificate = x509.load_der_x509_certificate(shown)
            certificate.verify_directly_issued_by(self._root)
            now = datetime.datetime.now(datetime.UTC)
            valid = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
            public = certificate.public_key()
            if not valid or _name(certificate) != self._sites[client] or not isinstance(public, RSAPublicKey):
                raise ValueError
            key = public
            self._known[client] = shown, key
        return key


class KitIdentity:
    """A site in one run."""

    def __init__(self, kit: Path, sites: Sequence[str], number: int, run: str):
        key = load_pem_private_key((kit / "startup" / "client.key").read_bytes(), None)
        assert isinstance(key, RSAPrivateKey)
        self._key, self._run, self._signatures = key, run, SiteSignatures(kit, sites, run)
        self._certificate = x509.load_pem_x509_certificate((kit / "startup" / "client.crt").read_bytes())
        if len(set(sites)) < len(sites) or list(sites[number : number + 1]) != [_name(self._certificate)]:
            raise InputError("the sites of a secure sum hold one twice, or another in this site's place: refused")

    def sign(self, message: bytes) -> bytes:
        """The site's certificate, and its signature."""
        shown = self._certificate.public_bytes(Encoding.DER)
        return len(shown).to_bytes(LENGTH, "big") + shown + self._key.sign(_of_run(self._run, message), PADDING, SHA256())

    def verify(self, client: int, message: bytes, signature: bytes) -> None:
        """See `SiteSignatures.verify`."""
        self._signatures.verify(client, message, signature)


def _of_run(run: str, message: bytes) -> bytes:
    return run.encode() + b" " + message


def _name(certificate: x509.Certificate) -> str:
    """The site that a certificate is for; "" if it gives its holder a role, as a researcher's does."""
    if certificate.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
        return ""
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)
