"""Who sites are to each other: signatures with their kits' keys, and certificates of one authority."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from fedbilevel.errors import InputError
from fedbilevel.federation.kit_identity import KitIdentity

SITES = ["h1", "h2"]
DAY = datetime.timedelta(days=1)


class Authority:
    """An authority that writes kits as a federation's does."""

    def __init__(self):
        self.key = rsa.generate_private_key(65537, 2048)
        self.root = self.certificate("authority", self.key)

    def certificate(self, name, key, role=None, until=DAY):
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        parts += [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role else []
        now = datetime.datetime.now(datetime.UTC)
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        made = x509.CertificateBuilder(issuer, x509.Name(parts), key.public_key(), 1, now - 2 * DAY, now + until)
        return made.sign(self.key, SHA256())

    def kit(self, folder, name, **how):
        key, startup = rsa.generate_private_key(65537, 2048), folder / name / "startup"
        startup.mkdir(parents=True)
        (startup / "client.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (startup / "client.crt").write_bytes(self.certificate(name, key, **how).public_bytes(Encoding.PEM))
        (startup / "rootCA.pem").write_bytes(self.root.public_bytes(Encoding.PEM))
        return folder / name


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture(scope="module")
def kits(authority, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    return [authority.kit(folder, name) for name in SITES]


def test_a_site_believes_what_another_site_of_the_run_signed_and_nothing_else(kits):
    first, second = (KitIdentity(kit, SITES, m, "run") for m, kit in enumerate(kits))
    signature = second.sign(b"keys")
    first.verify(1, b"keys", signature)
    first.verify(1, b"keys", signature)  # with the certificate known
    for client, message, shown in (
        (1, b"other keys", signature),
        (0, b"keys", signature),
        (7, b"keys", signature),
        (1, b"keys", signature[:-1]),
        (1, b"keys", b""),
        (1, b"keys", KitIdentity(kits[1], SITES, 1, "another run").sign(b"keys")),
    ):
        with pytest.raises(InputError, match=f"client {client} for a secure sum are not signed by its site"):
            first.verify(client, message, shown)


@pytest.mark.parametrize("how", [{"role": "project_admin"}, {"until": -DAY}])
def test_certificates_with_a_role_or_out_of_date_are_not_a_sites(authority, kits, tmp_path, how):
    kit = authority.kit(tmp_path, "h2", **how)
    first = KitIdentity(kits[0], SITES, 0, "run")
    sites = ["h1", ""] if "role" in how else SITES
    with pytest.raises(InputError, match="are not signed by its site"):
        first.verify(1, b"keys", KitIdentity(kit, sites, 1, "run").sign(b"keys"))


def test_certificates_of_another_authority_are_refused(kits, tmp_path):
    stranger = KitIdentity(Authority().kit(tmp_path, "h2"), SITES, 1, "run")
    with pytest.raises(InputError, match="are not signed by its site"):
        KitIdentity(kits[0], SITES, 0, "run").verify(1, b"keys", stranger.sign(b"keys"))


@pytest.mark.parametrize(("sites", "number"), [(["h2", "h1"], 0), (["h1", "h1"], 0), (["h1"], 3), ([], 0)])
def test_a_site_that_is_not_where_the_server_says_refuses(kits, sites, number):
    with pytest.raises(InputError, match="hold one twice, or another in this site's place"):
        KitIdentity(kits[0], sites, number, "run")
