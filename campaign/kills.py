"""Kills before the n-th write of a command, after which `resume`, or the command again, must end as if there had been none."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from campaign.case import Case
from campaign.commands import Ended, ended
from campaign.outcome import numbers

for module in ("report.curve_picture", "report.grid_picture", "report.panel_picture", "report.table", "runs.folder"):
    importlib.import_module(f"fedbilevel.{module}")  # once, for all processes that are forked from this one
importlib.import_module("fedbilevel.runs.reproductions.study")

WRITES = {"os.rename", "os.remove", "os.rmdir", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
KNOBS = "--knob clients=2 --knob x_dimension=2 --knob y_dimension=2"
GRID = "--grid gamma_x=0.01,0.02"
REPLACE = "run quadratic fedbioacc --rounds 5 --out taken --force"
REPRODUCE = "reproduce mine --plans plans --out new"
STARTS = {  # the command, how many writes it makes, and what continues it
    "a run": (f"run quadratic simfbo {KNOBS} --rounds 6 --every 2 --out out", 17, "resume out"),
    "two runs": (f"run quadratic simfbo fedbio {KNOBS} --rounds 6 --every 2 --out out", 34, "resume out"),
    "a run in place of another": (REPLACE, 21, REPLACE),
    "a stopped run": ("resume stopped", 13, "resume stopped"),
    "a sweep": (f"sweep quadratic simfbo {KNOBS} --rounds 4 --every 2 {GRID} --by upper_loss --out out", 14, "resume out"),
    "a reproduction": (REPRODUCE, 17, REPRODUCE),
    "a reproduction that is tuned": (f"{REPRODUCE} --tune", 27, f"{REPRODUCE} --tune"),
}
UNINTERRUPTED: dict[str, dict[str, Any]] = {}  # by command, what its folder holds then


def cases() -> list[Case]:
    """A kill before each write of each command, and none where it has no further write."""
    return [
        Case(f"killed before write {n} of {what}", partial(_act, command, again, writes, n), f"fedbilevel {command}")
        for what, (command, writes, again) in STARTS.items()
        for n in range(writes + 1)
    ]


def _act(command: str, again: str, writes: int, n: int, folder: Path) -> str:
    line, killed = command.split(), folder / "killed"
    if command not in UNINTERRUPTED:
        known = _place(folder, "uninterrupted")
        right = _apart(line, known, None)
        if right.code:
            return f"uninterrupted, it ends with code {right.code}: {right.raised}{right.err}"
        UNINTERRUPTED[command] = numbers(known)
    end = _apart(line, _place(folder, "killed"), n)
    if (end.code == 0) != (n == writes):
        return f"it has {'fewer' if end.code == 0 else 'more'} than {writes} writes: correct the campaign"
    if end.code not in (0, -signal.SIGKILL):
        return f"it was to be killed and ends with code {end.code}: {end.raised}{end.err}"
    end = _apart(again.split(), killed, None)
    if end.code == 2 and "holds no run" in end.err:
        end = _apart(line, killed, None)
    if end.code:
        return f"continued, it ends with code {end.code}: {end.raised}{end.err}"
    wanted, found = UNINTERRUPTED[command], numbers(killed)
    differing = [name for name in sorted({*wanted, *found}) if wanted.get(name) != found.get(name)]
    return f"continued, it has other numbers: {', '.join(differing)}" if differing else ""


def _place(folder: Path, name: str) -> Path:
    """Where a command runs: with plans, a run that was stopped, and one that may be replaced."""
    for part, target in (("stopped", "stopped"), ("plans", "plans"), ("run", "taken/fedbioacc")):
        _copied(folder / part, folder / name / target)
    return folder / name


def _copied(source: Path, target: Path) -> None:
    for file in source.rglob("*"):
        if file.is_file():
            (target / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / file.relative_to(source)).write_bytes(file.read_bytes())


def _apart(line: Sequence[str], folder: Path, n: int | None) -> Ended:
    """Run the command in a process of its own, killed before its n-th write below the folder."""
    reading, writing = os.pipe()
    child = os.fork()  # this process has imported all and started nothing, so that each child is ready at once
    if child == 0:
        try:
            os.close(reading)
            if n is not None:
                _kill_before(n, str(folder))
            os.write(writing, json.dumps(ended(line, folder)).encode()[-60_000:])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Ended(*json.loads(said)) if said else Ended(code or -1, "", "", "it said nothing")


def _kill_before(n: int, folder: str) -> None:
    left = n

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if _changes(event, arguments) and os.path.abspath(arguments[0]).startswith(folder):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _changes(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether what is about to happen changes files."""
    if event == "open":
        return isinstance(arguments[0], (str, os.PathLike)) and bool((arguments[2] or 0) & WRITING)
    if event == "os.mkdir":
        return not os.path.exists(arguments[0]) and os.path.isdir(os.path.dirname(os.path.abspath(arguments[0])))
    return event in WRITES and os.path.lexists(arguments[0])
