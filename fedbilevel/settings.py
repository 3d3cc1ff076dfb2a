"""Named, typed, bounded numbers: the hyperparameters of algorithms and the knobs of tasks.

Both are frozen dataclasses whose fields are made here, so that a value from Python, from `--set` or from a
stored configuration is checked in one place.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from fedbilevel.errors import InputError


class Setting(NamedTuple):
    """What is known about a field."""

    kind: type
    meaning: str
    source: str  # where the default comes from
    wanted: str
    fits: Callable[[Any], bool]


def real(
    default: float,
    meaning: str,
    *,
    source: str = "",
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A number within bounds."""
    limits = [
        (above, "above", lambda v: v > above),
        (least, "at least", lambda v: v >= least),
        (most, "at most", lambda v: v <= most),
    ]
    given = [(f"{word} {bound:g}", fits) for bound, word, fits in limits if bound is not None]
    wanted = "a number " + " and ".join(words for words, _ in given)
    return _field(default, Setting(float, meaning, source, wanted.strip(), lambda v: all(fits(v) for _, fits in given)))


def step_size(default: float, meaning: str, *, source: str = "") -> Any:
    """A number above 0."""
    return real(default, meaning, source=source, above=0)


def count(default: int, meaning: str, *, source: str = "", least: int = 1) -> Any:
    """A whole number of at least `least`, and below 2³¹."""
    fits = lambda v: least <= v < 2**31  # noqa: E731
    return _field(default, Setting(int, meaning, source, f"a whole number of at least {least} (and below 2³¹)", fits))


def flag(default: bool, meaning: str, *, source: str = "") -> Any:
    """On or off."""
    return _field(default, Setting(bool, meaning, source, "true or false", lambda v: True))


def choice(default: str, meaning: str, options: Iterable[str], *, source: str = "") -> Any:
    """One of some names."""
    names = tuple(options)
    return _field(default, Setting(str, meaning, source, "one of " + ", ".join(names), lambda v: v in names))


def text(default: str, meaning: str, wanted: str, fits: Callable[[str], bool], *, source: str = "") -> Any:
    """A text of a certain form; `fits` may raise `ValueError` for one that is not."""
    return _field(default, Setting(str, meaning, source, wanted, fits))


def _field(default: Any, setting: Setting) -> Any:
    return dataclasses.field(default=default, metadata={"setting": setting})


def settings(cls: type) -> dict[str, Setting]:
    """The settings of a class, by field name."""
    return {field.name: field.metadata["setting"] for field in dataclasses.fields(cls) if "setting" in field.metadata}


def checked(owner: str, name: str, setting: Setting, value: Any) -> Any:
    """The value, from Python or from text, in the setting's own type; `InputError` if it does not fit."""
    try:
        if setting.kind is bool:
            parsed: Any = {"true": True, "false": False}[str(value).lower()]
        elif setting.kind is int:
            parsed = int(str(value))
        elif setting.kind is float:
            parsed = float(value)
        else:
            parsed = str(value)
        fits = (setting.kind is not float or math.isfinite(parsed)) and setting.fits(parsed)
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise InputError(f"{owner}: {name} must be {setting.wanted}; given: {value}")
    return parsed


def check_all(instance: Any) -> None:
    """Check and convert all settings of a frozen dataclass, as its `__post_init__`."""
    for name, setting in settings(type(instance)).items():
        value = getattr(instance, name)
        if not hasattr(value, "aval"):  # arrays of JAX pass: they are traced, or many values at once
            object.__setattr__(instance, name, checked(type(instance).__name__, name, setting, value))


Instance = TypeVar("Instance")


def configure(cls: type[Instance], owner: str, values: Mapping[str, Any]) -> Instance:
    """An instance with the given values; unknown names are refused with the nearest known ones."""
    known = settings(cls)
    for name in values:
        if name not in known:
            raise InputError(f"{owner} has no setting {name!r}{nearest(name, known)}")
    return cls(**{name: checked(owner, name, known[name], value) for name, value in values.items()})


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?', or what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are: {', '.join(names)}"
