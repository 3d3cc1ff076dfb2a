"""Which of FLARE's messages pass: those that runs need, between a site and the server, from whom they say they are from.

FLARE believes what a message says about its origin if a token comes with it that the server has signed for anybody, at any
time, and the server's own is in each of its answers. Here a connection's certificate decides for whom it speaks. Within a
machine, where a kit's processes talk to each other without certificates, all messages pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from nvflare.apis.fl_constant import CellMessageAuthHeaderKey, ReservedTopic, ServerCommandNames
from nvflare.collab.runtime.defs import MSG_CHANNEL, MSG_TOPIC
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, MessageHeaderKey, MessageType
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.streaming.stream_const import (
    STREAM_ACK_TOPIC,
    STREAM_CHANNEL,
    STREAM_DATA_TOPIC,
    STREAM_ERROR_TOPIC,
    StreamHeaderKey,
)

from fedbilevel.errors import in_one_line
from fedbilevel.federation.provision import ADMIN, SERVER
from fedbilevel.federation.sparse_log import SparseLog

logger = logging.getLogger(__name__)
RESEARCHER = "_admin_"  # how the names of a researcher's processes begin in FLARE
ANY = "*"
STREAMS = {(STREAM_CHANNEL, STREAM_ACK_TOPIC), (STREAM_CHANNEL, STREAM_ERROR_TOPIC), (CellChannel.RETURN_ONLY, ANY)}
BOTH_WAYS = {*STREAMS, (CellChannel.CELLNET, CellChannelTopic.Bye)}
FROM_SITES = {
    *BOTH_WAYS,
    (CellChannel.SERVER_MAIN, CellChannelTopic.Challenge),
    (CellChannel.SERVER_MAIN, CellChannelTopic.Register),
    (CellChannel.SERVER_MAIN, CellChannelTopic.HEART_BEAT),
    (CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE),
    (CellChannel.SERVER_MAIN, CellChannelTopic.Quit),
    (CellChannel.SERVER_COMMAND, ServerCommandNames.GET_TASK),
    (CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE),
    (CellChannel.AUX_COMMUNICATION, ReservedTopic.SYNC_RUNNER),
    (CellChannel.AUX_COMMUNICATION, ReservedTopic.TASK_CHECK),
    (CellChannel.AUX_COMMUNICATION, ReservedTopic.JOB_HEART_BEAT),
}
FROM_SERVER = {
    *BOTH_WAYS,
    (CellChannel.CLIENT_MAIN, CellChannel.CLIENT_MAIN),  # to which FLARE's agent at the site answers
    (CellChannel.AUX_COMMUNICATION, ReservedTopic.END_RUN),
    (MSG_CHANNEL, MSG_TOPIC),  # to which `Site` answers
}


def gated(process: Callable[..., None]) -> Callable[..., None]:
    """What takes in a message, for those that pass."""
    refusals = SparseLog(logger)

    def process_what_passes(self: Any, endpoint: Any, connection: Any, app_id: int, message: Any) -> None:
        about = connection.get_conn_properties() if connection else {}
        certificate = str(about.get(DriverParams.PEER_CN.value) or "")
        if why := refusal(self.my_info.fqcn, endpoint.name, certificate, message.headers or {}):
            return refusals.warning(f"refused a message: {why}")
        process(self, endpoint, connection, app_id, message)

    return process_what_passes


def family(name: str) -> str:
    """Whose process this is: the server's, or which site's."""
    return name.partition(".")[0]


def refusal(here: str, neighbour: str, certificate: str, headers: Mapping[str, Any]) -> str:
    """Why a message does not pass that a neighbour has sent or handed on, or nothing; without TLS there is no certificate."""
    own, came = family(here), family(neighbour)
    origin, destination = (str(headers.get(key)) for key in (MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION))
    sender, receiver = family(origin), family(destination)
    if certificate and own == SERVER and not _speaks_for(certificate, came):
        return f"the certificate of {certificate} does not speak for {_short(neighbour)}"
    if certificate and own != SERVER and neighbour != SERVER:
        return f"it comes from {_short(neighbour)}, and a site hears the server alone"
    if came != own and sender != came:
        return f"{_short(neighbour)} says that it is from {_short(origin)}"
    if sender == receiver or _is_researcher(sender, receiver):
        return ""
    if SERVER not in (sender, receiver) or any(name.startswith(RESEARCHER) for name in (sender, receiver)):
        return f"it is from {_short(origin)} to {_short(destination)}, and sites answer only the server"
    named = headers.get(CellMessageAuthHeaderKey.CLIENT_NAME)
    if sender != SERVER and named not in (None, sender):
        return f"{_short(origin)} calls itself {_short(named)}"
    channel, topic = _asked(headers)
    allowed = FROM_SERVER if sender == SERVER else FROM_SITES
    if headers.get(MessageHeaderKey.MSG_TYPE) == MessageType.REQ and not {(channel, topic), (channel, ANY)} & allowed:
        return f"{_short(origin)} asks for {_short(topic)} of {_short(channel)}, which runs do not need"
    return ""


def _speaks_for(certificate: str, name: str) -> bool:
    return certificate == ADMIN if name.startswith(RESEARCHER) else certificate == name


def _is_researcher(sender: str, receiver: str) -> bool:
    """Whether a message is between the researcher and the server."""
    names = (sender, receiver)
    return SERVER in names and any(name.startswith(RESEARCHER) for name in names)


def _asked(headers: Mapping[str, Any]) -> tuple[str, str]:
    """What a request asks for; one that comes in pieces says so in each."""
    channel, topic = (str(headers.get(key)) for key in (MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC))
    if (channel, topic) == (STREAM_CHANNEL, STREAM_DATA_TOPIC):
        channel, topic = (str(headers.get(key)) for key in (StreamHeaderKey.CHANNEL, StreamHeaderKey.TOPIC))
    return channel, topic


def _short(name: Any) -> str:
    return in_one_line(name, 80)
