"""What several commands share: their options, and how they print."""

from __future__ import annotations

import datetime
import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from fedbilevel.aggregations import AGGREGATIONS, parts, written
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import InputError
from fedbilevel.own_code import label
from fedbilevel.registry import chosen, find, for_each, in_full
from fedbilevel.tasks import TASKS
from fedbilevel.user_files import Scalar, naming, read_toml

LONGEST = 1999  # characters of a message, which may quote any input
console = Console(highlight=False, markup=False, width=None if sys.stdout and sys.stdout.isatty() else 120)


def say(line: str) -> None:
    """Print text whose lines may be longer than the screen is wide."""
    console.print(line, soft_wrap=True)


def say_table(lines: list[list[str]]) -> None:
    """Print a table of numbers, whose first line is its heading."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in lines[0]:
        table.add_column(name, justify="right")
    for line in lines[1:]:
        table.add_row(*line)
    console.print(table)


def say_json(value: Any) -> None:
    """Print a value for other programs."""
    print(json.dumps(value, indent=2, allow_nan=False))


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
    """The path of a folder to write."""
    if not text.strip():
        raise typer.BadParameter("it is empty: name a folder, or leave the option out")
    return Path(text)


METAVARS = {"whole": "N", "number": "NUMBER", "target": "DIR"}


def option(parser: Callable[[str], Any], help: str) -> Any:
    """An option whose value is parsed."""
    return typer.Option(parser=parser, metavar=METAVARS[parser.__name__], help=help)


def completing(*tables: Mapping[str, Any]) -> Callable[[str], list[str]]:
    """What a shell may put for the beginning of a name in one of the tables."""
    return lambda incomplete: [name for table in tables for name in table if name.startswith(incomplete)]


TaskName = Annotated[
    str,
    typer.Argument(
        help="What to solve: a name in 'fedbilevel list', or your own FILE.py or FILE.py:NAME.",
        autocompletion=completing(TASKS),
    ),
]
Rounds = Annotated[int | None, option(whole, "Budget of communication rounds, the same for every algorithm. [1000]")]
Steps = Annotated[int | None, option(whole, "Number of outer steps instead of rounds.")]
ClientsPerRound = Annotated[int | None, option(whole, "How many clients take part in a round; all unless given.")]
ByChance = Annotated[float | None, option(number, "Probability that a client takes part, instead of a number of clients.")]
Dropout = Annotated[float | None, option(number, "Probability that a drawn client drops out.")]
Weights = Annotated[
    str | None,
    typer.Option(
        help="How much each client counts: equal, rows, or numbers such as 2,1,1. The task's own unless given, which are equal "
        "unless it has any.",
    ),
]
Knobs = Annotated[list[str] | None, typer.Option("--knob", help="Setting of the task, NAME=VALUE.")]
Every = Annotated[int, option(whole, "Rounds between two evaluations of the metrics.")]
ChunkSize = Annotated[int | None, option(whole, "Clients computed at once, to bound memory.")]
Products = Annotated[str, typer.Option(help="Arithmetic of matrix products on a GPU: default, float32, or bfloat16.")]
LossBound = Annotated[float, option(number, "A loss above this counts as divergence.")]
Data = Annotated[str, typer.Option(help="Folder of data sets, searched before $FEDBILEVEL_DATA and your cache folder.")]
Aggregate = Annotated[
    str,
    typer.Option(
        help="How the server aggregates answers: a name in 'fedbilevel list', or your own FILE.py:NAME.",
        autocompletion=completing(AGGREGATIONS),
    ),
]
AggregateSettings = Annotated[list[str] | None, typer.Option("--set-aggregate", help="Setting of the aggregation, NAME=VALUE.")]
Epsilon = Annotated[
    float | None, option(number, "Keep every row of the clients private: ε of the whole run, to which noise is calibrated.")
]
Delta = Annotated[float | None, option(number, "δ, with --epsilon. [1e-5]")]
PrivacySettings = Annotated[list[str] | None, typer.Option("--set-privacy", help="Setting of the privacy, NAME=VALUE.")]
Attackers = Annotated[
    str, typer.Option("--attack", help="Clients that lie: sign-flip:2, ipm:2, alie:2, noise:2, label-flip:2.")
]
Arrivals = Annotated[
    str,
    typer.Option(
        "--arrivals", help="When answers come, with --aggregate buffered: lognormal:SIGMA, or the arrivals.jsonl of a run."
    ),
]
KeepBest = Annotated[
    bool | None,
    typer.Option(
        "--keep-best/--no-keep-best",
        help="End with the recorded round that is best on one in five of each client's upper rows, held out of the losses. "
        "Unless given, only where no algorithm is named and x may be fitted to few rows.",
        show_default=False,
    ),
]
RankBy = Annotated[
    str,
    typer.Option(
        "--by",
        help="The metric to rank by. Unless given, the task's own on validation rows, which are held out of the losses.",
    ),
]
Out = Annotated[Path | None, option(target, "Folder to write; a new one under runs/ unless given.")]
Look = Annotated[str, typer.Option(help="Style of the pictures: screen, or paper (ready for publication).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs, instead of text.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing run, sweep or tuning in the folder.")]


def budget(rounds: int | None, steps: int | None) -> dict[str, Any]:
    """Rounds or steps; 1,000 rounds if neither is given."""
    if rounds is not None and steps is not None:
        raise InputError("give either --rounds or --steps, not both")
    return {"rounds": 1000 if rounds is None and steps is None else rounds, "steps": steps}


def aggregation(rule: str, texts: list[str] | None) -> str:
    """The rule and its settings as a run's options have them."""
    name, values = parts(rule)
    return written(chosen(AGGREGATIONS, name), {**values, **assignments("--set-aggregate", texts)})


def privacy(epsilon: float | None, delta: float | None, texts: list[str] | None) -> str:
    """What keeps rows private, as a run's options have it; nothing if none of these is given."""
    from fedbilevel.runs.options import ROWS

    given = {name: str(value) for name, value in (("epsilon", epsilon), ("delta", delta)) if value is not None}
    others = assignments("--set-privacy", texts)
    for name in given.keys() & others.keys():
        raise InputError(f"{name} is given by --{name} and by --set-privacy: leave one out")
    values = {**given, **others}
    return written(ROWS, values) if values else ""


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


def by_algorithm(algorithms: list[str], texts: list[str] | None, option: str = "--set") -> dict[str, dict[str, Any]]:
    """Each algorithm's own values: what is set for it by name overrides what is set for all that have such a field."""
    return for_each(ALGORITHMS, algorithms, assignments(option, texts), option)


@dataclass(frozen=True)
class Settings:
    """What a file of settings holds: a task, `[knobs]`, and `[hyperparameters.ALGORITHM]`."""

    task: str = ""
    knobs: Mapping[str, Scalar] = field(default_factory=dict)
    hyperparameters: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        in_full_names = {in_full(ALGORITHMS, name): values for name, values in self.hyperparameters.items()}
        for name, values in in_full_names.items():
            find(ALGORITHMS, "algorithm", name).configure(label(name), values)
        object.__setattr__(self, "hyperparameters", in_full_names)

    @classmethod
    def read(cls, path: Path | None, task: str | None = None) -> Settings:
        """The settings in a file, if one is given; `InputError` if they are for another task."""
        read = read_toml(path, cls) if path else cls()
        if path and task is not None:
            with naming(path):
                if read.task and in_full(TASKS, read.task) != task:
                    raise InputError(f"it is for {read.task}, not for {task}")
                find(TASKS, "task", task).configure(label(task), read.knobs)
        return read

    def of(self, algorithm: str) -> Mapping[str, Scalar]:
        """The hyperparameters of an algorithm."""
        return self.hyperparameters.get(algorithm, {})

    def say_if_unused(self, path: Path | None, algorithms: Iterable[str]) -> None:
        """Print a note if the file has hyperparameters, and none of them for these algorithms."""
        if self.hyperparameters and not any(map(self.of, algorithms)):
            others, these = (" and ".join(map(label, names)) for names in (self.hyperparameters, algorithms))
            say_note(f"{path} has hyperparameters for {others}, and none for {these}")


SettingsFile = Annotated[
    Path | None,
    typer.Option("--settings", help="TOML file with [knobs] and [hyperparameters.ALGORITHM], as sweep and tune write."),
]


def new_folder(*names: str) -> Path:
    """A folder under runs/ that does not exist yet."""
    stamp = Path("runs") / f"{'-'.join(map(label, names))}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return next(p for k in range(1000) if not (p := stamp.with_name(f"{stamp.name}{f'-{k}' if k else ''}")).exists())


def say_note(note: str) -> None:
    """Print a note, if there is one."""
    if note:
        say(f"note: {note}")


def when_a_pipe_closes(action: signal.Handlers) -> None:
    """Choose what happens when the reader of our output goes away; Windows has no such signal."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, action)


def warn(message: str) -> None:
    """Print a line on stderr about a problem that does not stop the command."""
    print(f"fedbilevel: warning: {message}", file=sys.stderr)


def fail(message: str, code: int) -> NoReturn:
    """End the program with a line on stderr."""
    print(f"fedbilevel: {message}"[:LONGEST], file=sys.stderr)
    sys.exit(code)


def picture_path(path: Path) -> Path:
    """The path; `InputError` unless its name is that of a picture."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"the picture's name must end in .png, .svg or .pdf; given: {path}")
    return path
