"""How a run is made, whatever it solves: one value for `run`, `sweep`, plans, `solve` and configurations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fedbilevel.aggregations import configured, in_full, parts, written
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.participation import Bernoulli, Dropouts, Everyone, Participation, Uniform
from fedbilevel.core.privacy import RowPrivacy
from fedbilevel.engines.arrivals import FORM as FORM_OF_ARRIVALS
from fedbilevel.engines.arrivals import is_schedule
from fedbilevel.engines.attacks import FORM, Attack
from fedbilevel.engines.simulated import PRODUCTS
from fedbilevel.errors import InputError
from fedbilevel.settings import check_all, choice, configure, count, flag, real, text

ROWS = "rows"  # what is private
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
    loss_bound: float = real(1e6, "a loss above it counts as divergence", above=0)
    aggregate: str = text("mean", "how answers are aggregated", "NAME or NAME(SETTING=VALUE, ...)", bool)
    privacy: str = text("", "how the rows of clients are kept private", "rows(SETTING=VALUE, ...)", lambda given: True)
    attack: str = text("", "clients that lie, in simulations", FORM, lambda given: not given or bool(Attack.parse(given)))
    arrivals: str = text("", "when answers come, in simulations that do not wait for all", FORM_OF_ARRIVALS, is_schedule)
    validation: bool = flag(False, "whether one in five of each client's upper rows is held out of the losses, to choose by")
    keep_best: bool = flag(False, "whether x and y are those of the recorded round that is best on held-out rows")

    def __post_init__(self) -> None:
        check_all(self, owner="")
        object.__setattr__(self, "validation", self.validation or self.keep_best)
        if (self.rounds is None) == (self.steps is None):
            raise InputError("give either a budget of rounds or a number of steps")
        if self.clients_per_round is not None and self.bernoulli is not None:
            raise InputError("give either clients per round or a probability to take part, not both")
        object.__setattr__(self, "aggregate", in_full(self.aggregate))
        object.__setattr__(self, "privacy", privacy_text(self.row_privacy()))

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

    def require_for_several(self) -> None:
        """Raise `InputError` unless runs that are chosen among can have these options."""
        rows, (rule, values) = self.row_privacy(), parts(self.aggregate)
        if self.keep_best:
            raise InputError("keep_best is for one run, and runs that are chosen among are ranked by their last round: use run")
        if rule == "buffered":
            raise InputError("buffered: late answers are simulated for one run at a time, not for many together: use run")
        if "epsilon" in values or (rows is not None and rows.epsilon is not None):
            raise InputError("epsilon is that of one run, and a choice among several costs more: give noise=VALUE in its place")

    def row_privacy(self) -> RowPrivacy | None:
        """How the rows of clients are kept private, if they are."""
        return read_privacy(self.privacy)


def read_privacy(text: str) -> RowPrivacy | None:
    """How rows are kept private, from what describes it; None if it is empty."""
    if not text:
        return None
    name, values = parts(text)
    if name != ROWS:
        raise InputError(f"privacy must be {ROWS}(SETTING=VALUE, ...); given: {text}")
    return configure(RowPrivacy, "privacy", values)


def privacy_text(privacy: RowPrivacy | None) -> str:
    """What describes it in a run's options."""
    return "" if privacy is None else written(ROWS, privacy.values())
