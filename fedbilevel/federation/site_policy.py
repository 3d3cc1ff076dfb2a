"""What a site insists on, whatever a server asks of it: the `[policy]` of its `site.toml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.devices import require_memory
from fedbilevel.core.population import Population
from fedbilevel.errors import InputError
from fedbilevel.settings import nearest

REFUSABLE = ("gather",)


@dataclass(frozen=True)
class SitePolicy:
    """The conditions on which a site takes part."""

    secure_sum: bool = False  # what leaves the site does so in secure sums alone
    at_least: int = 0  # the fewest sites in such a sum
    refuse: Sequence[str] = ()  # gather: algorithms whose server needs single answers
    least_batch_size: int = 0  # rows in a minibatch; without minibatches all rows count
    least_rows: int = 0  # behind any answer: those of each loss, of what is held out, and of a minibatch
    memory: float = 4.0  # GB that the data may take which a run's knobs ask for, and a minibatch of it

    def __post_init__(self) -> None:
        if not self.memory > 0:
            raise InputError(f"policy: memory must be a number of gigabytes above 0; given: {self.memory:g}")
        for name in self.refuse:
            if name not in REFUSABLE:
                raise InputError(f"policy: there is nothing to refuse called {name!r}{nearest(name, REFUSABLE)}")

    def agree_to_open_sums(self) -> None:
        """Raise `InputError` if the site's own sums, from which tables are preprocessed alike, must not be seen alone."""
        if self.secure_sum or self.at_least:
            raise InputError("this site insists on secure sums, but tables are preprocessed from each site's own sums: refused")

    def agree(self, algorithm: Algorithm, rule: Aggregation) -> None:
        """Raise `InputError` unless a run of this algorithm with this aggregation meets the conditions."""
        if (self.secure_sum or self.at_least) and not rule.hides:
            raise InputError(f"this site insists on secure sums, but the run's aggregation is {type(rule).__name__}: refused")
        least = rule.settings().get("at_least", 0)
        if least < self.at_least:
            raise InputError(
                f"this site insists on sums over at least {self.at_least} sites, but the run's are over {least}: refused"
            )
        if "gather" in self.refuse and algorithm.single_answers:
            raise InputError(
                f"this site refuses gather, but the server of {type(algorithm).__name__} needs what each site sends: refused"
            )

    def agree_rows(self, own: Population) -> None:
        """Raise `InputError` unless answers from this population of one meet the conditions."""
        batch, levels = own.batch_size, [shards for shards in (own.upper, own.lower, own.test) if shards is not None]
        if batch is not None and batch < self.least_batch_size:
            raise InputError(f"this site insists on batch_size >= {self.least_batch_size}, but the run has {batch}: refused")
        fewest = min([int(shards.size[0]) for shards in levels] + ([] if batch is None else [batch]))
        if fewest < self.least_rows:
            raise InputError(f"this site insists on at least {self.least_rows} rows behind an answer: refused")
        for shards in levels:
            require_memory("a minibatch", (batch or 0) * shards.row_bytes(), "lower batch_size")
