"""A peer that speaks FLARE's protocol by hand, over TLS with a kit's certificate, and so can say about itself what it likes."""

import contextlib
import ssl
import struct
import time
import uuid

import msgpack
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize
from nvflare.private.fed.utils.identity_utils import IdentityAsserter

DATA, HELLO, PREFIX = 1, 4, ">IHBBHHHH"


class RawCell:
    """A connection that greets as `name`."""

    def __init__(self, line, kit, name):
        nvflare_fobs_initialize()
        self.line, self.kit, self.name = line, kit, name
        line.settimeout(5)
        self._frame(HELLO, None, msgpack.packb({"endpoint_name": name, "timestamp": time.time()}))
        time.sleep(0.5)  # the other end takes in a greeting and what follows it at the same time

    def register(self, client):
        """What the server gives to a site that proves its name, and what the server itself says who it is: as headers."""
        challenge = self.ask("server", "task", "challenge", {"nonce": "1", "cn": client})
        identity = IdentityAsserter(str(self.kit / "startup" / "client.key"), str(self.kit / "startup" / "client.crt"))
        proof = Shareable()
        proof["cert"], proof["cn"] = identity.cert_data, client
        proof["signature"] = identity.sign_common_name(nonce=challenge[1]["nonce"])
        proof.set_peer_context(FLContext())
        said = {"client_name": client, "client_type": "regular", "client_ip": "127.0.0.1", "project_name": "fedbilevel"}
        headers, given = self.ask("server", "task", "register", said, proof)
        own = {"client_name": client, **{key: given[key] for key in ("__token__", "__token_signature__", "ssid")}}
        return own, {key: headers[key] for key in own if key != "ssid"}

    def ask(self, target, channel, topic, headers, payload=None, origin=None, seconds=5):
        """The headers and the payload of what is answered to a request, or None."""
        number = str(uuid.uuid4())
        origin = origin or self.name
        route = {"origin": origin, "destination": target, "from": origin, "to": target, "route": [[origin, time.time()]]}
        kind = {"channel": channel, "topic": topic, "msg_type": "req", "reply_expected": True, "req_id": number}
        said = {
            f"cn__{key}": value for key, value in {**route, **kind, "payload_encoding": "fobs" if payload else "none"}.items()
        }
        self._frame(DATA, {**said, **headers}, fobs.dumps(payload) if payload else b"")
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError, ssl.SSLError):
            while time.monotonic() < deadline:
                self.line.settimeout(max(0.01, deadline - time.monotonic()))
                length, size, type_, *_ = struct.unpack(PREFIX, self._read(16))
                body = self._read(length - 16)
                answered = msgpack.unpackb(body[:size]) if type_ == DATA and size else {}
                if number in (answered.get("cn__req_id") or ""):
                    encoded = answered.get("cn__payload_encoding") == "fobs"
                    return answered, fobs.loads(body[size:]) if encoded else body[size:]
        return None

    def _frame(self, type_, headers, payload):
        packed = msgpack.packb(headers) if headers else b""
        length = 16 + len(packed) + len(payload)
        self.line.sendall(struct.pack(PREFIX, length, len(packed), type_, 0, 0, 1, 1, 1) + packed + payload)

    def _read(self, length):
        data = b""
        while len(data) < length:
            more = self.line.recv(length - len(data))
            if not more:
                raise ConnectionError("the other end has hung up")
            data += more
        return data
