"""The message by which the server has a site begin a run, and the protocol that both must speak."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fedbilevel.errors import InputError, in_one_line
from fedbilevel.user_files import Scalar, decoded, naming

PROTOCOL = 2  # raised with every change to what the server and the sites send each other
WHAT = "the message to begin a run"


@dataclass(frozen=True)
class BeginMessage:
    """The run, as far as a site must know it, and which of its clients the site is."""

    task: str
    knobs: Mapping[str, Scalar]
    algorithm: str
    hyperparameters: Mapping[str, Scalar]
    precision: str
    identity: str
    number: int  # m
    weight: float  # M w_m
    aggregate: str = "mean"
    sites: tuple[str, ...] = ()  # the names of all clients

    def encoded(self) -> bytes:
        """The bytes to send; the protocol is beside the run, so that a site of any version can read it."""
        return json.dumps(asdict(_Envelope(PROTOCOL, _version(), self))).encode()

    @classmethod
    def read(cls, data: bytes) -> BeginMessage:
        """The message in these bytes; `InputError` if it is damaged or of another protocol."""
        with naming(WHAT):
            server = decoded(data, _Protocol)
        if server.protocol != PROTOCOL:
            raise InputError(
                f"the server speaks protocol {server.protocol} (fedbilevel {in_one_line(server.version)}), and this site "
                f"protocol {PROTOCOL} (fedbilevel {_version()}): install the same version on both"
            )
        with naming(WHAT):
            return decoded(data, _Envelope).run


@dataclass(frozen=True)
class _Protocol:
    protocol: int = 0  # version 0.1.0 did not say
    version: str = "0.1.0"


@dataclass(frozen=True)
class _Envelope:
    protocol: int
    version: str
    run: BeginMessage


def _version() -> str:
    return importlib.metadata.version("fedbilevel")
