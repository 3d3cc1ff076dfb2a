"""The commands `fedbilevel new ...`: a small installable project with a task or an algorithm to start from."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.command.options import option, say, target
from fedbilevel.errors import InputError
from fedbilevel.registry import Registry
from fedbilevel.tasks import TASKS

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Start a project with your own task or algorithm.")

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

Name = Annotated[str, typer.Argument(help="Its name: lower-case letters, digits and dashes.", metavar="NAME")]
Folder = Annotated[Path | None, option(target, "Folder of the project; NAME unless given.")]


@app.command()
def task(name: Name, out: Folder = None) -> None:
    """Write a project with a task: its file, a test, and what makes it installable."""
    _write(TASKS, name, name.replace("-", "_"), out, "{} simfbo")


@app.command()
def algorithm(name: Name, out: Folder = None) -> None:
    """Write a project with an algorithm: its file, a test, and what makes it installable."""
    _write(ALGORITHMS, name, "".join(map(str.capitalize, name.split("-"))), out, "quadratic {}")


def _write(table: Registry, name: str, defined: str, out: Path | None, arguments: str) -> None:
    module, folder = name.replace("-", "_"), out or Path(name)
    if not NAME.fullmatch(name):
        raise InputError(
            f"the name must consist of lower-case letters, digits and dashes, as in my-{table.kind}; given: {name}"
        )
    if name in table:
        raise InputError(
            f"there already is a {table.kind} {name!r}, in {table[name].package or 'fedbilevel'}: choose another name"
        )
    if keyword.iskeyword(module) or importlib.util.find_spec(module) is not None:
        raise InputError(f"there already is a Python module or keyword {module!r}: choose another name")
    if folder.exists():
        raise InputError(f"{folder} already exists: choose another --out")
    words = name.replace("-", " ")
    values = {
        "name": name,
        "module": module,
        "object": defined,
        "kind": table.kind,
        "title": words.capitalize(),
        "summary": f"The {table.kind} {words}",
        "in_file": arguments.format(f"{module}.py"),
        "by_name": arguments.format(name),
    }
    written = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{module}.py": f"{table.kind}.py",
        f"test_{module}.py": f"test_{table.kind}.py",
    }
    templates = Path(__file__).parent / "templates"
    folder.mkdir(parents=True)
    for file, template in written.items():
        text = (templates / f"{template}.txt").read_text(encoding="utf-8")
        (folder / file).write_text(Template(text).substitute(values), encoding="utf-8")
    say(f"written: {', '.join(str(folder / file) for file in written)}")
    say(f"try it: cd {shlex.quote(str(folder))} && fedbilevel run {values['in_file']} --rounds 200")
