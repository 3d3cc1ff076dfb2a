"""What an algorithm is: hyperparameters, client functions, and `init` and `step` at the server."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

import jax
from jax import Array

from fedbilevel.clients import Clients
from fedbilevel.settings import check_all, choice, count, flag, real, settings, step_size

LowerLevel = Literal["global", "local"]


class Algorithm(abc.ABC):
    """A method for federated bilevel problems: fields are hyperparameters, `at_client` methods run at clients."""

    lower_level: ClassVar[LowerLevel] = "global"  # whose problem y solves: all clients', or each its own
    constrained: ClassVar[bool] = False  # whether the iterates stay in the problem's sets
    needs_strong_convexity: ClassVar[bool] = True  # whether its guarantees need g to be strongly convex in y

    def __post_init__(self) -> None:
        check_all(self)

    @abc.abstractmethod
    def init(self, x: Array, y: Array, clients: Clients) -> Any:
        """The first state: a pytree with attributes `x` and `y`."""

    @abc.abstractmethod
    def step(self, state: Any, clients: Clients, key: Array) -> Any:
        """The state after one outer step; `key` is the server's randomness."""

    @abc.abstractmethod
    def rounds(self, key: Array, size: int) -> Array | int:
        """The communication rounds of the step with this key, in cohorts of `size`."""

    def step_sizes(self, step: int) -> dict[str, float]:
        """The numbers in force at an outer step, for messages."""
        return {name: getattr(self, name) for name, setting in settings(type(self)).items() if setting.kind is float}


Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(real, step_size, count, flag, choice))
def algorithm(cls: Class) -> Class:
    """Make a class of hyperparameters an algorithm: frozen, and a pytree whose leaves are its real numbers.

    So one compiled program serves all step sizes, and a grid of them can be vmapped.
    """
    dataclasses.dataclass(frozen=True)(cls)
    kinds = {name: setting.kind for name, setting in settings(cls).items()}
    leaves = [name for name, kind in kinds.items() if kind is float]
    return jax.tree_util.register_dataclass(cls, data_fields=leaves, meta_fields=[n for n in kinds if n not in leaves])
