"""Who holds what: ways to deal the samples of a data set to clients.

Every way is a pure function of the labels, the number of clients and a seed, and gives each client the positions of
its samples: each sample goes to exactly one client. A way is named by a short text such as `dirichlet:0.3`.
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
    return np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)


def shards(labels: np.ndarray, clients: int, seed: int, per_client: int) -> Parts:
    """Sorted by label and cut into equal shards, of which every client gets `per_client` (McMahan et al., 2017)."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    cut = np.array_split(order[np.argsort(labels[order], kind="stable")], clients * per_client)
    dealt = rng.permutation(clients * per_client).reshape(clients, per_client)
    return [np.concatenate([cut[s] for s in hand]) for hand in dealt]


def classes(labels: np.ndarray, clients: int, seed: int, per_client: int) -> Parts:
    """Every client holds `per_client` random classes; the holders of a class share its samples equally."""
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
    names = np.unique(labels)
    if clients < len(names):
        raise InputError(f"one class per client, {clients} clients and {len(names)} classes: every class must have a holder")
    holders = {name: list(range(c, clients, len(names))) for c, name in enumerate(names)}
    return _dealt(labels, clients, np.random.default_rng(seed), holders)


def dirichlet(labels: np.ndarray, clients: int, seed: int, alpha: float, least: int = 1) -> Parts:
    """The clients' shares of every class are drawn from Dirichlet(alpha, ..., alpha) (Hsu et al., 2019).

    A client with fewer than `least` samples is given some of the client who then has most.
    """
    if clients * least > len(labels):
        raise InputError(f"{len(labels)} samples are too few for {clients} clients with at least {least} each")
    rng = np.random.default_rng(seed)
    hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for name in np.unique(labels):
        samples = rng.permutation(np.flatnonzero(labels == name))
        ends = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1]
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
        raise InputError(f"{len(names)} groups are too few for {clients} clients: each must get at least one")
    return [np.flatnonzero(np.isin(group, hand)) for hand in np.array_split(names, clients)]


def long_tail(labels: np.ndarray, most: int, ratio: float, seed: int) -> np.ndarray:
    """The samples that stay when class c of C keeps at most ⌈most · ratio^(c / (C - 1))⌉ of its own."""
    rng = np.random.default_rng(seed)
    names = np.unique(labels)
    mu = ratio ** (1 / max(len(names) - 1, 1))
    kept = [
        rng.permutation(np.flatnonzero(labels == name))[: int(np.ceil(most * mu**c))] for c, name in enumerate(names.tolist())
    ]
    return np.sort(np.concatenate(kept))


def _dealt(labels: np.ndarray, clients: int, rng: np.random.Generator, holders: dict[Any, list[int]]) -> Parts:
    """Every class cut equally among its holders."""
    hands: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(clients)]
    for name, members in holders.items():
        samples = rng.permutation(np.flatnonzero(labels == name))
        for m, part in zip(members, np.array_split(samples, len(members)), strict=True):
            hands[m].append(part)
    return [np.concatenate(hand) for hand in hands]


def deal(way: str, labels: np.ndarray, clients: int, seed: int) -> Parts:
    """The samples dealt in the way of that name."""
    function, argument = _parsed(way)
    return function(labels, clients, seed, *argument)


WAYS = "iid, one-class, shards:S (S per client), classes:K (K per client) or dirichlet:ALPHA"


def way(default: str, meaning: str) -> Any:
    """A knob that names a way to deal."""
    return text(default, meaning, WAYS, lambda value: bool(_parsed(value)))


def _parsed(way: str) -> tuple[Callable[..., Parts], list[Any]]:
    name, colon, value = way.partition(":")
    plain = {"iid": iid, "one-class": one_class}
    with_count, with_number = {"shards": shards, "classes": classes}, {"dirichlet": dirichlet}
    if name in plain and not colon:
        return plain[name], []
    if name in with_count and int(value) >= 1:
        return with_count[name], [int(value)]
    if name in with_number and 0 < float(value) < np.inf:
        return with_number[name], [float(value)]
    raise ValueError(way)
