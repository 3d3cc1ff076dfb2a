"""What several commands take from their command line."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import InputError
from fedbilevel.registry import find
from fedbilevel.settings import nearest, settings
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.data.datasets import existing_folder
from fedbilevel.user_files import Scalar, naming, read_toml

console = Console(highlight=False, markup=False, width=None if sys.stdout and sys.stdout.isatty() else 120)


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def target(text: str) -> Path:
    """A folder to write."""
    if not text.strip():
        raise typer.BadParameter("it is empty: name a folder, or leave the option out")
    return Path(text)


METAVARS = {"whole": "N", "number": "P", "target": "DIR"}


def option(parser: Callable[[str], Any], help: str) -> Any:
    """An option whose value is parsed."""
    return typer.Option(parser=parser, metavar=METAVARS[parser.__name__], help=help)


TaskName = Annotated[str, typer.Argument(help="What to solve; 'fedbilevel list' names the tasks.")]
Rounds = Annotated[int | None, option(whole, "Budget of communication rounds, the same for every algorithm. [1000]")]
Steps = Annotated[int | None, option(whole, "Number of outer steps instead of rounds.")]
ClientsPerRound = Annotated[int | None, option(whole, "How many clients take part in a round; all unless given.")]
ByChance = Annotated[float | None, option(number, "Probability that a client takes part, instead of a number.")]
Dropout = Annotated[float | None, option(number, "Probability that a drawn client drops out.")]
Knobs = Annotated[list[str] | None, typer.Option("--knob", help="Setting of the task, NAME=VALUE.")]
Every = Annotated[int, option(whole, "Rounds between two evaluations of the metrics.")]
ChunkSize = Annotated[int | None, option(whole, "Clients computed at once, to bound memory.")]
Products = Annotated[str, typer.Option(help="Arithmetic of matrix products on a GPU: default, float32, or bfloat16.")]
LossBound = Annotated[float, option(number, "A loss above this counts as divergence.")]
Data = Annotated[str, typer.Option(help="Folder of data sets, looked into before $FEDBILEVEL_DATA and your cache folder.")]
Out = Annotated[Path | None, option(target, "Folder to write; a new one under runs/ unless given.")]
Look = Annotated[str, typer.Option(help="Style of the pictures: screen, or paper (ready for publication).")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing run or sweep in the folder.")]


def budget(rounds: int | None, steps: int | None) -> dict[str, Any]:
    """Rounds or steps; 1,000 rounds if neither is given."""
    if rounds is not None and steps is not None:
        raise InputError("give either --rounds or --steps, not both")
    return {"rounds": 1000 if rounds is None and steps is None else rounds, "steps": steps}


def data_folder(given: str) -> str:
    """The folder in full, if one is given."""
    return str(existing_folder(given).resolve()) if given else ""


def assignments(option: str, texts: list[str] | None) -> dict[str, str]:
    """An option's NAME=VALUE pairs as a dictionary."""
    pairs: dict[str, str] = {}
    for text in texts or []:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InputError(f"{text!r} is not of the form NAME=VALUE")
        if name in pairs:
            raise InputError(f"{option} gives {name} twice, as {pairs[name]} and as {value}: give it once")
        pairs[name] = value
    return pairs


def by_algorithm(algorithms: list[str], texts: list[str] | None) -> dict[str, dict[str, Any]]:
    """Each algorithm's own values: what is set for it by name wins over what is set for all that have such a field."""
    fields = {name: settings(ALGORITHMS[name].load()) for name in algorithms}
    values: dict[str, dict[str, Any]] = {name: {} for name in algorithms}
    for name, value in sorted(assignments("--set", texts).items(), key=lambda pair: "." in pair[0]):
        owner, dot, field = name.rpartition(".")
        if dot and owner not in values:
            raise InputError(f"--set {name}: {owner!r} is not among the algorithms {', '.join(algorithms)}")
        takers = [owner] if dot else [a for a in algorithms if field in fields[a]]
        known = list(dict.fromkeys(f for a in ([owner] if dot else algorithms) for f in fields[a]))
        if field not in known:
            raise InputError(f"{owner or ' and '.join(algorithms)} has no hyperparameter {field!r}{nearest(field, known)}")
        for taker in takers:
            values[taker][field] = value
    return values


@dataclass(frozen=True)
class Settings:
    """What a file of settings holds: a task, `[knobs]`, and `[hyperparameters.ALGORITHM]`."""

    task: str = ""
    knobs: Mapping[str, Scalar] = field(default_factory=dict)
    hyperparameters: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.hyperparameters.items():
            find(ALGORITHMS, "algorithm", name).configure(name, values)

    @classmethod
    def read(cls, path: Path | None, task: str | None = None) -> Settings:
        """From a file, if one is given, for a task; `InputError` if it is for another."""
        read = read_toml(path, cls) if path else cls()
        if path and task is not None:
            with naming(path):
                if read.task not in ("", task):
                    raise InputError(f"it is for {read.task}, not for {task}")
                find(TASKS, "task", task).configure(task, read.knobs)
        return read

    def of(self, algorithm: str) -> Mapping[str, Scalar]:
        """The hyperparameters of an algorithm."""
        return self.hyperparameters.get(algorithm, {})


SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="TOML file with [knobs] and [hyperparameters.ALGORITHM], as sweeps write.")
]


def new_folder(name: str) -> Path:
    """A folder under runs/ that is not there yet."""
    stamp = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return next(p for k in range(1000) if not (p := stamp.with_name(f"{stamp.name}{f'-{k}' if k else ''}")).exists())


def note_changes(began: Path, changes: str) -> None:
    """Say what is not as it was when something that now goes on began, if anything is."""
    if changes:
        console.print(
            f"note: {began} began with {changes}: bits may differ from those of one uninterrupted run", soft_wrap=True
        )


def fail(message: str, code: int) -> NoReturn:
    """End the program with a line on stderr."""
    print(f"fedbilevel: {message}", file=sys.stderr)
    sys.exit(code)


def picture_path(path: Path) -> Path:
    """The path, if a picture can be written under such a name."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"the picture's name must end in .png, .svg or .pdf; given: {path}")
    return path
