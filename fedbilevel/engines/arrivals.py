"""When answers arrive in a run that does not wait for all: recorded as they did, and repeated or drawn in simulations.

    lognormal:SIGMA    an answer of client m takes exp(σ (a_m + b)), with normal a_m for the client and b for each answer
    FILE               as in the run that recorded the file, to the last bit of its trajectory

A call is known by its random key, which is different in every exchange and the same whenever a step is repeated: after a run
was resumed, the newest line of a call is the one that counts.
"""

from __future__ import annotations

import abc
import os
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.errors import InputError
from fedbilevel.user_files import read_json_lines

ARRIVALS = "arrivals.jsonl"
FORM = "lognormal:SIGMA, with a number of at least 0, or the arrivals.jsonl of a run"
DRAWN = "lognormal:"


@dataclass(frozen=True)
class Arrival:
    """One attempt to make an exchange."""

    call: str
    attempt: int
    function: str
    asked: list[int]  # clients
    first: list[int]  # those who answered in time
    late: list[tuple[int, str]]  # clients whose answers to earlier calls have come since the last attempt, and the calls


class ArrivalsFile:
    """Lines that are added to a run's record."""

    def __init__(self, path: Path):
        self._path = path
        if path.exists():  # a kill may have cut off the last line
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def add(self, arrival: Arrival) -> None:
        """Write a line."""
        with self._path.open("a") as file:
            file.write(dumps(asdict(arrival)) + "\n")

    def make_durable(self) -> None:
        """Have all lines on the disk."""
        if self._path.exists():
            with self._path.open("rb") as file:
                os.fsync(file.fileno())


class Schedule(abc.ABC):
    """Who answers in time, and when the others' answers come."""

    @abc.abstractmethod
    def ask(self, call: str, members: list[int], enough: int) -> tuple[list[int], list[int]]:
        """Which members answer a call in time, and which late; the rest are not asked, since they are busy."""

    @abc.abstractmethod
    def due(self) -> list[tuple[int, str]]:
        """Whose late answers have come by now, and which calls they answer."""

    @abc.abstractmethod
    def saved(self) -> dict[str, Any]:
        """What a checkpoint has to hold."""

    @abc.abstractmethod
    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what `saved` returned."""


class Recorded(Schedule):
    """As in a recorded run."""

    def __init__(self, path: Path):
        self._path = path
        self._lines = {(line.call, line.attempt): line for line in read_json_lines(path, Arrival)}
        self._call, self._attempt, self._due = "", 0, list[tuple[int, str]]()

    def ask(self, call: str, members: list[int], enough: int) -> tuple[list[int], list[int]]:
        self._attempt = self._attempt + 1 if call == self._call else 0
        self._call, line = call, self._lines.get((call, self._attempt))
        if line is None or not {*line.first} <= {*line.asked} <= {*members}:
            raise InputError(f"{self._path} was recorded by another run, or ends before this one: give it the same options")
        self._due = list(line.late)
        return line.first, [m for m in line.asked if m not in line.first]

    def due(self) -> list[tuple[int, str]]:
        due, self._due = self._due, []
        return due

    def saved(self) -> dict[str, Any]:
        return {}

    def restore(self, saved: dict[str, Any]) -> None:
        pass


class Drawn(Schedule):
    """By chance, on a clock of its own, for which metrics and checkpoints take no time."""

    def __init__(self, sigma: float, seed: int):
        self._sigma, self._seed = sigma, seed
        self._clock, self._ends = 0.0, dict[int, tuple[float, str]]()  # by busy client, when it answers, and which call

    def ask(self, call: str, members: list[int], enough: int) -> tuple[list[int], list[int]]:
        free = [m for m in members if m not in self._ends]
        ends = {m: self._clock + self._time(call, m) for m in free}
        order = sorted(free, key=ends.__getitem__)
        first, later = order[:enough], order[enough:]
        self._clock = max((ends[m] for m in first), default=self._clock)
        self._ends |= {m: (ends[m], call) for m in later}
        return first, later

    def due(self) -> list[tuple[int, str]]:
        found = {m: call for m, (end, call) in self._ends.items() if end <= self._clock}
        self._ends = {m: ending for m, ending in self._ends.items() if m not in found}
        return list(found.items())

    def saved(self) -> dict[str, Any]:
        return {"clock": self._clock, "ends": {str(m): list(ending) for m, ending in self._ends.items()}}

    def restore(self, saved: dict[str, Any]) -> None:
        self._clock = saved["clock"]
        self._ends = {int(m): (end, call) for m, (end, call) in saved["ends"].items()}

    def _time(self, call: str, m: int) -> float:
        client = np.random.default_rng([self._seed, m]).normal()
        answer = np.random.default_rng([self._seed, m, int(call, 16)]).normal()
        return float(np.exp(self._sigma * (client + answer)))


def is_schedule(text: str) -> bool:
    """Whether a text says how answers arrive."""
    return not text.startswith(DRAWN) or 0 <= float(text.removeprefix(DRAWN)) < np.inf


def located(text: str) -> str:
    """The text with the full path of a file, so that a run can be resumed from any folder."""
    return text if not text or text.startswith(DRAWN) else str(Path(text).resolve())


def schedule(text: str, seed: int) -> Schedule:
    """What a text says; answers of unlike clients (σ = 1) if it is empty."""
    if not text or text.startswith(DRAWN):
        return Drawn(float(text.removeprefix(DRAWN) or 1), seed)
    return Recorded(Path(text))
