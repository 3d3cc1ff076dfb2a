"""Clients in this process that answer one by one, some of them late: a simulation with the messages of a federation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.engines.arrivals import Schedule
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.failure import Failure, Failures, Kind
from fedbilevel.engines.loopback import Loopback
from fedbilevel.errors import InputError
from fedbilevel.tasks.base import Task


class InMemory:
    """What a client keeps beyond its process, which the run's checkpoint holds for it."""

    def __init__(self) -> None:
        self.steps: dict[int, bytes] = {}

    def save(self, step: int, data: bytes, keep: int) -> None:
        """Store the data of a step, and of older steps keep only that of the step `keep`."""
        self.steps = {step: data, **{s: old for s, old in self.steps.items() if s == keep}}

    def load(self, step: int) -> bytes:
        """The data of a step; `InputError` if it is missing."""
        if step not in self.steps:
            raise InputError(f"the checkpoint does not hold a client's values of step {step}")
        return self.steps[step]


class InProcess:
    """The clients, made when they are first asked, and a schedule of their answers."""

    def __init__(self, task: Task, algorithm: Algorithm, rule: Aggregation, schedule: Schedule):
        self._task, self._algorithm, self._rule, self._schedule = task, algorithm, rule, schedule
        self._stores = [InMemory() for _ in range(task.population.size)]
        self._late: dict[tuple[int, str], bytes] = {}  # by client and call, answers that have not come yet

    @cached_property
    def _clients(self) -> Loopback:
        population = self._task.population
        shapes = call_shapes(self._algorithm, population, self._task.x, self._task.y)
        weights = np.asarray(population.weights) * population.size

        def runtime(m: int) -> ClientRuntime:
            return ClientRuntime(self._algorithm, population.only(m), m, float(weights[m]), shapes, self._stores[m], self._rule)

        return Loopback({m: runtime(m) for m in range(population.size)})

    def ask(self, requests: dict[int, bytes]) -> tuple[dict[int, bytes], Failures]:
        """Everyone's reply."""
        return self._clients.ask(requests)

    def ask_first(self, call: str, requests: dict[int, bytes], enough: int) -> tuple[dict[int, bytes], Failures]:
        """The replies that the schedule has come in time; the others are under way, or were not asked for."""
        first, later = self._schedule.ask(call, list(requests), enough)
        replies, failures = self._clients.ask({m: requests[m] for m in (*first, *later)})
        self._late |= {(m, call): replies.pop(m) for m in later if m in replies}
        for m in requests:
            if m not in replies and m not in failures:
                failures[m] = Failure(Kind.UNDER_WAY, f"client {m} has not answered yet", sent=m in later)
        return replies, failures

    def late(self) -> tuple[dict[int, bytes], Failures]:
        """The replies to earlier requests that have come since."""
        come: dict[int, bytes] = {}
        for m, call in self._schedule.due():
            if (m, call) not in self._late:
                raise InputError("the arrivals were recorded by another run: give this one the same options")
            come[m] = self._late.pop((m, call))
        newest = dict(self._late.keys())  # a client that was asked again has nothing older under way
        self._late = {(m, call): answer for (m, call), answer in self._late.items() if newest[m] == call}
        return come, {}

    def wait(self, clients: Iterable[int]) -> None:
        """They are free for metrics and checkpoints at any time: how often there are any changes no arrival."""

    def saved(self) -> dict[str, Any]:
        """All that a checkpoint has to hold for them."""
        return {
            "late": [(m, call, _array(answer)) for (m, call), answer in self._late.items()],
            "kept": [{str(step): _array(data) for step, data in store.steps.items()} for store in self._stores],
            "schedule": self._schedule.saved(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `saved` returned."""
        self._late = {(m, call): answer.tobytes() for m, call, answer in saved["late"]}
        for store, steps in zip(self._stores, saved["kept"], strict=True):
            store.steps = {int(step): data.tobytes() for step, data in steps.items()}
        self._schedule.restore(saved["schedule"])


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
