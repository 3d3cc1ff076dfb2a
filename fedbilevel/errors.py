"""Errors that are not defects of the package."""

LONGEST_LINE = 500  # characters


class InputError(ValueError):
    """Input from the user that cannot be used: one line with the thing, the value and the remedy."""


class NotFinite(ArithmeticError):
    """A value sent to or from a client is not finite; a run that meets one has diverged."""


class Diverged(ArithmeticError):
    """An iterate is no longer finite, or a loss exceeds its bound: one paragraph on what to try."""


def in_one_line(text: object) -> str:
    """Untrusted text as one line for a log: printable and of bounded length."""
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())[:LONGEST_LINE]
