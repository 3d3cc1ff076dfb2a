"""Boxes: the ranges that hyperparameters are searched in, uniformly in their logarithms.

Hyperparameters that are tied share one box, under a name such as "gamma_x+eta_x".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import InputError, require
from fedbilevel.own_code import label
from fedbilevel.registry import find
from fedbilevel.runs.configuration import Configuration
from fedbilevel.settings import Setting, nearest, parsed, settings

Boxes = Mapping[str, Sequence[float]]  # name -> its lowest and its highest value
EDGE = 0.05  # of a box's width in logarithms: a value this close to an end may be better beyond it


def boxes_of(configuration: Configuration, fixed: Collection[str], given: Mapping[str, Sequence[Any]]) -> Boxes:
    """The boxes that are given, and for other steps that are not fixed those around the values of a configuration."""
    known = settings(find(ALGORITHMS, "algorithm", configuration.algorithm).load())
    owner, preset = label(configuration.algorithm), find(ALGORITHMS, "algorithm", configuration.algorithm).preset
    for name in given:
        if name not in known:
            raise InputError(f"{owner} has no hyperparameter {name!r}{nearest(name, known)}")
        if known[name].kind is not float:
            raise InputError(f"{owner}: {name} cannot have a box, since it is not a real number: sweep it instead")
        if name in fixed or name in preset:
            raise InputError(f"{owner}: {name} has a box and a value: leave one out")
    taken = {*fixed, *given, *preset}
    boxes: dict[str, Sequence[float]] = {}
    for name, setting in known.items():
        tied = "+".join([name, *(other for other, its in known.items() if its.tied_to == name and other not in taken)])
        if name in given:
            boxes[tied] = _checked(owner, name, setting, given[name])
        elif setting.decades and name not in taken:
            value = float(configuration.hyperparameters[name])  # type: ignore[arg-type]
            boxes[tied] = [reach(setting, value, sign * setting.decades / 2) for sign in (-1, 1)]
    return boxes


def require_box(name: str, ends: Sequence[float]) -> None:
    """Raise `InputError` unless these are the ends of a box."""
    fits = len(ends) == 2 and 0 < ends[0] < ends[1] < math.inf
    require(fits, f"the box of {name}", "two finite numbers, 0 < low < high", list(ends))


def _checked(owner: str, name: str, setting: Setting, given: Sequence[Any]) -> list[float]:
    several = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)
    if several and len(given) == 2:
        low, high = (parsed(owner, name, setting, end) for end in given)
        if 0 < low < high:
            return [low, high]
    ends = ":".join(map(str, given)) if several else repr(given)
    raise InputError(f"{owner}: the box of {name} must be LOW:HIGH with 0 < LOW < HIGH; given: {ends}")


def reach(setting: Setting, value: float, powers: float) -> float:
    """The value times ten to these powers, or as far in that direction as it may go."""
    for halvings in range(10):
        reached = value * 10.0 ** (powers / 2**halvings)
        if setting.fits(reached):
            return reached
    return value


def drawn(boxes: Boxes, count: int, seed: int) -> list[dict[str, float]]:
    """Candidates that fill the boxes evenly: a Latin hypercube in logarithms."""
    rng = np.random.default_rng(seed)
    places = {name: (rng.permutation(count) + rng.random(count)) / count for name in boxes}
    return [{name: _short(low * (high / low) ** places[name][k]) for name, (low, high) in boxes.items()} for k in range(count)]


def around(boxes: Boxes, center: Mapping[str, float], algorithm: str, share: float = 0.5) -> Boxes:
    """Boxes of a share of the width, in logarithms, around a center: near an end they reach beyond the old ones.

    A box that rounding would leave without width stays as it is.
    """
    known = settings(find(ALGORITHMS, "algorithm", algorithm).load())
    nearer = {}
    for name, (low, high) in boxes.items():
        half, setting = (high / low) ** (share / 2), known[name.split("+")[0]]
        ends = zip((center[name] / half, center[name] * half), (low, high), strict=True)
        new_low, new_high = (new if setting.fits(new) else old for new, old in ends)
        nearer[name] = [new_low, new_high] if 0 < new_low < new_high else [low, high]
    return nearer


def at_edges(searched: Sequence[Boxes], values: Mapping[str, float]) -> list[str]:
    """The names whose value is at an end of all that was searched."""
    found = []
    for name, value in values.items():
        low, high = min(boxes[name][0] for boxes in searched), max(boxes[name][1] for boxes in searched)
        place = math.log(value / low) / math.log(high / low)
        if not EDGE < place < 1 - EDGE:
            found.append(name)
    return found


def _short(value: float) -> float:
    return float(f"{value:.4g}")
