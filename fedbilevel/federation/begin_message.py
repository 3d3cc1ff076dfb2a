"""The message by which the server has a site begin a run, the site's reply, and the protocol that both must speak."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fedbilevel.core.population import MOST_ROWS, Population
from fedbilevel.errors import InputError, in_one_line
from fedbilevel.user_files import Scalar, decoded, naming

PROTOCOL = 5  # raised with every change to what the server and the sites send each other
WHAT = "the message to begin a run"
MOST_FILES = 100  # that a site may say it has


@dataclass(frozen=True)
class Holdings:
    """What a site says about its data: whether it is simulated, and how many rows it has for each purpose."""

    simulated: bool
    upper: int
    lower: int
    test: int = 0
    found: Sequence[int] = ()  # by call of `ClientData.each`

    def __post_init__(self) -> None:
        counts = (self.upper, self.lower, self.test, *self.found)
        if len(self.found) > MOST_FILES:
            raise InputError(f"a site has found at most {MOST_FILES} files; it says {len(self.found)}: refused")
        if not all(0 <= n <= MOST_ROWS for n in counts) or not (self.upper and self.lower):
            raise InputError(f"a site has from 1 to {MOST_ROWS:,} rows; it says {max(counts):,} and {min(counts):,}: refused")

    @classmethod
    def of(cls, one: Population, simulated: bool, found: Sequence[int]) -> Holdings:
        """Those of a population of one."""
        test = 0 if one.test is None else int(one.test.size[0])
        return cls(simulated, int(one.upper.size[0]), int(one.lower.size[0]), test, found)

    @property
    def rows(self) -> int:
        """The rows of both losses."""
        return self.upper + self.lower


@dataclass(frozen=True)
class BeginMessage:
    """The run, as far as a site must know it, and which of its clients the site is."""

    task: str  # the name alone, also of one in a file
    knobs: Mapping[str, Scalar]
    algorithm: str
    hyperparameters: Mapping[str, Scalar]
    precision: str
    identity: str
    number: int  # m
    weight: float  # M w_m
    aggregate: str = "mean"
    names: tuple[str, ...] = ()  # of all clients
    code: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the user's code, by what it defines; "" for ours
    fit: str = ""  # the preprocessing of all sites' tables, where they have tables
    privacy: str = ""  # how rows are kept private, with the noise
    planned: Mapping[str, int] = field(default_factory=dict)  # then the calls of the whole run at a site, by client function
    sites: Sequence[Sequence[int]] = ()  # for each site its `Holdings.found`, or nothing while it has not said

    weights: tuple[float, ...] = ()  # of all clients, where sums are secure

    def agreement(self) -> str:
        """The hash of what all sites of secure sums must know alike; `InputError` if this site's weight is not in it."""
        if len(self.weights) != len(self.names) or list(self.weights[self.number : self.number + 1]) != [self.weight]:
            raise InputError("the weights of a run with secure sums are not one for each site, or not this site's: refused")
        shared = asdict(dataclasses.replace(self, number=0, weight=1.0))
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()

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
