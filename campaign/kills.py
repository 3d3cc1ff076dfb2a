"""Kills before the n-th write of a command, after which `resume`, or the command again, must end as if there had been none."""

from __future__ import annotations

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

WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
KNOBS = "--knob clients=2 --knob x_dimension=2 --knob y_dimension=2"
STARTS = {  # the command, how many of its first writes are the start, and what continues it
    "a run": (f"run quadratic simfbo {KNOBS} --rounds 6 --every 2 --out out", 12, "resume out"),
    "two runs": (f"run quadratic simfbo fedbio {KNOBS} --rounds 6 --every 2 --out out", 40, "resume out"),
    "a run in place of another": ("run quadratic fedbioacc --rounds 5 --out taken --force", 16, "resume taken"),
    "a stopped run": ("resume stopped", 12, "resume stopped"),
    "a sweep": (
        f"sweep quadratic simfbo {KNOBS} --rounds 4 --every 2 --grid gamma_x=0.01,0.02 --by upper_loss --out out",
        14,
        "resume out",
    ),
    "a reproduction": ("reproduce mine --plans plans --out new", 16, "reproduce mine --plans plans --out new"),
    "a reproduction that is tuned": ("reproduce mine --tune --plans plans --out new", 16, ""),
}
SECONDS = "seconds"


def cases() -> list[Case]:
    """A kill before each write of each start."""
    return [
        Case(f"killed before write {n} of {what}", partial(_act, command, again, n), f"fedbilevel {command}")
        for what, (command, writes, again) in STARTS.items()
        for n in range(writes)
    ]


def _act(command: str, again: str, n: int, folder: Path) -> str:
    line, known = command.split(), folder / "uninterrupted"
    other = folder / "killed"
    for place in (known, other):
        place.mkdir()
        for part in ("stopped", "plans"):
            _copied(folder / part, place / part)
        _copied(folder / "run", place / "taken/fedbioacc")
    if (right := _apart(line, known, None)).code:
        return f"uninterrupted, it ends with code {right.code}: {right.raised}{right.err}"
    killed = _apart(line, other, n)
    if killed.code == 0:
        return ""  # it has fewer writes
    if killed.code != -signal.SIGKILL:
        return f"it was to be killed and ends with code {killed.code}: {killed.raised}{killed.err}"
    end = _apart((again or command).split(), other, None)
    if end.code == 2 and "holds no run" in end.err:
        end = _apart(line, other, None)
    if end.code:
        return f"continued, it ends with code {end.code}: {end.raised}{end.err}"
    wanted, found = _numbers(known), _numbers(other)
    differing = [name for name in sorted({*wanted, *found}) if wanted.get(name) != found.get(name)]
    return f"continued, it has other numbers: {', '.join(differing)}" if differing else ""


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
        if event in WRITES or (event == "open" and (arguments[2] or 0) & WRITING):
            path = arguments[0]
            if isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(folder):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _numbers(folder: Path) -> dict[str, Any]:
    """What all files of a folder say, but for times, identities and pictures."""
    found: dict[str, Any] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.suffix == ".jsonl":
            lines = [_plain(json.loads(line)) for line in file.read_bytes().splitlines()]
            found[name] = sorted(lines, key=str) if "sweep.json" in os.listdir(file.parent) else lines
        elif file.suffix == ".json":
            found[name] = _plain(json.loads(file.read_bytes()))
        elif file.suffix in (".csv", ".toml", ".npy"):
            found[name] = file.read_bytes()
        elif file.suffix not in (".png", ".svg"):
            found[name] = "there"
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in (SECONDS, "identity")}
    return [_plain(v) for v in value] if isinstance(value, list) else value
