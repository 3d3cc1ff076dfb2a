"""Why a client's answer is missing: a type that crosses the wire, so that nobody has to read it out of a message."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple, Self

from fedbilevel.errors import InputError, NotFinite


class Kind(enum.StrEnum):
    """The first three are reported by the client, the others by its transport."""

    REFUSED = "refused"  # the client will not do what it was asked
    NOT_FINITE = "not finite"  # a number that it was given or computed is not finite
    BROKEN = "broken"  # something went wrong at the client
    LATE = "late"  # no answer came in time
    UNREACHABLE = "unreachable"  # the request could not be delivered, or the client's process ended
    UNDER_WAY = "under way"  # the exchange went on without the answer, which counts when it comes
    INVALID = "invalid"  # what came is not an answer to the request


class Failure(NamedTuple):
    """Why a client has not answered, in one line; a request that never left the server does not count as traffic."""

    kind: Kind
    line: str
    sent: bool = True

    @classmethod
    def of(cls, error: Exception) -> Self:
        """The failure that an exception at a client means to the server."""
        match error:
            case InputError():
                return cls(Kind.REFUSED, str(error))
            case NotFinite():
                return cls(Kind.NOT_FINITE, str(error))
            case _:
                return cls(Kind.BROKEN, f"{type(error).__name__}: {error}")

    def __str__(self) -> str:
        return self.line


Failures = dict[int, Failure]  # by client


def silence(failures: Mapping[int, Failure]) -> NotFinite | RuntimeError:
    """The error to raise when no client has answered."""
    diverged = sum(failure.kind is Kind.NOT_FINITE for failure in failures.values())
    if 2 * diverged > len(failures):
        return NotFinite(f"{diverged} of {len(failures)} clients computed values that are not finite")
    m, failure = next(iter(failures.items()))
    return RuntimeError(f"none of {len(failures)} clients answered; client {m}: {failure}")
