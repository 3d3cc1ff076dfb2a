"""How a run is made, whatever it solves: one value for `run`, `sweep`, plans, `solve` and configurations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fedbilevel.aggregations import configured, in_full, parts
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.participation import Bernoulli, Dropouts, Everyone, Participation, Uniform
from fedbilevel.engines.attacks import FORM, Attack
from fedbilevel.engines.simulated import PRODUCTS
from fedbilevel.errors import InputError
from fedbilevel.settings import check_all, choice, configure, count, real, step_size, text

WEIGHTS = "equal, rows (as many as a client has), or numbers above 0 separated by commas, one per client"


def is_weights(given: str) -> bool:
    """Whether a text says how clients weigh."""
    return given in ("equal", "rows") or all(0 < float(number) < math.inf for number in given.split(","))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run, checked. Exactly one of `rounds` and `steps` says how long it is."""

    rounds: int | None = count(None, "budget of communication rounds")
    steps: int | None = count(None, "number of outer steps, instead of rounds")
    clients_per_round: int | None = count(None, "how many clients take part in a round; all unless given")
    bernoulli: float | None = real(None, "probability that a client takes part, instead of a number", above=0, most=1)
    dropout: float | None = real(None, "probability that a drawn client drops out", least=0, below=1)
    weights: str | None = text(
        None, "the clients' weights: equal, rows, or numbers; the task's own unless given", WEIGHTS, is_weights
    )
    seed: int = count(0, "random seed", least=0, bits=32)
    every: int = count(10, "rounds between two rows of metrics")
    chunk_size: int | None = count(None, "clients computed at once; None: all of a round, on a CPU as many as its cache holds")
    products: str = choice("default", "arithmetic of matrix products in simulated steps", PRODUCTS)
    loss_bound: float = step_size(1e6, "a loss above it counts as divergence")
    aggregate: str = text("mean", "how answers are aggregated", "NAME or NAME(SETTING=VALUE, ...)", bool)

    attack: str = text("", "clients that lie, in simulations", FORM, lambda given: not given or bool(Attack.parse(given)))

    def __post_init__(self) -> None:
        check_all(self, owner="")
        if (self.rounds is None) == (self.steps is None):
            raise InputError("give either a budget of rounds or a number of steps")
        if self.clients_per_round is not None and self.bernoulli is not None:
            raise InputError("give either clients per round or a probability to take part, not both")
        object.__setattr__(self, "aggregate", in_full(self.aggregate))

    @classmethod
    def read(cls, owner: str, values: Mapping[str, Any]) -> RunOptions:
        """The options from a file's or a command's values; `InputError` for a name or a value that cannot be used."""
        return configure(cls, owner, values)

    def otherwise(self, defaults: Mapping[str, Any]) -> RunOptions:
        """The options with defaults for what is not given; a probability of taking part replaces the number of clients."""
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if self.bernoulli is not None:
            missing.pop("clients_per_round", None)
        return dataclasses.replace(self, **missing)

    def participation(self) -> Participation:
        """How cohorts are drawn."""
        chosen: Participation = Everyone()
        if self.clients_per_round is not None:
            chosen = Uniform(self.clients_per_round)
        if self.bernoulli is not None:
            chosen = Bernoulli(self.bernoulli)
        return chosen if self.dropout is None else Dropouts(chosen, self.dropout)

    def rule(self) -> str:
        """The name of how answers are aggregated."""
        return parts(self.aggregate)[0]

    def aggregation(self) -> Aggregation:
        """How answers are aggregated."""
        return configured(self.aggregate)
