"""The clients' data: flat arrays with every client's rows one after another, and how batches are drawn.

A simulated client never has its rows copied out: a minibatch is one gather of rows from the flat array.
A deployed client holds a population of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client_lists import check_rows, joined, one_per_client, shares_of
from fedbilevel.core.devices import require_memory
from fedbilevel.core.privacy import Draw, RowPrivacy, drawn, private
from fedbilevel.core.problem import Batch, FiveBatches, Problem, Ragged, Tree, flattened
from fedbilevel.core.randomness import bits, fold_in, permutation
from fedbilevel.core.traffic import product
from fedbilevel.errors import InputError, require
from fedbilevel.settings import checked, count, settings

MOST_ROWS = 10**8  # that a client may say it has: the server makes room for as many
SOME = 5  # rows: of two, the median is the mean
ORDERS = 2**31 - 1  # in a minibatch's place: no call draws so many


@partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "start", "size", "share", "upto"], meta_fields=["longest", "equal"]
)
@dataclass(frozen=True)
class Shards:
    """The rows of all clients; client m has `size[m]` of them from `start[m]` on."""

    rows: Tree
    start: Array
    size: Array
    longest: int
    equal: bool  # all sizes are the same
    share: Array | None = None  # of each row, where one client has all of them and they count unequally
    upto: Array | None = None  # then the shares of each row but the last and those before it, added up, in 2⁻³²

    @classmethod
    def stack(cls, per_client: Iterable[Tree], what: str = "data") -> Shards:
        """From one pytree of arrays per client; its arrays have a row per sample."""
        clients = [flattened(f"{what}: client {m}", tree) for m, tree in enumerate(one_per_client(what, per_client))]
        first, structure = clients[0]
        for m, (arrays, own) in enumerate(clients):
            if own != structure:
                raise InputError(f"{what}: client {m} has other arrays than client 0: give every client the same structure")
            check_rows(f"{what}: client {m}", arrays, like=first)
        sizes = [len(arrays[0]) for arrays, _ in clients]
        if sum(sizes) >= 2**31:
            raise InputError(f"{what} has {sum(sizes):,} rows, and fewer than 2³¹ can be numbered: give fewer")
        needed = sum(array.nbytes for arrays, _ in clients for array in arrays)
        require_memory(f"{what}: the clients' rows", needed, "give fewer")
        columns = zip(*(arrays for arrays, _ in clients), strict=True)
        rows = jax.tree.unflatten(structure, [joined(what, column) for column in columns])
        start = np.cumsum([0, *sizes[:-1]])
        return cls(rows, jnp.asarray(start, jnp.int32), jnp.asarray(sizes, jnp.int32), max(sizes), len(set(sizes)) == 1)

    def at(self, m: Array, positions: Array) -> Tree:
        """Client m's rows at these positions, all below `size[m]`."""
        return jax.tree.map(lambda a: a.at[self.start[m] + positions].get(mode="promise_in_bounds"), self.rows)

    def row_bytes(self) -> int:
        """The bytes of one row."""
        return sum(a.nbytes // len(a) for a in jax.tree.leaves(self.rows))

    def some(self) -> Tree:
        """A few rows of the client that has most, from its first to its last."""
        positions = np.linspace(0, self.longest - 1, SOME)
        return self.at(jnp.int32(np.argmax(self.size)), jnp.asarray(positions, jnp.int32))

    def whole(self, m: Array) -> Tree:
        """All rows of client m."""
        if self.share is not None:
            return Ragged(self.rows, self.share)
        position = jnp.arange(self.longest, dtype=jnp.int32)
        rows = self.at(m, jnp.minimum(position, self.size[m] - 1))
        return rows if self.equal else Ragged(rows, (position < self.size[m]).astype(float) / self.size[m])

    def positions(self, m: Array, words: Array) -> Array:
        """A row of client m for each 32 random bits, as likely as its share is large.

        Where all shares are equal it is the high word of the bits times the number of rows (Lemire, 2019), which compiles
        much faster than `jax.random.randint`.
        """
        drawn = product(words, self.size[m])[0] if self.upto is None else jnp.searchsorted(self.upto, words, side="right")
        return drawn.astype(jnp.int32)

    def pooled(self, weights: Array | None) -> Shards:
        """One client that holds all rows: client m's count w_m together, or each row the same where no weights are given."""
        size = np.asarray(self.size)
        total = int(size.sum())
        pool = Shards(self.rows, jnp.zeros(1, jnp.int32), jnp.full(1, total, jnp.int32), total, True)
        if weights is None:
            return pool
        share = np.repeat(np.asarray(weights, float) / size, size)
        upto = np.minimum(np.cumsum(share)[:-1] / share.sum() * 2**32, 2**32 - 1)
        return dataclasses.replace(pool, share=jnp.asarray(share), upto=jnp.asarray(upto.astype(np.uint32)))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["upper", "lower", "weights", "test", "own_x"],
    meta_fields=["problem", "batch_size", "equal_weights", "privacy"],
)
@dataclass(frozen=True)
class Population:
    """All clients: their losses, their data, their weights (which sum to 1) and their minibatch size.

    `test` has the rows that they hold out of both losses, if there are any. With `privacy` client functions see their rows
    through noise alone, and minibatches are drawn as that requires. `own_x` is where x starts at every client if each has one
    of its own, which it keeps to itself.
    """

    problem: Problem
    upper: Shards
    lower: Shards
    weights: Array
    batch_size: int | None = count(None, "rows in a minibatch; None: all of the client's", bits=27)  # ten draws below 2³¹
    equal_weights: bool = False  # known to be so; where it is not, any weights are right. Replace both together
    test: Shards | None = None
    privacy: RowPrivacy | None = None
    own_x: Array | None = None

    @classmethod
    def build(
        cls,
        problem: Problem,
        upper: Iterable[Tree],
        lower: Iterable[Tree],
        weights: Iterable[float] | None = None,
        batch_size: int | None = None,
        test: Iterable[Tree] | None = None,
        own_x: Array | None = None,
    ) -> Population:
        """From lists with one entry per client; weights default to equal ones."""
        require(isinstance(problem, Problem), "problem", "a Problem", problem)
        lower, upper = one_per_client("lower", lower), one_per_client("upper", upper)
        if len(upper) != len(lower):
            raise InputError(f"upper has {len(upper)} clients and lower {len(lower)}: give both for every client")
        shares = shares_of(np.ones(len(lower)) if weights is None else weights, len(lower))
        batch_size = checked("", "batch_size", settings(cls)["batch_size"], batch_size)
        lower_rows, upper_rows = Shards.stack(lower, "lower"), Shards.stack(upper, "upper")
        held_out = None if test is None else Shards.stack(one_per_client("test", test), "test")
        if held_out is not None and len(held_out.size) != len(lower):
            raise InputError(f"test has {len(held_out.size)} clients and lower {len(lower)}: give both for every client")
        return cls(
            problem, upper_rows, lower_rows, shares, batch_size, bool((shares == shares[0]).all()), held_out, own_x=own_x
        )

    def weighted(self, weights: str, rows: Sequence[int] | None = None) -> Population:
        """The same clients with other weights: "equal", "rows" for their numbers of rows, or numbers separated by commas.

        The numbers of rows are those of both losses together, unless others are given.
        """
        if weights == "rows":
            own = np.asarray(self.upper.size) + np.asarray(self.lower.size)
            given: Any = own if rows is None else list(rows)
        else:
            given = np.ones(self.size) if weights == "equal" else [float(w) for w in weights.split(",")]
        shares = shares_of(given, self.size)
        return dataclasses.replace(self, weights=shares, equal_weights=bool((shares == shares[0]).all()))

    @property
    def size(self) -> int:
        """The number of clients, M."""
        return len(self.weights)

    def client(self, m: Array | int, key: Array) -> Client:
        """Client m with the randomness of one call."""
        return Client(self, jnp.asarray(m), key, self.weights[m] * self.size, jnp.asarray(m))

    def whole(self, m: Array | int) -> Batch:
        """All rows of client m."""
        m = jnp.asarray(m)
        return Batch(self.upper.whole(m), self.lower.whole(m))

    def alone(self, key: Array, weight: Array, number: Array) -> Client:
        """The one client of this population, which is client `number` of a federation in which it has that weight."""
        return Client(self, jnp.asarray(0), key, weight, number)

    def only(self, m: int) -> Population:
        """Client m alone, with no other's rows: what its own site holds."""

        def rows(shards: Shards) -> list[Tree]:
            start, size = int(shards.start[m]), int(shards.size[m])
            return [jax.tree.map(lambda a: np.asarray(a[start : start + size]), shards.rows)]

        test = None if self.test is None else rows(self.test)
        lower, upper = rows(self.lower), rows(self.upper)
        own = Population.build(self.problem, upper, lower, None, self.batch_size, test, self.own_x)
        return dataclasses.replace(own, privacy=self.privacy)

    def some_rows(self) -> Batch:
        """A few rows of one client for each loss, to look at shapes and numbers."""
        return Batch(self.upper.some(), self.lower.some())

    def pooled(self) -> Population:
        """One client that holds all rows: client m's count w_m together, but where weights are equal each row the same."""
        weights = None if self.equal_weights else self.weights
        return Population(
            self.problem, self.upper.pooled(weights), self.lower.pooled(weights), jnp.ones(1), self.batch_size, True
        )


@dataclass(frozen=True)
class Client:
    """What a client function is given: its own losses, data, weight and randomness."""

    _population: Population
    _m: Array
    _key: Array
    weight: Array  # M w_m: 1 where all clients weigh the same
    number: Array  # m: which of the federation's clients it is

    @property
    def problem(self) -> Problem:
        """The losses and their derivatives."""
        of, privacy = self._population.problem, self._population.privacy
        return of if privacy is None else cast(Problem, private(of, privacy))

    @property
    def own_x(self) -> Array:
        """Where its own x starts."""
        assert self._population.own_x is not None
        return self._population.own_x

    @property
    def rows(self) -> tuple[Array, Array]:
        """How many rows it has for f, and for g."""
        return self._population.upper.size[self._m], self._population.lower.size[self._m]

    def batch(self, k: Array | int = 0, times: int = 1) -> Batch:
        """The k-th minibatch of this call, `times` as large as usual."""
        return self._draw(1, k, times)[0]

    def five_batches(self, k: Array | int = 0, times: int = 1, shared: bool = False) -> FiveBatches:
        """The minibatches of the k-th `Problem.direction` of this call: independent, or one for all."""
        return FiveBatches(*self._draw(1, k, times) * 5) if shared else FiveBatches(*self._draw(5, k, times))

    def order(self, n: int, k: Array | int = 0) -> Array:
        """The k-th random order of 0..n-1 of this call, independent of its minibatches."""
        return permutation(fold_in(fold_in(self._key, ORDERS), k), n)

    def whole(self) -> Batch:
        """All of the client's rows."""
        return self._population.whole(self._m) if self._population.privacy is None else self._private(0, 0, None)

    def _draw(self, batches: int, k: Array | int, times: int) -> list[Batch]:
        """Independent minibatches of rows drawn with replacement, their random bits in one call for all of them."""
        p, m = self._population, self._m
        if p.privacy is not None:
            return [self._private(j, k, None if p.batch_size is None else p.batch_size * times) for j in range(batches)]
        if p.batch_size is None:
            return [self.whole()] * batches
        words = bits(fold_in(self._key, k), (batches, 2, p.batch_size * times))
        upper, lower = p.upper.positions(m, words[:, 0]), p.lower.positions(m, words[:, 1])
        return [Batch(p.upper.at(m, u), p.lower.at(m, v)) for u, v in zip(upper, lower, strict=True)]

    def _private(self, j: int, k: Array | int, wanted: int | None) -> Batch:
        """The j-th of the k-th minibatches of so many rows on average, or of all rows: each row is in it or not on its own."""
        key = fold_in(fold_in(self._key, k), wanted or 0)

        def draw(shards: Shards, place: int) -> Draw:
            positions, there, expected, noise = drawn(fold_in(key, place), shards.size[self._m], shards.longest, wanted)
            return Draw(shards.at(self._m, positions), there, expected, noise)

        return Batch(draw(self._population.upper, 2 * j), draw(self._population.lower, 2 * j + 1))
