"""The settings of an algorithm or a task, with their defaults and where these come from."""

from __future__ import annotations

from typing import NamedTuple

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.own_code import is_ours
from fedbilevel.registry import Entry
from fedbilevel.settings import Setting, settings
from fedbilevel.user_files import Scalar


class Explained(NamedTuple):
    """One setting, in words."""

    setting: str
    default: Scalar
    meaning: str
    must_be: str
    default_from: str
    tuned: str


def explained(name: str, entry: Entry) -> list[Explained]:
    """Every setting of the algorithm or task of that name."""
    cls = entry.load()
    ours = "" if not is_ours(cls) else "ours: converges on quadratic" if name in ALGORITHMS.bundled else "ours"
    rows = []
    for field, setting in settings(cls).items():
        source = setting.source or ours
        if field in entry.preset:
            source = f"fixed for {name}"
        elif field in {**entry.defaults, **entry.ours}:
            source = entry.paper if field in entry.defaults else "ours"
        default = {**entry.defaults, **entry.ours, **entry.preset}.get(field, getattr(cls, field))
        rows.append(Explained(field, default, setting.meaning, setting.wanted, source, _tuned(setting, field in entry.preset)))
    return rows


def _tuned(setting: Setting, preset: bool) -> str:
    """How `tune` treats a setting: its box, or the setting that it follows; nothing if it leaves it alone."""
    if preset or not (setting.decades or setting.tied_to):
        return ""
    return f"as {setting.tied_to}" if setting.tied_to else f"/ and * {10 ** (setting.decades / 2):g}"
