"""What an algorithm is: hyperparameters, client functions, and `init` and `step` at the server."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, dataclass_transform, final

import jax
from jax import Array

from fedbilevel import own_code
from fedbilevel.core.clients import Clients
from fedbilevel.core.participation import Participation
from fedbilevel.core.population import Population
from fedbilevel.core.problem import LowerLevel
from fedbilevel.errors import InputError, in_one_line, require
from fedbilevel.settings import check_all, settings

U_NORM = {"u_norm": "|u|"}
HYPERGRADIENT_NORM = {"hypergradient_norm": "length of the estimate of ∇h(x) that x moved along"}
DRIFT = {"drift": "root mean square distance of the clients' iterates from their average, just before averaging"}


class Algorithm(abc.ABC):
    """A method for federated bilevel problems: fields are hyperparameters, `at_client` methods run at clients."""

    lower_level: ClassVar[LowerLevel] = "global"  # whose problem y solves: all clients', or each its own
    own_x: ClassVar[bool] = False  # whether each client has an x of its own, which it keeps
    private: ClassVar[tuple[type, ...]] = ()  # named tuples that clients keep to themselves; an own x is their x
    rounds_to_start: ClassVar[int] = 0  # communication rounds of `init`
    constrained: ClassVar[bool] = False  # whether the iterates stay in the problem's sets
    needs_strong_convexity: ClassVar[bool] = True  # whether its guarantees need g to be strongly convex in y
    reports: ClassVar[Mapping[str, str]] = MappingProxyType({})  # what its steps report, with the meaning in words
    gathers: ClassVar[bool | Mapping[str, str]] = False  # whether its server needs single answers, or with which settings
    late_answers: ClassVar[bool] = False  # whether an answer still counts in a later exchange, as a change or a direction
    pooled: bool = False  # whether one client holds all rows; a hyperparameter of methods that have both forms

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

    @property
    def single_answers(self) -> bool:
        """Whether its server needs what each client sends (`gather`), and not only means."""
        if isinstance(self.gathers, bool):
            return self.gathers
        return all(getattr(self, name) == value for name, value in self.gathers.items())

    def step_sizes(self, step: int) -> dict[str, float]:
        """The real hyperparameters and the scheduled values in force at an outer step, for messages."""
        given = {name: getattr(self, name) for name, setting in settings(type(self)).items() if setting.kind is float}
        return {**given, **self.scheduled_at(step)}

    def diagnostics(self) -> dict[str, str]:
        """The names of what a run records besides its metrics, reported or scheduled, with their meaning in words."""
        return {**self.reports, **dict.fromkeys(self.scheduled_at(0), "value in force at the step")}

    def scheduled_at(self, step: int) -> dict[str, float]:
        """The scheduled values at a step; empty without a schedule."""
        return self.scheduled(step) if isinstance(self, Scheduled) else {}

    def bias(self, population: Population, participation: Participation) -> str:
        """Why its steps do not solve the weighted problem, not even on average, as a sentence; empty if they do."""
        if self.pooled and population.equal_weights and not (population.upper.equal and population.lower.equal):
            return (
                f"{type(self).__name__} pools all rows, and with equal weights each row counts the same: clients with more "
                "rows weigh more."
            )
        return self.sampling_bias(participation, population.size) if isinstance(self, BiasedBySampling) else ""


class BiasedBySampling(Algorithm):
    """An algorithm whose steps are biased for some ways of drawing cohorts, even with equal weights."""

    @abc.abstractmethod
    def sampling_bias(self, participation: Participation, clients: int) -> str:
        """Why steps with this participation among that many clients are biased, as a sentence; empty if they are not."""


class Scheduled(Algorithm):
    """An algorithm some of whose values follow a schedule."""

    @abc.abstractmethod
    def scheduled(self, step: int) -> dict[str, float]:
        """The scheduled values at an outer step, by name."""


class Penalised(Algorithm):
    """An algorithm whose y also descends f, at least on some problems."""

    @abc.abstractmethod
    def led_by_g(self, state: Any) -> Array | None:
        """A y that descends g alone; None if the one in the state does."""


def require_algorithm(value: object) -> Algorithm:
    """The value; `InputError` unless it is an instance of an algorithm."""
    if not isinstance(value, Algorithm):
        raise InputError(f"algorithm must be a name or an instance such as FedBiOAcc(), not {in_one_line(repr(value))}")
    require(dataclasses.is_dataclass(value), "algorithm", "an instance of a class decorated with @algorithm", value)
    return value


Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def algorithm(cls: Class) -> Class:
    """Make a class of hyperparameters an algorithm: final, frozen, and a pytree whose leaves are its real numbers.

    That way one compiled program serves all step sizes, and a grid of them can be vmapped.
    """
    require(isinstance(cls, type) and issubclass(cls, Algorithm), "@algorithm", "used on a class derived from Algorithm", cls)
    dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    for field in dataclasses.fields(cls):
        named = f"{cls.__name__}: {field.name}"
        require("setting" in field.metadata, named, "a setting, such as step_size(0.1, ...)", field.default)
    kinds = {name: setting.kind for name, setting in settings(cls).items()}
    leaves = [name for name, kind in kinds.items() if kind is float]
    rest = [name for name, kind in kinds.items() if kind is not float]

    def flatten(instance: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(instance, name) for name in leaves], tuple(getattr(instance, name) for name in rest)

    def unflatten(constants: tuple[Any, ...], numbers: Iterable[Any]) -> Any:
        instance: Any = object.__new__(cls)  # unchecked, since JAX may put anything in place of a number
        for name, value in zip([*rest, *leaves], [*constants, *numbers], strict=True):
            object.__setattr__(instance, name, value)
        return instance

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return final(own_code.offered(cls, "algorithm"))
