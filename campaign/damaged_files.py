"""Every file that a user can touch, damaged in every way, and the commands that read it."""

from __future__ import annotations

import functools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from made_files import NESTED, damaged

from campaign.case import Case
from campaign.commands import problem
from campaign.outcome import numbers
from fedbilevel.errors import InputError
from fedbilevel.federation.job import read_status
from fedbilevel.federation.site_data import SiteData

SWEEP = "sweep quadratic simfbo --knob clients=2 --knob x_dimension=2 --knob y_dimension=2 --set local_steps=2 --rounds 4"
SWEEP += " --grid gamma_x=0.01,0.02 --seeds 2 --every 2 --out sweep"
COMMANDS = {  # by the beginning of a file's path
    "run/": ("resume run", "report run", "compare run"),
    "stopped/": ("resume stopped", "report stopped"),
    "begun/": ("resume begun", "run quadratic simfbo fedbio --rounds 5 --out begun"),
    "sweep/": ("resume sweep", "report sweep", SWEEP),
    "partial/": ("resume partial", "report partial"),
    "plans/": ("reproduce mine --plans plans --out study", "reproduce --list --plans plans"),
    "study/": ("reproduce mine --plans plans --out study",),
    "settings.toml": ("run quadratic simfbo --settings settings.toml --rounds 3 --out out",),
    "mine.py": (
        "run mine.py simfbo --rounds 3 --out out",
        "show mine.py:small",
        "sweep quadratic mine.py --grid eta=1 --rounds 3 --out out",
        "data show mine.py",
    ),
    "federation.toml": ("federation revoke . nobody", "run quadratic simfbo --federation . --rounds 3 --knob clients=7"),
    "data/": (
        "data show data-cleaning --knob dataset=cifar-10 --knob clients=2 --knob train_per_client=5 "
        "--knob validation_per_client=5 --data data",
    ),
}
CONTINUED = {"resume stopped": "result.json", "resume partial": "ranking.json"}  # with what is there once it has ended
READERS: dict[str, Callable[[Path], object]] = {
    "site.toml": lambda folder: _load(SiteData.read(folder / "site.toml")),
    "job.json": read_status,
}
UNREAD = (".png", ".svg", ".md", "cells.csv", "best.toml", "results/mine.csv", "results/mine.json", "rows.npz")
RANDOM = 5  # damages of each file


def cases(made: Path, seed: int, count: int) -> list[Case]:
    """That many of all damages of all files, each with one of the commands that read it."""
    found = []
    for file in sorted(path for path in made.rglob("*") if path.is_file()):
        name = str(file.relative_to(made))
        if name.endswith(UNREAD):
            continue
        uses = next((commands for start, commands in COMMANDS.items() if name.startswith(start)), (name,))
        for k, how in enumerate((*DAMAGES, *(f"random {k}" for k in range(RANDOM)))):
            use = uses[k % len(uses)]
            title = f"{name}, {how}"
            found.append(Case(title, partial(_act, made, name, how, use, f"{seed} {title}"), f"fedbilevel {use}"))
    return random.Random(seed).sample(found, min(count, len(found)))


def _load(site: SiteData) -> object:
    """What the site has for a run of its own task with two clients."""
    return site.load(site.configured("task", site.task, {}, {"clients": 2, **site.knobs}))


def _act(made: Path, name: str, how: str, use: str, seed: str, folder: Path) -> str:
    if how in DAMAGES:
        DAMAGES[how](folder / name)
    else:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(damaged(random.Random(seed).choice, name, content))
    if use in READERS:
        try:
            READERS[use](folder)
        except InputError as error:
            return "" if "\n" not in str(error) else f"not one line: {error}"
        return ""
    found, part = problem(use.split(), folder), name.partition("/")[0]
    if found or use not in CONTINUED or not (folder / part / CONTINUED[use]).exists():
        return found
    wanted, left = _undamaged(made, part, use), numbers(folder / part)
    differing = [file for file in wanted if wanted[file] != left.get(file)]
    return f"continued without a word, it has other numbers: {', '.join(differing)}" if differing else ""


@functools.cache
def _undamaged(made: Path, part: str, use: str) -> dict[str, Any]:
    """What the command leaves if nothing is damaged."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(made / part, Path(scratch) / part)
        if found := problem(use.split(), Path(scratch)):
            raise RuntimeError(found)
        return numbers(Path(scratch) / part)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


def _rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda file: (file.write_bytes(change(file.read_bytes())), None)[1]


def _linked(file: Path) -> None:
    elsewhere = file.with_name("elsewhere")
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


def _digits(content: bytes) -> Iterator[bytes]:
    """Each number as one of 400 digits."""
    for byte in content:
        yield b"9" * 400 if 48 <= byte < 58 else bytes([byte])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "gone": lambda file: file.unlink(),
    "empty": _rewritten(lambda content: b""),
    "cut in the middle": _rewritten(lambda content: content[: len(content) // 2]),
    "cut before its end": _rewritten(lambda content: content[:-1]),
    "twice": _rewritten(lambda content: content * 2),
    "a folder": _replaced(lambda file: file.mkdir()),
    "a link to itself": _replaced(lambda file: file.symlink_to(file.name)),
    "a link to nothing": _replaced(lambda file: file.symlink_to("nothing")),
    "a link to the file": _linked,
    "a pipe": _replaced(os.mkfifo),
    "a device": _replaced(lambda file: file.symlink_to("/dev/null")),
    "an endless device": _replaced(lambda file: file.symlink_to("/dev/zero")),
    "zeros": _rewritten(lambda content: bytes(len(content))),
    "not UTF-8": _rewritten(lambda content: content.replace(b"a", b"\xff")),
    "with a byte order mark": _rewritten(lambda content: b"\xef\xbb\xbf" + content),
    "UTF-16": _rewritten(lambda content: content.decode("latin-1").encode("utf-16")),
    "CRLF": _rewritten(lambda content: content.replace(b"\n", b"\r\n")),
    "nested deeply": _rewritten(lambda content: NESTED.encode()),
    "objects nested deeply": _rewritten(lambda content: b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "huge numbers": _rewritten(lambda content: b"".join(_digits(content))),
    "another kind of file": _rewritten(lambda content: b"\x89PNG\r\n\x1a\n" + content),
    "null": _rewritten(lambda content: b"null"),
    "a list": _rewritten(lambda content: b"[1, 2]\n"),
    "a number": _rewritten(lambda content: b"1e999\n"),
}
