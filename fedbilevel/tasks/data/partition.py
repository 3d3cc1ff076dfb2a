"""Who holds what: ways to deal the samples of a data set to clients.

Every way is a pure function of the labels, the number of clients and a seed, and gives each client the positions of
its samples: each sample goes to exactly one client, and each client gets some; anything else is refused. A way is
named by a short text such as `dirichlet:0.3`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedbilevel.errors import InputError
from fedbilevel.settings import text

Parts = list[np.ndarray]


def iid(labels: np.ndarray, clients: int, seed: int) -> Parts:
    """Equal parts at random."""
    _check_enough(labels, clients)
    return np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)


def shards(labels: np.ndarray, clients: int, seed: int, per_client: int) -> Parts:
    """Sorted by label and cut into equal shards, of which every client gets `per_client` (McMahan et al., 2017)."""
    _check_enough(labels, clients, per_client)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    cut = np.array_split(order[np.argsort(labels[order], kind="stable")], clients * per_client)
    dealt = rng.permutation(clients * per_client).reshape(clients, per_client)
    return [np.concatenate([cut[s] for s in hand]) for hand in dealt]


def classes(labels: np.ndarray, clients: int, seed: int, per_client: int) -> Parts:
    """Every client holds `per_client` random classes; the holders of a class share its samples equally."""
    _check_enough(labels, clients)
    rng = np.random.default_rng(seed)
    names = np.unique(labels)
    if not per_client <= len(names) <= clients * per_client:
        raise InputError(
            f"{per_client} of {len(names)} classes for each of {clients} clients: a client must hold at least one class, "
            "at most all of them, and every class must have a holder"
        )
    seats = np.full(len(names), clients * per_client // len(names))
    seats[rng.permutation(len(names))[: clients * per_client % len(names)]] += 1
    holders: list[list[int]] = [[] for _ in names]
    for m in range(clients):
        for c in np.lexsort((rng.random(len(names)), -seats))[:per_client]:  # those with most seats left, ties at random
            seats[c] -= 1
            holders[c].append(m)
    return _dealt(labels, clients, rng, dict(zip(names, holders, strict=True)))


def one_class(labels: np.ndarray, clients: int, seed: int) -> Parts:
    """Client m holds only the m-th class; with more clients than classes, they start over and share."""
    _check_enough(labels, clients)
    names = np.unique(labels)
    if clients < len(names):
        raise InputError(f"one class per client, {clients} clients and {len(names)} classes: every class must have a holder")
    holders = {name: list(range(c, clients, len(names))) for c, name in enumerate(names)}
    return _dealt(labels, clients, np.random.default_rng(seed), holders)


def dirichlet(labels: np.ndarray, clients: int, seed: int, alpha: float, least: int = 2) -> Parts:
    """The clients' shares of every class are drawn from Dirichlet(alpha, ..., alpha) (Hsu et al., 2019).

    A client with fewer than `least` samples is given some from the client that has most at that point.
    """
    _check_enough(labels, clients, least)
    rng = np.random.default_rng(seed)
    hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for name in np.unique(labels):
        samples = rng.permutation(np.flatnonzero(labels == name))
        ends = np.cumsum(rng.dirichlet(np.full(clients, min(alpha, 1e9))))[:-1]  # equal shares by then; much larger values fail
        for hand, part in zip(hands, np.split(samples, np.round(ends * len(samples)).astype(int)), strict=True):
            hand.append(part)
    parts = [rng.permutation(np.concatenate(hand)) for hand in hands]
    sizes = np.array([len(part) for part in parts])
    while sizes.min() < least:  # each turn settles the giver or the taker for good
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        given = min(least - sizes[poor], sizes[rich] - least)
        parts[poor] = np.concatenate([parts[poor], parts[rich][-given:]])
        parts[rich] = parts[rich][:-given]
        sizes[poor], sizes[rich] = sizes[poor] + given, sizes[rich] - given
    return parts


def groups(group: np.ndarray, clients: int, seed: int) -> Parts:
    """Whole groups, such as alphabets: every client gets an equal number of them, or one more."""
    names = np.random.default_rng(seed).permutation(np.unique(group))
    if len(names) < clients:
        raise InputError(
            f"{len(names)} groups are too few for {clients} clients, who need one each: lower the number of clients"
        )
    return [np.flatnonzero(np.isin(group, hand)) for hand in np.array_split(names, clients)]


def long_tail(labels: np.ndarray, most: int, ratio: float, seed: int) -> np.ndarray:
    """The samples that stay when class c of C keeps at most ⌈most · ratio^(c / (C - 1))⌉ of its own."""
    rng = np.random.default_rng(seed)
    names = np.unique(labels)
    mu = ratio ** (1 / max(len(names) - 1, 1))
    kept = [
        rng.permutation(np.flatnonzero(labels == name))[: int(np.ceil(most * mu**c))] for c, name in enumerate(names.tolist())
    ]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *kept]))


def _check_enough(labels: np.ndarray, clients: int, each: int = 1) -> None:
    if clients * each > len(labels):
        raise InputError(
            f"{len(labels)} samples are too few for {clients} clients with at least {each} each: lower one of the two"
        )


def _dealt(labels: np.ndarray, clients: int, rng: np.random.Generator, holders: dict[Any, list[int]]) -> Parts:
    """Every class cut equally among its holders."""
    hands: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(clients)]
    for name, members in holders.items():
        samples = rng.permutation(np.flatnonzero(labels == name))
        for m, part in zip(members, np.array_split(samples, len(members)), strict=True):
            hands[m].append(part)
    parts = [np.concatenate(hand) for hand in hands]
    for m, part in enumerate(parts):
        if not len(part):
            raise InputError(
                f"client {m} of {clients} gets no sample, as too many clients share its classes: lower the number of clients"
            )
    return parts


def deal(way: str, labels: np.ndarray, clients: int, seed: int) -> Parts:
    """The samples, dealt in the named way; errors name it too."""
    function, arguments = _parsed(way)
    try:
        return function(labels, clients, seed, *arguments)
    except InputError as error:
        raise InputError(f"partition {way}: {error}") from None


WAYS = (
    "iid, one-class, shards:S (S per client), classes:K (K per client) or dirichlet:ALPHA[:LEAST] "
    "(a client has at least LEAST samples, 2 by default)"
)


def way(default: str, meaning: str) -> Any:
    """A knob that names a way to deal."""
    return text(default, meaning, WAYS, lambda value: bool(_parsed(value)))


def _parsed(way: str) -> tuple[Callable[..., Parts], list[Any]]:
    """The function of a way and its further arguments; `ValueError` if there is no such way."""
    match way.split(":"):
        case ["iid"]:
            return iid, []
        case ["one-class"]:
            return one_class, []
        case ["shards", per_client] if int(per_client) >= 1:
            return shards, [int(per_client)]
        case ["classes", per_client] if int(per_client) >= 1:
            return classes, [int(per_client)]
        case ["dirichlet", alpha, *least] if len(least) < 2 and 0 < float(alpha) < np.inf and all(int(n) >= 1 for n in least):
            return dirichlet, [float(alpha), *map(int, least)]
    raise ValueError(way)
