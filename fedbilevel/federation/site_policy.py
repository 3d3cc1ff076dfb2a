"""What a site insists on, whatever a server asks of it: the `[policy]` of its `site.toml`."""

from __future__ import annotations

from dataclasses import dataclass

from fedbilevel.core.devices import require_memory
from fedbilevel.core.population import Population
from fedbilevel.errors import InputError


@dataclass(frozen=True)
class SitePolicy:
    """The conditions on which a site takes part."""

    least_batch_size: int = 0  # rows in a minibatch; without minibatches all rows count
    least_rows: int = 0  # behind any answer: those of each loss, of what is held out, and of a minibatch
    memory: float = 4.0  # GB that the data may take which a run's knobs ask for, and a minibatch of it

    def __post_init__(self) -> None:
        if not self.memory > 0:
            raise InputError(f"policy: memory must be a number of gigabytes above 0; given: {self.memory:g}")

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
