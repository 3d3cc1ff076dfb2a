"""What can go wrong that is not a defect of the package."""

import contextlib
from collections.abc import Iterator

LONGEST_LINE = 500  # characters


class InputError(ValueError):
    """Something the user gave cannot be used: one line with the thing, the value and the remedy."""


class NotFinite(ArithmeticError):
    """A value on its way to or from clients is not a finite number; a run that meets it has diverged."""


class Diverged(ArithmeticError):
    """The iterates left the finite numbers, or a loss its bound: one paragraph with what to try."""


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


def in_one_line(text: object) -> str:
    """What somebody else wrote, as one line for a log: printable, and of bounded length."""
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())[:LONGEST_LINE]
