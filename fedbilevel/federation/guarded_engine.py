"""FLARE's processes without what a federation of ours does not need and others could abuse.

    python -m fedbilevel.federation.guarded_engine MODULE ARGUMENTS      one of FLARE's programs

- A frame is refused if it announces more bytes than any of ours has: FLARE would make room for 2 GB. For messages in many
  frames, which may be large, room is made as they come. A greeting is short: the lists that a long one can hold take sixty
  times its room, before it is known who greets.
- Only a certificate with a role logs in as an administrator: a site's has none.
- The commands and messages that test and stop the network (`speed`, `stress`, `stop_cell` and the like) do not exist.
- A job's identity is one that FLARE's server gives, so that no other folder of the kit passes for a job's.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

from cryptography import x509
from nvflare.apis import workspace
from nvflare.fuel.f3.cellnet import net_agent, net_manager
from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers import socket_conn, tcp_driver
from nvflare.fuel.f3.sfm import conn_manager
from nvflare.fuel.f3.streaming import blob_streamer
from nvflare.fuel.hci.reg import CommandModuleSpec
from nvflare.fuel.hci.server import login
from nvflare.fuel.sec.admin_cert import AdminCertValidationError, validate_admin_leaf_cert

from fedbilevel.federation.job_launchers import is_job_id
from fedbilevel.federation.listener import GuardedServer

MOST_FRAME = 16 << 20  # bytes; FLARE sends what is larger in pieces of one megabyte
MOST_GREETING = 1 << 14  # bytes
read_greeting = conn_manager.ConnManager.get_dict_payload
ROLE = x509.ObjectIdentifier("1.2.840.113549.1.9.2")  # the attribute of certificates in which FLARE has it


def require_job_id(job: Any) -> None:
    """Raise `ValueError` unless this can be the identity of a job."""
    if not is_job_id(job):
        raise ValueError("not the identity of a job: refused")


def require_role(certificate: x509.Certificate) -> None:
    """Raise unless a certificate can be an administrator's, who has a role."""
    validate_admin_leaf_cert(certificate)
    if not certificate.subject.get_attributes_for_oid(ROLE):
        raise AdminCertValidationError("the certificate has no role: it is not an administrator's")


class _Deaf:
    """A cell on which an agent can register for nothing."""

    def register_request_cb(self, **request: Any) -> None:
        """Register nothing."""


def _deaf(begin: Callable[..., None]) -> Callable[..., None]:
    """The beginning of an agent to whom nobody can send anything."""

    def begin_deaf(self: Any, cell: Any, *callbacks: Any, **named: Any) -> None:
        begin(self, _Deaf(), *callbacks, **named)
        self.cell = cell

    return begin_deaf


class GrowingBlob(blob_streamer.BlobTask):
    """A message that comes in pieces, for which there is room once they are there if it announces to be large."""

    def __init__(self, future: Any, stream: Any, max_size: int = 0, preserve_chunks: bool = False):
        grows = not preserve_chunks and stream.get_size() > MOST_FRAME
        super().__init__(future, stream, max_size, preserve_chunks or grows)
        if grows:
            self.preserve_chunks, self.buffer = False, blob_streamer.FastBuffer()


def _short_greeting(prefix: Any, frame: Any) -> Any:
    """What a peer says about itself; `CommError` if it is too long to be that."""
    if prefix.length > MOST_GREETING:
        raise CommError(CommError.BAD_DATA, f"a greeting of {prefix.length} bytes: refused")
    return read_greeting(prefix, frame)


def _no_commands(self: Any) -> CommandModuleSpec:
    return CommandModuleSpec(name="cellnet", cmd_specs=[])


def guard() -> None:
    """Guard this process, before one of FLARE's programs starts in it."""
    socket_conn.MAX_FRAME_SIZE = MOST_FRAME
    blob_streamer.BlobTask = GrowingBlob
    conn_manager.ConnManager.get_dict_payload = staticmethod(_short_greeting)
    tcp_driver.TcpStreamServer = GuardedServer
    workspace.check_job_id = require_job_id
    login.validate_admin_leaf_cert = require_role
    net_agent.NetAgent.__init__ = _deaf(net_agent.NetAgent.__init__)
    net_manager.NetManager.get_spec = _no_commands


if __name__ == "__main__":
    guard()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
