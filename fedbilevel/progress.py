"""How a run is going: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedbilevel.configuration import Configuration
from fedbilevel.experiment import Snapshot

LINES = 10  # plain lines in a run


@contextlib.contextmanager
def shown(console: Console, configuration: Configuration, headline: str) -> Iterator[Callable[[Snapshot], None]]:
    """Within it, the function that it gives shows each moment of the run."""
    total = configuration.rounds or configuration.steps or 0
    unit = "round" if configuration.rounds else "step"

    def done(moment: Snapshot) -> int:
        return moment.totals.rounds if configuration.rounds else moment.step

    if console.is_terminal:
        with _bar(console, unit) as bar:
            task = bar.add_task(configuration.algorithm, total=total, headline="")

            def advance(moment: Snapshot) -> None:
                bar.update(task, completed=done(moment))
                if moment.metrics is not None:
                    bar.update(task, headline=f"{headline.replace('_', ' ')} {moment.metrics[headline]:.4g}")

            yield advance
        return

    began, first, next_line = time.monotonic(), None, 0

    def line(moment: Snapshot) -> None:
        nonlocal first, next_line
        now = done(moment)
        first = now if first is None else first
        if moment.metrics is None or (now < next_line and now < total):
            return
        next_line = now + max(1, total // LINES)
        elapsed = time.monotonic() - began
        left = f", {elapsed * (total - now) / (now - first):.0f} s left" if now > first and now < total else ""
        value = f"{headline.replace('_', ' ')} {moment.metrics[headline]:.4g}"
        console.print(f"{configuration.algorithm}: {unit} {now} of {total}, {value}{left}", soft_wrap=True, highlight=False)

    yield line


def _bar(console: Console, unit: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{unit} {{task.completed}}/{{task.total}}"),
        TextColumn("{task.fields[headline]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
