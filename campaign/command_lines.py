"""Command lines: every option of every command with odd values, every hyperparameter and knob, and random mixtures."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer.main

from campaign.case import Case
from campaign.commands import problem
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.command.main import app
from fedbilevel.settings import settings
from fedbilevel.tasks import TASKS

SMALL = ["--knob", "clients=2", "--knob", "x_dimension=2", "--knob", "y_dimension=2", "--rounds", "6", "--out", "out"]
BASES = {  # a command that works, or is refused before it waits for anything
    "run": ["run", "quadratic", "simfbo", *SMALL],
    "sweep": ["sweep", "quadratic", "simfbo", "--grid", "gamma_x=0.01,0.02", "--seeds", "2", *SMALL],
    "tune": ["tune", "quadratic", "simfbo", "--candidates", "2", "--rungs", "1", "--passes", "1", "--seeds", "1", *SMALL],
    "resume": ["resume", "stopped"],
    "compare": ["compare", "run", "stopped"],
    "report": ["report", "run", "sweep"],
    "show": ["show", "simfbo"],
    "new task": ["new", "task", "heat-map"],
    "new algorithm": ["new", "algorithm", "my-method"],
    "list": ["list"],
    "reproduce": ["reproduce", "mine", "--plans", "plans", "--out", "study"],
    "watch": ["watch", "nowhere"],
    "data show": ["data", "show", "data-cleaning"],
    "data fetch": ["data", "fetch", "digits"],
    "federation init": ["federation", "init", "founded", "--sites", "a,a"],
    "federation start": ["federation", "start", "nowhere"],
    "federation revoke": ["federation", "revoke", ".", "nobody"],
    "federation status": ["federation", "status", "nowhere"],
}
ODD = [
    *("", " ", "-", "--", "-1", "0", "1", "1.5", "1e400", "nan", "inf", "-inf", "None", "true", "null", "2147483647"),
    *("2147483648", "-2147483649", "18446744073709551616", "9" * 5000, "1e-400", "0x10", "1_0", "٣", "é💥", "a\nb", "..", "/"),
    *("=", ",", "a=b", "[]", "{}", "%s", "~", "nowhere/at/all", "run", "run/config.json", "x" * 300, "\t"),
    *("\udcff", "\x1b[31m", "'\""),
]
LONG = {"--rounds", "--steps"}  # a long run is no malformed one
SERVING = {"--open", "--ray"}
BROKEN_LINES = [
    ["run"],
    ["run", "quadratic"],
    ["run", "quadratic", ""],
    ["run", "", "simfbo"],
    ["run", "quadratic", "simfbo", "fedbio", "simfbo"],
    ["run", "Quadratic", "SimFBO"],
    ["run", "quadratic", "simfbo", "--rounds"],
    ["run", "quadratic", "simfbo", "--unknown", "3"],
    ["run", "quadratic", "simfbo", "--rounds", "5", "--rounds", "x"],
    ["run", "quadratic", "simfbo", "--rounds=5=6"],
    ["run", "quadratic", "simfbo", "--out", "run"],
    ["run", "quadratic", "simfbo", "fedbio", "--rounds", "5", "--out", "run"],
    ["run", "quadratic", "simfbo", "--rounds", "5", "--out", "sweep"],
    ["run", "quadratic", "simfbo", "--rounds", "5", "--out", "settings.toml"],
    ["run", "quadratic", "simfbo", "--rounds", "5", "--out", "settings.toml/below"],
    ["run", "quadratic", "simfbo", "--rounds", "5", "--out", "/proc/nowhere"],
    ["run", "quadratic", "simfbo", "--rounds", "5", "--out", "/dev/null"],
    ["run", "quadratic", "simfbo", "--settings", "."],
    ["run", "quadratic", "simfbo", "--settings", "run/config.json"],
    ["run", "valley", "simfbo", "--settings", "settings.toml"],
    ["run", "quadratic", "simfbo", "--federation", "run"],
    ["run", "quadratic", "simfbo", "--federation", ".", "--chunk-size", "1"],
    ["run", "few-shot", "simfbo"],
    ["tune", "quadratic"],
    ["tune", "quadratic", "simfbo", "simfbo"],
    ["tune", "quadratic", "simfbo", "--box", "gamma_x"],
    ["tune", "quadratic", "simfbo", "--box", "gamma_x=1"],
    ["tune", "quadratic", "simfbo", "--box", "gamma_x=2:1"],
    ["tune", "quadratic", "simfbo", "--box", "gamma_x=nan:inf"],
    ["tune", "quadratic", "simfbo", "--box", "fedbio.eta=1:2"],
    ["tune", "quadratic", "simfbo", "--rounds", "5", "--out", "run"],
    ["tune", "quadratic", "simfbo", "--rounds", "50", "--out", "sweep"],
    ["sweep", "quadratic", "simfbo"],
    ["sweep", "quadratic", "simfbo", "--grid", "gamma_x"],
    ["sweep", "quadratic", "simfbo", "--grid", "gamma_x="],
    ["sweep", "quadratic", "simfbo", "--grid", "gamma_x=,"],
    ["sweep", "quadratic", "simfbo", "--grid", "+=1"],
    ["sweep", "quadratic", "simfbo", "--grid", "gamma_x+gamma_x=1"],
    ["sweep", "quadratic", "simfbo", "--grid", "gamma_x=0.1", "--out", "run"],
    ["sweep", "quadratic", "simfbo", "--grid", "gamma_x=0.1", "--out", "sweep"],
    ["sweep", "quadratic", "simfbo", "--grid", "local_steps=1,2000000000", "--rounds", "5", "--out", "new"],
    ["sweep", "quadratic", "simfbo", "--grid", f"gamma_x={','.join(str(k / 1e6) for k in range(1, 3000))}", "--seeds", "99"],
    ["run", "mine.py", "simfbo", "--rounds", "5", "--out", "out"],
    ["run", "mine.py", "mine.py"],
    ["run", "mine.py:", "simfbo"],
    ["run", "mine.py:nobody", "simfbo"],
    ["run", "nowhere.py", "simfbo"],
    ["run", "\udcff.py", "simfbo"],
    ["run", "a\nb.py", "simfbo"],
    ["run", f"{'x' * 300}.py", "simfbo"],
    ["run", "~nobody/mine.py", "simfbo"],
    ["run", "quadratic", "/dev/null/mine.py"],
    ["run", "mine.py", "simfbo", "--federation", "."],
    ["run", "mine.py", "simfbo", "--knob", "weight=heavy"],
    ["run", "mine.py", "simfbo", "--knob", "clients=100", "--set", "local_steps=2000000000"],
    ["sweep", "mine.py", "simfbo", "--grid", "weight=1,2,x"],
    ["sweep", "mine.py", "simfbo", "--grid", "weight=1,1.0"],
    ["show", "mine.py:"],
    ["new"],
    ["new", "task", "quadratic"],
    ["new", "task", "../mine"],
    ["new", "algorithm", "class"],
    ["resume"],
    ["resume", "", "--style", "paper"],
    ["resume", "settings.toml"],
    ["resume", "plans"],
    ["resume", "study"],
    ["compare"],
    ["compare", "run", "nowhere"],
    ["compare", "sweep"],
    ["report", "run", "run"],
    ["report", "study"],
    ["report", "run", "--out", "nowhere/page.html"],
    ["report", "run", "--out", "plans"],
    ["reproduce", "../mine", "--plans", "plans"],
    ["reproduce", "mine.toml", "--plans", "plans"],
    ["reproduce", "mine", "--plans", "nowhere"],
    ["reproduce", "mine", "--plans", "plans", "--out", "run"],
    ["reproduce", "mine", "--plans", "plans", "--out", "settings.toml"],
    ["reproduce", "--list", "--plans", "run"],
    ["reproduce", "mine", "--plans", "plans", "--quick", "--tune"],
    ["data"],
    ["data", "show", "quadratic"],
    ["data", "show", "data-cleaning", "--out", "nowhere/x.png"],
    ["data", "fetch", ""],
    ["federation"],
    ["federation", "init", "settings.toml", "--sites", "a"],
    ["federation", "init", "founded", "--sites", ""],
    ["federation", "init", "founded", "--sites", "../a"],
    ["federation", "init", "founded", "--sites", "a", "--port", "99999"],
    ["federation", "init", "founded", "--sites", "a", "--host", "a b"],
    ["federation", "init", ".", "--sites", "a"],
    ["watch", "run", "--port", "-1"],
    ["watch", "run", "--port", "99999"],
]


def cases(seed: int, count: int) -> list[Case]:
    """The broken lines, and that many of all others."""
    chosen = random.Random(seed)
    made = list(dict.fromkeys(tuple(line) for line in (*_options(), *_values(), *_mixtures(chosen))))
    lines = [*map(tuple, BROKEN_LINES), *chosen.sample(made, min(count, len(made)))]
    return [Case(shlex.join(("fedbilevel", *line)), partial(_act, line)) for line in dict.fromkeys(lines)]


def _act(line: tuple[str, ...], folder: Path) -> str:
    return problem(line, folder)


def _options() -> Iterator[list[str]]:
    """Each option of each command, with each odd value."""
    for name, base in BASES.items():
        command: Any = typer.main.get_command(app)
        for part in name.split():
            command = command.commands[part]
        for parameter in command.params:
            flag = getattr(parameter, "is_flag", False)
            for odd in [""] if flag or not parameter.opts[0].startswith("--") else ODD:
                option = parameter.opts[0]
                if flag and option.startswith("--") and option not in SERVING:
                    yield [*base, option]
                elif odd and option.startswith("--") and not (option in LONG and odd == "2147483647"):
                    yield [*_without(base, option), option, odd]


def _without(base: list[str], option: str) -> list[str]:
    """The command without an option's values, since a single one cannot be given twice."""
    kept, k = [], 0
    while k < len(base):
        if base[k] == option and option not in ("--knob", "--set", "--grid"):
            k += 2
        else:
            kept.append(base[k])
            k += 1
    return kept


def _values() -> Iterator[list[str]]:
    """Each hyperparameter of each algorithm and each knob of each task, with each odd value."""
    for name, entry in ALGORITHMS.items():
        if entry.load().own_x:
            continue  # quadratic has no such x; its hyperparameters are FedPace's
        level = [] if entry.load().lower_level == "global" else ["--knob", "lower_level=local"]
        for field in settings(entry.load()):
            for odd in ODD:
                yield ["run", "quadratic", name, *SMALL[:-4], *level, "--steps", "2", "--out", "out", "--set", f"{field}={odd}"]
    for task, entry in TASKS.items():
        if task == "label-errors":
            continue  # it needs tables
        for field in settings(entry.load()):
            for odd in ODD:
                yield ["run", task, _suited(task), "--steps", "1", "--out", "out", "--knob", f"{field}={odd}"]


def _suited(task: str) -> str:
    return {"valley": "mefbo", "few-shot": "fedbio-local"}.get(task, "simfbo")


def _mixtures(chosen: random.Random) -> Iterator[list[str]]:
    """Two odd things at once."""
    single = [line for line in _options() if line[0] in ("run", "sweep")]
    for _ in range(200):
        one, other = chosen.sample(single, 2)
        yield [*one, *other[-2:]]
