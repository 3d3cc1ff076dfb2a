"""The answers of a site that keeps its rows private: each is paid for first, and drawn with the site's own randomness."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.population import Population
from fedbilevel.core.privacy import LOWER, UPPER, RowPrivacy
from fedbilevel.core.privacy_accounting import Events, events_of, of_evaluations
from fedbilevel.core.problem import Tree
from fedbilevel.core.release_counts import Releases, releases_of
from fedbilevel.engines.call_shapes import EVALUATING, CallShapes, Shape
from fedbilevel.errors import InputError
from fedbilevel.federation.begin_message import BeginMessage
from fedbilevel.federation.privacy_ledger import Ledger
from fedbilevel.runs.spending import released


class PrivateAnswers:
    """What one run asks of a site's rows."""

    def __init__(self, run: BeginMessage, algorithm: Algorithm, own: Population, shapes: CallShapes, ledger: Ledger):
        assert own.privacy is not None
        self._privacy: RowPrivacy = own.privacy
        self._own, self._ledger = own, ledger
        self._run = _fingerprint(run, own)
        self._releases: dict[tuple[str, Shape], Releases] = {
            (name, shape.arguments): releases_of(
                getattr(algorithm, name), shape.arguments.empty(), run.number, own.batch_size is None
            )
            for name, found in shapes.items()
            if name != EVALUATING
            for shape in found
        }

    def require(self, planned: Mapping[str, int]) -> None:
        """Raise `InputError` if so many calls, by client function, exceed what the site allows."""
        most: dict[str, Releases] = {}
        for (name, _), releases in self._releases.items():
            most[name] = most.get(name, Counter()) | releases
        if any(n < 0 for n in planned.values()) or not planned.keys() <= {*most, EVALUATING}:
            raise InputError("the calls that a run plans are not those of its algorithm: refused")
        calls = {name: n for name, n in planned.items() if name != EVALUATING}
        evaluations = of_evaluations(self._privacy, planned.get(EVALUATING, 0))
        self._ledger.require(self._run, self._events(released(most, calls)) + evaluations)

    def key(self, name: str, key: np.ndarray, args: Tree) -> np.ndarray:
        """A random key for the answer to a call, or to an evaluation, once it has been paid for."""
        question = b"\0".join([self._run.encode(), name.encode(), *_bytes((key, args))])
        if name == EVALUATING:
            events = of_evaluations(self._privacy, 1)
        else:
            events = self._events(self._releases[name, Shape.of(tuple(args))])
        self._ledger.charge(self._run, question, events)
        return self._ledger.key(question)

    def _events(self, releases: Releases) -> Events:
        rows = {UPPER: int(self._own.upper.size[0]), LOWER: int(self._own.lower.size[0])}
        return events_of(releases, self._privacy, rows, self._own.batch_size)


def _fingerprint(run: BeginMessage, own: Population) -> str:
    """What the answers of a run follow from besides its questions: all that begins it, but for plan and names, and all rows."""
    begun = asdict(dataclasses.replace(run, planned={}, names=()))
    made = hashlib.sha256(json.dumps([begun, own.batch_size], sort_keys=True).encode())
    for data in _bytes((own.upper.rows, own.lower.rows, None if own.test is None else own.test.rows)):
        made.update(data)
    return made.hexdigest()[:32]


def _bytes(tree: Any) -> list[bytes]:
    """The arrays of a tree, with their shapes."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [f"{array.dtype}{array.shape}".encode() + array.tobytes() for array in arrays]
