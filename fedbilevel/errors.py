"""Errors that are not defects of the package."""

import contextlib
from collections.abc import Iterator

LONGEST_LINE = 500  # characters


class InputError(ValueError):
    """Input from the user that cannot be used: one line with the thing, the value and the remedy."""


class NotFinite(ArithmeticError):
    """A value sent to or from a client is not finite; a run that meets one has diverged."""


class Diverged(ArithmeticError):
    """An iterate is no longer finite, or a loss exceeds its bound: one paragraph on what to try."""


def require(fits: bool, name: str, wanted: str, given: object) -> None:
    """Raise `InputError` with what is wanted and what is given, unless that fits."""
    if not fits:
        raise InputError(f"{name} must be {wanted}; given: {in_one_line(repr(given))}")


@contextlib.contextmanager
def computing(what: str) -> Iterator[None]:
    """Within it, whatever a user's function raises becomes `InputError`, with the original behind it."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{what} cannot be computed: {type(error).__name__}: {in_one_line(error)}") from error


def in_one_line(text: object, longest: int = LONGEST_LINE) -> str:
    """Untrusted text as one line for a log: printable and of bounded length."""
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())[:longest]
