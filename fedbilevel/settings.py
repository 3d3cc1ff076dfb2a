"""Named, typed, bounded values: the hyperparameters of algorithms and the knobs of tasks.

Both are frozen dataclasses with fields made here, so that a value from Python, from `--set` or from a
stored configuration is checked in one place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from fedbilevel.errors import InputError, in_one_line, require

REQUIRED: Any = dataclasses.MISSING  # the default of a field that has none
ACCEPTED: dict[type, Any] = {bool: object, int: numbers.Integral, float: numbers.Real, str: str}
STEP_DECADES = 4
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class Setting(NamedTuple):
    """The type, meaning and constraints of a field."""

    kind: type
    meaning: str
    source: str  # where the default comes from
    wanted: str
    fits: Callable[[Any], bool]
    optional: bool = False  # whether None, for no value, is allowed
    decades: float = 0  # how many powers of ten, around the value in force, are searched when it is tuned; 0: it is not
    tied_to: str = ""  # the setting whose value it shares when that is tuned


def real(
    default: float | None,
    meaning: str,
    *,
    source: str = "",
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    finite: bool = True,
    decades: float = 0,
    tied_to: str = "",
) -> Any:
    """A number within bounds; it must be finite unless `finite` is false.

    It is tuned over `decades` powers of ten around the value in force, or has the value of the setting that it is tied to.
    """
    limits = [
        (above, "above", lambda v: v > above),
        (least, "of at least", lambda v: v >= least),
        (below, "below", lambda v: v < below),
        (most, "at most", lambda v: v <= most),
    ]
    given = [(f"{word} {bound:g}", within) for bound, word, within in limits if bound is not None]
    wanted = "a number " + " and ".join(words for words, _ in given)

    def fits(value: float) -> bool:
        return (math.isfinite(value) or not finite) and all(within(value) for _, within in given)

    return _field(default, Setting(float, meaning, source, wanted.strip(), fits, decades=decades, tied_to=tied_to))


def step_size(default: float, meaning: str, *, source: str = "", tied_to: str = "") -> Any:
    """A number above 0, which is tuned over four powers of ten."""
    return real(default, meaning, source=source, above=0, decades=0 if tied_to else STEP_DECADES, tied_to=tied_to)


def count(default: int | None, meaning: str, *, source: str = "", least: int = 1, bits: int = 31) -> Any:
    """A whole number of at least `least` that fits into `bits` bits."""
    wanted = f"a whole number of at least {least} (and below 2{str(bits).translate(SUPERSCRIPT)})"
    return _field(default, Setting(int, meaning, source, wanted, lambda v: least <= v < 2**bits))


def flag(default: bool, meaning: str, *, source: str = "") -> Any:
    """True or false."""
    return _field(default, Setting(bool, meaning, source, "true or false", lambda v: True))


def choice(default: str, meaning: str, options: Iterable[str], *, source: str = "") -> Any:
    """One of several names."""
    names = tuple(options)
    return _field(default, Setting(str, meaning, source, "one of " + ", ".join(names), lambda v: v in names))


def text(default: str | None, meaning: str, wanted: str, fits: Callable[[str], bool], *, source: str = "") -> Any:
    """Text of a certain form; `fits` may raise `ValueError` for any other."""
    return _field(default, Setting(str, meaning, source, wanted, fits))


def plain(owner: str, name: str, kinds: Mapping[str, Any], default: Any) -> Any:
    """A setting with only a type, looked up in `kinds`, and a default; `InputError` if either cannot be used."""
    kind = kinds.get(name)
    optional = typing.get_origin(kind) in (types.UnionType, typing.Union)
    if optional:
        kind = next((k for k in typing.get_args(kind) if k is not type(None)), None)
    options = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if options and all(isinstance(option, str) for option in options):
        setting = Setting(str, "", "", "one of " + ", ".join(options), lambda v: v in options)
    elif isinstance(kind, type) and kind in wanted:
        setting = Setting(kind, "", "", wanted[kind], lambda v: kind is not float or math.isfinite(v))
    else:
        raise InputError(f"{owner}: {name} must have the type int, float, bool, str or a Literal of strings; given: {kind}")
    if default is inspect.Parameter.empty:
        raise InputError(f"{owner}: {name} must have a default value")
    return _field(None if default is None and optional else checked(owner, f"the default of {name}", setting, default), setting)


def _field(default: Any, setting: Setting) -> Any:
    return dataclasses.field(default=default, metadata={"setting": setting._replace(optional=default is None)})


def settings(cls: type) -> dict[str, Setting]:
    """The settings of a class, by field name."""
    return {field.name: field.metadata["setting"] for field in dataclasses.fields(cls) if "setting" in field.metadata}


def checked(owner: str, name: str, setting: Setting, value: Any, shown: str = "") -> Any:
    """The value, converted to the setting's type; `InputError` if it has another type or does not fit."""
    if value is None and setting.optional:
        return None
    value = unwrapped(value)
    is_kind = isinstance(value, ACCEPTED[setting.kind]) and (setting.kind is bool) == (type(value).__name__ == "bool")
    try:
        converted = setting.kind(value) if is_kind else value
        fits = is_kind and setting.fits(converted)
    except (ValueError, OverflowError):
        fits = False
    if not fits:
        given = in_one_line(shown or (value if is_kind else repr(value)))
        raise InputError(f"{owner and f'{owner}: '}{name} must be {setting.wanted}; given: {given}")
    return converted


def parsed(owner: str, name: str, setting: Setting, value: Any) -> Any:
    """Like `checked`, for a value that may be given as text."""
    if not isinstance(value, str) or setting.kind is str:
        return checked(owner, name, setting, value)
    read: Any = {bool: lambda text: {"true": True, "false": False}[text.lower()], int: int, float: float}[setting.kind]
    meant: Any = value
    with contextlib.suppress(ValueError, KeyError):
        meant = read(value)
    return checked(owner, name, setting, meant, shown=value)


def check_all(instance: Any, owner: str | None = None) -> None:
    """Check and convert all settings of a frozen dataclass, for its `__post_init__`."""
    of = type(instance).__name__ if owner is None else owner
    for name, setting in settings(type(instance)).items():
        value = unwrapped(getattr(instance, name))
        is_traced = hasattr(value, "aval") and value.shape == () and setting.kind is float
        object.__setattr__(instance, name, value if is_traced else checked(of, name, setting, value))


def whole_number(name: str, given: Any, least: int, most: int) -> int:
    """The number as Python's own; `InputError` unless it is a whole one within these bounds."""
    value = unwrapped(given)
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    require(fits, name, f"a whole number from {least} to {most:,}", value)
    return value


def unwrapped(value: Any) -> Any:
    """A scalar of NumPy or JAX as a Python number, if its value is known; anything else unchanged."""
    with contextlib.suppress(AttributeError, TypeError, NotImplementedError):
        return value.item() if value.shape == () else value
    return value


Instance = TypeVar("Instance")


def configure(cls: type[Instance], owner: str, values: Mapping[str, Any]) -> Instance:
    """An instance with the given values; unknown names are refused with the nearest known ones."""
    known = settings(cls)
    for name in values:
        if name not in known:
            raise InputError(f"{owner} has no setting {name!r}{nearest(name, known)}")
    return cls(**{name: parsed(owner, name, known[name], value) for name, value in values.items()})


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?', or a list of all names."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; choose from: {', '.join(names)}"
