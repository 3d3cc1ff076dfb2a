"""How the answers of a cohort become one value at the server: a run has one rule, and both engines apply it.

`Cohort.mean` and its variants go through it for every algorithm; `gather`, which hands single answers to the server, does not.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform, final

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel import own_code
from fedbilevel.core.clients import recentred
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError, require
from fedbilevel.settings import check_all, settings

ENCODING, COMBINING, ATTACKING = (2**31 - 1 - k for k in range(3))  # randomness beside that of calls: none has such a number


class Aggregation(abc.ABC):
    """A rule. Its fields are settings; two rules with equal settings are equal."""

    streams: ClassVar[bool] = False  # whether it is the weighted sum, which engines add up in parts and in their own order
    weighs: ClassVar[bool] = False  # whether clients may weigh differently
    hides: ClassVar[bool] = False  # whether the server learns a sum of what clients send, and nothing else
    scales: ClassVar[bool] = False  # whether clients multiply their changes by M w_m themselves, where weights differ
    server_adds_noise: ClassVar[bool] = False  # whether the server makes nothing of what clients send but noisy means
    clients_add_noise: ClassVar[bool] = False  # whether clients add noise to what they send
    buffers: ClassVar[bool] = False  # whether an exchange goes on without late answers, which count in a later one
    encodes: ClassVar[bool] = False  # whether clients send something other than their answers, and remember what that left out

    def __post_init__(self) -> None:
        check_all(self)

    @property
    def only_means(self) -> bool:
        """Whether nothing but means may be made of single answers."""
        return self.hides or self.server_adds_noise

    def settings(self) -> dict[str, Any]:
        """Its settings, by name; without those that have no value."""
        return {name: value for name in settings(type(self)) if (value := getattr(self, name)) is not None}

    def require(self, population: Population, participation: Participation) -> None:
        """Raise `InputError` unless the rule can be used with these clients."""
        if not self.weighs and not population.equal_weights:
            raise InputError(
                f"{type(self).__name__} counts every client the same, but the task's clients weigh differently: choose mean"
            )

    def require_algorithm(self, algorithm: str, single_answers: bool, late_answers: bool) -> None:
        """Raise `InputError` unless the rule suits an algorithm whose server may need single answers, or bear late ones."""
        if self.only_means and single_answers:
            raise InputError(f"{algorithm} needs single answers, which {type(self).__name__} hides: choose another of the two")

    def encode(self, key: Array, change: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """At a client: what crosses instead of its answer, and the new memory of this kind of answer.

        `change` is the answer's difference from the point that answers are near (see `Cohort.mean`), or the answer itself
        where there is none. `key` is the same for all clients that are asked together, and at the server. The first memory is
        zeros of the change's shapes.
        """
        return change, memory

    def with_noise(self, key: Array, message: Tree) -> Tree:
        """At a client: the message with its noise; `key` is this client's alone."""
        return message

    def decode(self, key: Array, message: Tree, like: Tree) -> Tree:
        """At the server: the change that a message stands for, of these shapes."""
        return message

    def refusal(self, function: str, memory: Tree) -> str:
        """Which answer to a client function could not be encoded, by all clients' memories, and what to do; empty if none."""
        return ""

    def shrinks(self, value: Any) -> bool:
        """Whether the server sends an encoding of this array to the clients instead of the array."""
        return False

    def encode_sent(self, value: Array) -> Tree:
        """At the server: what crosses instead of an array that it sends to all clients of a cohort."""
        return value

    def decode_sent(self, message: Tree, like: Any) -> Array:
        """At a client: the array of that shape that it stands for."""
        return message

    @abc.abstractmethod
    def combine(self, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        """The value at the server from all answers, a row for each member of a cohort.

        Members with weight 0 are absent, have zeros in their rows and must not count; at least one is there. `around` is the
        point that the answers are near, or None: see `Cohort.mean`. Where clients encode, the rows are decoded changes. `key`
        is fresh randomness. Where a rule streams, the engines add up the answers themselves.
        """


def require_aggregation(value: object) -> Aggregation:
    """The value; `InputError` unless it is an instance of a rule."""
    fits = isinstance(value, Aggregation) and dataclasses.is_dataclass(value)
    require(fits, "aggregation", "a name or an instance of a class decorated with @aggregation", value)
    return value  # type: ignore[return-value]


Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def aggregation(cls: Class) -> Class:
    """Make a class of settings a rule that can be named: final and frozen."""
    fits = isinstance(cls, type) and issubclass(cls, Aggregation)
    require(fits, "@aggregation", "used on a class derived from Aggregation", cls)
    dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    return final(own_code.offered(cls, "aggregation"))


@aggregation
class Mean(Aggregation):
    """The estimate of the weighted mean that `Cohort.mean` describes."""

    streams: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def combine(self, weights: Array, rows: Tree, around: Tree, key: Array) -> Tree:
        return recentred(weighted_sum(weights, rows), weights.sum(), around)


def weighted_sum(weights: Array, rows: Tree) -> Tree:
    """Σ a_i h_i of all arrays."""
    return jax.tree.map(lambda r: jnp.tensordot(weights.astype(r.dtype), r, 1), rows)


class Sent(NamedTuple):
    """Arrays that the server sends: as they cross, as clients have them, and what that leaves out for the next time."""

    messages: list[Tree]
    received: list[Array]
    left: list[Array]


def sent_down(rule: Aggregation, values: list[Array], left: list[Array]) -> Sent:
    """The arrays with what was left out of the last ones, encoded."""
    wanted = list(map(jnp.add, values, left))
    messages = list(map(rule.encode_sent, wanted))
    received = list(map(rule.decode_sent, messages, wanted))
    return Sent(messages, received, list(map(jnp.subtract, wanted, received)))


def sent_as(function: str, values: list[Any]) -> str:
    """The name under which is kept what is left out of arrays of these shapes that are sent to a client function."""
    return f"to {function}: {', '.join(str(list(jnp.shape(value))) for value in values)}"


def change_from(around: Tree, answer: Tree) -> Tree:
    """The answer's difference from the point that answers are near; the answer itself if there is none."""
    return answer if around is None else jax.tree.map(jnp.subtract, answer, around)


def scaled(change: Tree, weight: Array | float) -> Tree:
    """The change times a client's M w_m."""
    return jax.tree.map(lambda c: c * jnp.asarray(weight, c.dtype), change)


def beyond(around: Tree, args: Tree) -> list[Any]:
    """The arrays of the point that answers are near, as a client that is sent `args` has to be told them.

    An array that is one of the arguments' is just its place among those.
    """
    places = {id(leaf): k for k, leaf in enumerate(jax.tree.leaves(args))}
    return [places.get(id(leaf), leaf) for leaf in jax.tree.leaves(around)]
