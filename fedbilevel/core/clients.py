"""What an algorithm may ask of its clients: the one interface that both engines implement.

Communication happens where `mean`, `unbiased_mean`, `gather` or `scatter` is written and where a value
of the server's is an argument, and nowhere else: so the engines can count it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.core.population import Client
from fedbilevel.core.problem import Tree
from fedbilevel.core.sets import Sets
from fedbilevel.errors import require
from fedbilevel.settings import REQUIRED, Setting, checked, count

__all__ = ["Client", "Clients", "Cohort", "PerClient", "at_client", "is_client_function", "iterate", "server_floats"]

Function = TypeVar("Function", bound=Callable[..., Any])
TURNS: Setting = count(REQUIRED, "turns of a loop", least=0).metadata["setting"]


def at_client(method: Function) -> Function:
    """Mark a method `(self, client, *args)` of an algorithm as one that runs at a client.

    Only such methods can be called over a network.
    """
    require(callable(method), "at_client", "on a method of an algorithm", method)
    method.__at_client__ = True  # type: ignore[attr-defined]
    return method


def is_client_function(method: object) -> bool:
    """Whether `at_client` marked it."""
    return getattr(method, "__at_client__", False)


def iterate(n: Array | int, body: Callable[[Any, Tree], Tree], value: Tree) -> Tree:
    """`body(k, value)` for k = 0..n-1, at a client.

    A single step needs no loop: all clients then still share the server's values, and in simulation their
    matrix products merge into one.
    """
    require(callable(body), "iterate: body", "a function (k, value) -> value", body)
    if not (isinstance(n, Array) and jnp.issubdtype(n.dtype, jnp.integer)):  # which may not be known yet
        n = checked("iterate", "n", TURNS, n)
    return body(0, value) if isinstance(n, int) and n == 1 else lax.fori_loop(0, n, body, value)


class PerClient(abc.ABC):
    """A value that each client of a cohort holds; the server cannot look inside."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> PerClient:
        """The index-th part of a tuple that each client holds."""


class Cohort(abc.ABC):
    """S, the clients that take part in one communication round."""

    @property
    @abc.abstractmethod
    def active(self) -> Array:
        """For each member whether it takes part: it was asked for and has not dropped out."""

    @abc.abstractmethod
    def map(self, function: Callable[..., Tree], *args: Tree) -> PerClient:
        """function(client, *args) at each client of S, left there."""

    @abc.abstractmethod
    def mean(self, function: Callable[..., Tree], *args: Tree, around: Tree = None) -> Tree:
        """Σ_m w_m h_m over the federation as estimated at the server from S, where h_i = function(client i, *args).

        With equal weights it is the average of the h_i. Otherwise it is z + Σ_{i∈S} (M / |S|) w_i (h_i - z), where z is
        `around`, or 0. Given how many there are in S, be it chosen or left by chance and absences, every client is as likely
        as any other to be among them: so the expectation is Σ_m w_m h_m, whatever z that S does not decide. The nearer z is
        to the answers the less is random: for iterates give the point that they started from, for directions nothing. A
        client's increment counts up to M max w_m / |S| times: step sizes must allow for that.
        """

    @abc.abstractmethod
    def mean_and_drift(self, function: Callable[..., Tree], *args: Tree, around: Tree) -> tuple[Tree, Array]:
        """The `mean`, and how far the clients of S are apart: √(Σ_{i∈S} w_i |h_i - h|² / Σ_{i∈S} w_i), h their own average.

        It is NaN where the run's aggregation hides single answers from the server.
        """

    @abc.abstractmethod
    def unbiased_mean(self, function: Callable[..., Tree], *args: Tree, around: Tree = None) -> Tree:
        """The `mean` with the factors (M / |S|) w_i for equal weights too, as some papers write it.

        Then they are 1 / |S| up to rounding. The two are not one function, since the last bits of trajectories would change.
        """

    @abc.abstractmethod
    def gather(self, function: Callable[..., Tree], *args: Tree, otherwise: Tree = None) -> Tree:
        """The rows h_i at the server; where a member is not active, the row of `otherwise` (zeros if none)."""

    @abc.abstractmethod
    def scatter(self, rows: Tree) -> PerClient:
        """One row to each client of S."""

    @abc.abstractmethod
    def take(self, everyone: PerClient) -> PerClient:
        """S's part of a value that every client of the federation holds."""

    @abc.abstractmethod
    def put(self, everyone: PerClient, part: PerClient) -> PerClient:
        """That value with S's part replaced."""


class Clients(abc.ABC):
    """All clients of a federation, as its server sees them."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of members of a drawn cohort, n (at most, where it is random)."""

    @property
    @abc.abstractmethod
    def sets(self) -> Sets:
        """X and Y, which the server projects on."""

    @abc.abstractmethod
    def draw(self, active: Array | None = None) -> Cohort:
        """A fresh random cohort, in random order; where `active` is false its member is left alone."""

    @abc.abstractmethod
    def everyone(self) -> Cohort:
        """All M clients, in their own order."""

    @abc.abstractmethod
    def loop(self, n: Array | int, body: Callable[[Any, Tree], Tree], value: Tree) -> Tree:
        """`body(k, value)` for k = 0..n-1; `body` may communicate."""

    @abc.abstractmethod
    def report(self, **numbers: Array | float) -> None:
        """Named numbers about this step for the run's metrics; the names are among the algorithm's `reports`."""


def squared_distance(a: Tree, b: Tree) -> Array:
    """|a - b|², over all arrays of two trees."""
    return sum((jnp.sum((p - q) ** 2) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)), jnp.zeros(()))


def recentred(total: Tree, share: Array | float | None, around: Tree) -> Tree:
    """z + Σ a_i (h_i - z) from Σ a_i h_i and Σ a_i (None: 1, so that z does not matter), where z is `around`, or 0 if None."""
    if share is None or around is None:
        return total
    return jax.tree.map(lambda h, z: h + jnp.asarray(1 - share, h.dtype) * z, total, around)


def server_floats(state: Tree) -> list[tuple[str, Array]]:
    """The real numbers in a state that the server holds, with their names."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, PerClient))
    named = [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves if not isinstance(leaf, PerClient)]
    return [(name, leaf) for name, leaf in named if jnp.issubdtype(leaf.dtype, jnp.floating)]
