"""How a run is going: a bar with the time left on a terminal or in a notebook with ipywidgets, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedbilevel.own_code import label
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.duration import in_words
from fedbilevel.runs.experiment import Snapshot

LINES = 10  # plain lines in a run
SURE = 5.0  # seconds after which the pace is reliable
LONG = 86400.0  # seconds


@contextlib.contextmanager
def shown(console: Console, configuration: Configuration, headline: str) -> Iterator[Callable[[Snapshot], None]]:
    """During the block, the function it yields shows each moment of the run."""
    options = configuration.options
    total = options.rounds or options.steps or 0
    unit = "round" if options.rounds else "step"

    def done(moment: Snapshot) -> int:
        return moment.totals.rounds if options.rounds else moment.step

    if _has_bars(console):
        with _bar(console, unit) as bar:
            task = bar.add_task(label(configuration.algorithm), total=total, headline="")

            def advance(moment: Snapshot) -> None:
                bar.update(task, completed=done(moment))
                if moment.metrics is not None:
                    bar.update(task, headline=_value(headline, moment))

            yield advance
        return

    lines = _Lines(console, label(configuration.algorithm), headline, unit, total, done)
    yield lines.show
    lines.end()


class _Lines:
    """About ten lines in a run, and one for its end."""

    def __init__(self, console: Console, name: str, headline: str, unit: str, total: int, done: Callable[[Snapshot], int]):
        self._console, self._name, self._headline, self._unit = console, name, headline, unit
        self._total, self._done = total, done
        self._next, self._unshown, self._pace = 0, "", Pace(console, name, total)

    def show(self, moment: Snapshot) -> None:
        now = self._done(moment)
        left = self._pace.note(now)
        if moment.metrics is None:
            return
        self._unshown = f"{self._name}: {self._unit} {now} of {self._total}, {_value(self._headline, moment)}"
        if now >= self._next:
            self._print(self._unshown + (f", {left:.0f} s left" if left and self._total > now else ""))
            self._next = now + max(1, self._total // LINES)

    def end(self) -> None:
        if self._unshown:
            self._print(self._unshown)

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)
        self._unshown = ""


class Pace:
    """How long the rest of some work takes at the pace so far; prints one line if that is more than a day."""

    def __init__(self, console: Console, name: str, total: int):
        self._console, self._name, self._total = console, name, total
        self._clock, self._said = list[tuple[float, int]](), False

    def note(self, done: int) -> float | None:
        """The seconds that are left when this much is done; None while the pace is unknown."""
        now = time.monotonic()
        if len(self._clock) < 2:  # the first stretch compiles: time is measured from its end, the second call
            self._clock.append((now, done))
        since, first = self._clock[-1]
        if done <= first:
            return None
        left = (now - since) * (self._total - done) / (done - first)
        if left > LONG and now - since > SURE and not self._said:
            self._said = True
            self._console.print(f"{self._name}: at this pace the rest takes {in_words(left)}", soft_wrap=True)
        return left


def _value(headline: str, moment: Snapshot) -> str:
    metrics = moment.metrics or {}
    name = headline if headline in metrics else "upper_loss"  # a truth may not be known for the sites' own data
    value = metrics.get(name)
    return f"{name.replace('_', ' ')} {'not finite' if value is None else f'{value:.4g}'}"


def _has_bars(console: Console) -> bool:
    return console.is_terminal or bool(console.is_jupyter and importlib.util.find_spec("ipywidgets"))


def _bar(console: Console, unit: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{unit} {{task.completed:.0f}}/{{task.total:.0f}}"),
        TextColumn("{task.fields[headline]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


@contextlib.contextmanager
def counted(console: Console, name: str, unit: str, total: int) -> Iterator[Callable[[float, str], None]]:
    """During the block, the function it yields shows how many items are done, and a word on those in progress.

    Plain lines are printed only when there is no such word.
    """
    if _has_bars(console):
        with _bar(console, unit) as bar:
            task = bar.add_task(name, total=total, headline="")
            yield lambda done, word: bar.update(task, completed=done, headline=word)
        return
    shown, pace = set[int](), Pace(console, name, total)

    def line(done: float, word: str) -> None:
        if not word and done not in shown:
            shown.add(int(done))
            pace.note(int(done))
            console.print(f"{name}: {done:.0f} of {total} {unit}s", soft_wrap=True)

    yield line


@contextlib.contextmanager
def moving(console: Console, name: str, unit: str) -> Iterator[Callable[[int, int, str], None]]:
    """During the block, the function it yields shows how much of a total, which may grow, is done, and what is under way."""
    if _has_bars(console):
        with _bar(console, unit) as bar:
            task = bar.add_task(name, total=None, headline="")
            yield lambda done, of, word: bar.update(task, completed=done, total=of, headline=word)
        return
    last = ("", -1)

    def line(done: int, of: int, word: str) -> None:
        nonlocal last
        tenth = done * LINES // max(of, 1)
        if (word, tenth) != last:
            last = word, tenth
            console.print(f"{name}: {done} of {of} {unit}s, {word}", soft_wrap=True)

    yield line
