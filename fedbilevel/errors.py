"""Errors that are not defects of the package."""

from __future__ import annotations

import contextlib
import inspect
import os
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

LONGEST_LINE = 500  # characters
PACKAGE, LIBRARY = os.path.join(os.path.dirname(__file__), ""), os.path.join(sysconfig.get_path("stdlib"), "")


class InputError(ValueError):
    """Input from the user that cannot be used: one line with the thing, the value and the remedy."""


class FolderTaken(InputError):
    """A folder that cannot be used for something new; `replaceable` if the caller may have what it holds replaced."""

    def __init__(self, line: str, replaceable: bool = False):
        super().__init__(line)
        self.replaceable = replaceable


class Withheld(InputError):
    """Input at a site that cannot be used: the line is for the server, and the reason for the site's own log alone."""

    def __init__(self, line: str, reason: object):
        super().__init__(line)
        self.reason = str(reason)


class NotFinite(ArithmeticError):
    """A value sent to or from a client is not finite; a run that meets one has diverged."""


class Diverged(ArithmeticError):
    """An iterate is no longer finite, or a loss exceeds its bound: one paragraph on what to try."""

    def __init__(self, advice: str, seconds: float = 0.0):
        super().__init__(advice)
        self.seconds = seconds  # of computing until then


def require(fits: bool, name: str, wanted: str, given: object) -> None:
    """Raise `InputError`, which says what is wanted and what was given, unless it fits."""
    if not fits:
        raise InputError(f"{name} must be {wanted}; given: {in_one_line(repr(given))}")


@contextlib.contextmanager
def computing(what: str) -> Iterator[None]:
    """During the block, turn whatever a user's function raises into `InputError`, with the original as its cause."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{place(error)}{what} cannot be computed: {in_words(error)}") from error


@contextlib.contextmanager
def users_code(file: str) -> Iterator[None]:
    """During the block, turn whatever code in a user's file raises into `InputError` that names the line of that file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        at = place(error, file)
        if not at:
            raise
        raise InputError(f"{at}{error if isinstance(error, InputError) else in_words(error)}") from error


def place(error: BaseException, file: str = "") -> str:
    """Where in a user's code, or in the given file, an error was raised, as `FILE:LINE: `; "" if nowhere."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 0))
    lines = [(name, line) for name, line in frames if (name == file if file else _is_users(name))]
    return f"{_short(lines[-1][0])}:{lines[-1][1]}: " if lines else ""


class Advice(UserWarning):
    """A warning of the package's own: a sentence for the user."""


def warn(said: str) -> None:
    """Warn at the line that called the package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(said, Advice, stacklevel=level)


def _is_users(file: str) -> bool:
    installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return not installed and not file.startswith(("<", PACKAGE, LIBRARY))


def _short(file: str) -> str:
    within = os.path.relpath(file)
    return file if within.startswith(os.pardir) else within


def in_words(error: BaseException) -> str:
    """An error's type and message in one line."""
    message = error.msg if isinstance(error, SyntaxError) else error
    return f"{type(error).__name__}: {in_one_line(message)}".removesuffix(": ")


def in_one_line(text: object, longest: int = LONGEST_LINE) -> str:
    """Untrusted text as one line for a log: printable and of bounded length."""
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())[:longest]
