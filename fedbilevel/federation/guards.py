"""What is replaced in FLARE: what a federation of ours does not need and others could abuse.

- A frame is refused if it announces more bytes than any of ours has: FLARE would make room for 2 GB. For messages in many
  frames, which may be large, room is made as they come. A greeting is short: the lists that a long one can hold take sixty
  times its room, before it is known who greets.
- Only a certificate with a role logs in as an administrator: a site's has none.
- The commands and messages that test and stop the network (`speed`, `stress`, `stop_cell` and the like) do not exist.
- Only messages that runs need pass, from whom they say they are from (`message_gate`), and a site does for the server only what
  runs need: no shell, nothing about its machine, no restart. Nobody can have it connect elsewhere.
- Only who may log in as an administrator signs jobs.
- A job's identity is one that FLARE's server gives, so that no other folder of the kit passes for a job's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cryptography import x509
from nvflare.apis import workspace
from nvflare.fuel.f3.cellnet import core_cell, net_agent, net_manager
from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers import socket_conn, tcp_driver
from nvflare.fuel.f3.sfm import conn_manager, sfm_endpoint
from nvflare.fuel.f3.streaming import blob_streamer
from nvflare.fuel.hci.reg import CommandModuleSpec
from nvflare.fuel.hci.server import login
from nvflare.fuel.sec.admin_cert import AdminCertValidationError, validate_admin_leaf_cert
from nvflare.lighter import utils as signatures
from nvflare.private.defs import TrainingTopic
from nvflare.private.fed.client import admin_commands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from fedbilevel.federation.guarded_process import mark_guarded
from fedbilevel.federation.job_launchers import is_job_id
from fedbilevel.federation.listener import GuardedServer
from fedbilevel.federation.message_gate import gated
from fedbilevel.federation.same_kit import watched

MOST_FRAME = 16 << 20  # bytes; FLARE sends what is larger in pieces of one megabyte
MOST_GREETING = 1 << 14  # bytes
FOR_THE_SERVER = {  # what a site does when FLARE's server asks for it
    TrainingTopic.CHECK_RESOURCE,
    TrainingTopic.CANCEL_RESOURCE,
    TrainingTopic.DEPLOY,
    TrainingTopic.START_JOB,
    TrainingTopic.NOTIFY_JOB_STATUS,
    TrainingTopic.CHECK_STATUS,
    TrainingTopic.ABORT,
    TrainingTopic.DELETE_RUN,
}
FOR_ITS_SITE = {"abort"}  # what a job's process does when its site's asks for it
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


def _short_greeting(read: Callable[[Any, Any], Any]) -> Any:
    """What reads what a peer says about itself; `CommError` if it is too long to be that."""

    def read_short(prefix: Any, frame: Any) -> Any:
        if prefix.length > MOST_GREETING:
            raise CommError(CommError.BAD_DATA, f"a greeting of {prefix.length} bytes: refused")
        return read(prefix, frame)

    return staticmethod(read_short)


def _no_commands(self: Any) -> CommandModuleSpec:
    return CommandModuleSpec(name="cellnet", cmd_specs=[])


def _no_connector(self: Any, to_cell: str, url: str) -> None:
    """Connect to nobody whom a message names."""


def _replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
    """Put what is made from it in the place of what FLARE has; `AttributeError` if it has nothing there."""
    if name not in vars(owner):  # one that a class only inherits may be called no longer
        raise AttributeError(f"{owner.__name__} has no {name}")
    setattr(owner, name, made(getattr(owner, name)))


def _by(ours: Any) -> Callable[[Any], Any]:
    """What takes the place of anything."""
    return lambda theirs: ours


def _keep(offered: list[Any], names: Callable[[Any], set[str]], wanted: set[str]) -> None:
    """Take all but the wanted from what FLARE offers; `AttributeError` if one of these is missing."""
    kept = [one for one in offered if names(one) <= wanted]
    if missing := wanted - {name for one in kept for name in names(one)}:
        raise AttributeError(f"nothing there answers to {min(missing)} and to nothing else")
    offered[:] = kept


def install() -> None:
    """Guard this process; `AttributeError` if FLARE does not have what is replaced."""
    _replace(socket_conn, "MAX_FRAME_SIZE", _by(MOST_FRAME))
    _replace(blob_streamer, "BlobTask", _by(GrowingBlob))
    _replace(conn_manager.ConnManager, "get_dict_payload", _short_greeting)
    _replace(tcp_driver, "TcpStreamServer", _by(GuardedServer))
    _replace(workspace, "check_job_id", _by(require_job_id))
    _replace(login, "validate_admin_leaf_cert", _by(require_role))
    _replace(signatures, "validate_admin_leaf_cert", _by(require_role))
    _replace(net_agent.NetAgent, "__init__", _deaf)
    _replace(net_manager.NetManager, "get_spec", _by(_no_commands))
    _replace(sfm_endpoint.SfmEndpoint, "add_connection", watched)
    _replace(core_cell.CoreCell, "process_message", gated)
    _replace(core_cell.CoreCell, "_add_adhoc_connector", _by(_no_connector))
    _keep(ClientRequestProcessors.request_processors, lambda processor: set(processor.get_topics()), FOR_THE_SERVER)
    _keep(admin_commands.AdminCommands.commands, lambda command: {command.get_command_name()}, FOR_ITS_SITE)
    mark_guarded()
