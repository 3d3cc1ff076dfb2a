"""The noise that a site adds to secure sums: fresh for each, and paid for from the budget of the site's rows."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping

import numpy as np

from fedbilevel.aggregations.private_sum import PrivateSum
from fedbilevel.core.privacy_accounting import Event, Events
from fedbilevel.core.problem import Tree
from fedbilevel.engines.call_shapes import EVALUATING
from fedbilevel.errors import InputError
from fedbilevel.federation.privacy_ledger import Ledger

ROW = 2.0  # times the bound: how far one row can move an answer, which stays clipped


class OwnNoise:
    """What one run asks of a site in sums that have noise.

    A question that comes again is paid for again: with other sites in the sum, an old answer's noise could be subtracted.
    """

    def __init__(self, run: str, rule: PrivateSum, ledger: Ledger):
        self._run, self._rule, self._ledger = run, rule, ledger
        rule.require_steps()

    def require(self, planned: Mapping[str, int]) -> None:
        """Raise `InputError` if so many calls, by client function, exceed what the site allows."""
        if any(n < 0 for n in planned.values()):
            raise InputError("the calls that a run plans are not those of its algorithm: refused")
        self._ledger.require(self._run, sum((self._events(name, n) for name, n in planned.items()), Counter()))

    def key(self, name: str, key: np.ndarray, args: Tree) -> np.ndarray:
        """A random key for the noise of an answer, which nobody else can know, once the answer has been paid for."""
        self._ledger.charge(self._run, secrets.token_bytes(32), self._events(name, 1))
        return np.frombuffer(secrets.token_bytes(8), np.uint32)

    def _events(self, name: str, times: int) -> Events:
        noise = self._rule.metric_noise if name == EVALUATING else self._rule.multiplier
        return Counter({Event(1.0, noise / ROW): times})
