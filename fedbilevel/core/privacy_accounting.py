"""ε of releases, by the accountant of Google's dp-accounting: Rényi differential privacy with Poisson sampling.

Two data sets are neighbours if one of them lacks a row of f and a row of g that the other has: so ε covers a row that is in
both.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.core.privacy import CUT, RowPrivacy, rate
from fedbilevel.core.release_counts import Releases
from fedbilevel.errors import InputError

KEPT = 0.01  # the part of δ that is kept for draws that had to be cut
ROUNDING = 1e-12  # of the library's divergences
ORDERS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, *map(float, range(3, 65)), 80.0, 96.0, 128.0, 256.0, 512.0, 1024.0)


class Event(NamedTuple):
    """A noisy answer: the probability that a row is in it, and the noise in units of what the row can change."""

    rate: float
    noise: float


Events = Counter[Event]


def accounting() -> Any:
    """The library; `InputError` if it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise InputError("privacy needs dp-accounting: pip install 'fedbilevel[privacy]'") from None
    return dp_accounting


def events_of(releases: Releases, privacy: RowPrivacy, rows: Mapping[str, int], batch_size: int | None) -> Events:
    """The releases of a client that has so many rows of each level."""
    events: Events = Counter()
    for (level, times, derivatives), count in releases.items():
        wanted = batch_size * times if batch_size is not None and times else None
        events[Event(rate(rows[level], wanted), privacy.multiplier / math.sqrt(derivatives))] += count
    return events


def of_evaluations(privacy: RowPrivacy, count: int) -> Events:
    """So many evaluations of the metrics."""
    return Counter({Event(1.0, privacy.metric_noise): count})


def epsilon(events: Events, delta: float) -> float:
    """ε of all of these together at δ; infinite if there is no bound."""
    if not +events:
        return 0.0
    total = sum(count * _divergences(event) for event, count in (+events).items())
    found = float(accounting().rdp.compute_epsilon(ORDERS, total, (1 - KEPT) * delta)[0])
    cut = 2 * CUT * sum(count for event, count in events.items() if event.rate < 1)
    return found if (1 + math.exp(min(found, 700))) * cut <= KEPT * delta else math.inf


def calibrated_noise(target: float, delta: float, events: Callable[[float], Events]) -> float:
    """The least noise, to a thousandth, with which the ε of its events is at most the target; `InputError` if there is none."""
    library = accounting()
    try:
        with _quiet():
            noise = library.calibrate_dp_mechanism(
                lambda: library.rdp.RdpAccountant(ORDERS),
                lambda noise: composed(events(noise)),
                target,
                (1 - KEPT) * delta,
                library.LowerEndpointAndGuess(0.01, 1.0),
                tol=1e-3,
            )
    except library.mechanism_calibration.NoBracketIntervalFoundError:
        raise InputError(
            f"privacy: no noise makes this run ({target:g}, {delta:g})-private, since its metrics alone cost more: raise "
            "metric_noise, every or epsilon"
        ) from None
    if epsilon(events(noise), delta) > target:
        raise InputError(f"privacy: epsilon={target:g} is too large at delta={delta:g}: lower it")
    return float(noise)


def composed(events: Events) -> Any:
    """The events as the library has them."""
    library = accounting()
    return library.ComposedDpEvent([library.SelfComposedDpEvent(_one(event), count) for event, count in (+events).items()])


def _one(event: Event) -> Any:
    library = accounting()
    gaussian = library.GaussianDpEvent(event.noise)
    return gaussian if event.rate >= 1 else library.PoissonSampledDpEvent(event.rate, gaussian)


@functools.lru_cache(maxsize=1024)
def _divergences(event: Event) -> np.ndarray:
    """Upper bounds on the Rényi divergences of an event, which add up: the library would compute them anew for every sum.

    The library's are off by rounding, which makes small ones negative, and are not numbers where they overflow.
    """
    accountant = accounting().rdp.RdpAccountant(ORDERS)
    with _quiet():
        accountant.compose(_one(event))
    found = accountant.rdp
    return np.where(np.isnan(found), np.inf, np.maximum(found, 0) + ROUNDING)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """During the block, keep the library from saying which orders it leaves out."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
