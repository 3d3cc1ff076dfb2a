"""The command. Heavy imports wait until a command needs them, so that `--help` and `list` answer at once."""

from __future__ import annotations

import io
import signal
import sys
import warnings
from typing import Annotated, TextIO

import typer
from typer.exceptions import TyperException

from fedbilevel.command import clean, compilation, data, federation, new, report, reproduce, run, show, sweep, tune
from fedbilevel.command.options import LONGEST, fail, say, warn, when_a_pipe_closes
from fedbilevel.errors import Advice, Diverged, FolderTaken, InputError, in_one_line, in_words, place

STOPPED = 128 + signal.SIGINT  # the exit code after Ctrl-C
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("run")(run.run)
app.command("clean")(clean.clean)
app.command("demo")(run.demo)
app.command("resume")(run.resume)
app.command("compare")(report.compare)
app.command("list")(show.list_)
app.command("show")(show.show)
app.command("sweep")(sweep.sweep)
app.command("tune")(tune.tune)
app.command("reproduce")(reproduce.reproduce)
app.command("report")(report.report)
app.command("watch")(report.watch)
GROUPS = {"data": data.app, "federation": federation.app, "new": new.app}
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def _version(asked: bool) -> None:
    if asked:
        import fedbilevel

        say(f"fedbilevel {fedbilevel.__version__}")
        raise typer.Exit


@app.callback()
def _command(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Federated bilevel optimization: run algorithms on tasks, compare them, and deploy them."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Say the package's own advice in one line, and show other warnings as Python does."""
    if issubclass(category, Advice):
        warn(in_one_line(message, LONGEST))
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)


def main() -> None:
    """Run the command; what the user can fix, also in their own code, is reported in one line, with exit code 2."""
    when_a_pipe_closes(signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it is None if it was closed
            stream.reconfigure(errors="backslashreplace")  # file names need not be text, and a terminal may not know η
    compilation.set_up()
    warnings.showwarning = _show_warning
    if len(sys.argv) == 1 or (len(sys.argv) == 2 and sys.argv[1] in GROUPS):
        sys.argv.append("--help")
    try:
        if app(standalone_mode=False) == STOPPED:  # Typer's exit code for Ctrl-C
            raise KeyboardInterrupt
    except FolderTaken as error:
        fail(in_one_line(f"{error} with --out{', or replace it with --force' if error.replaceable else ''}", LONGEST), 2)
    except InputError as error:
        fail(in_one_line(error, LONGEST), 2)
    except TyperException as error:
        fail(in_one_line(error.format_message(), LONGEST), 2)
    except Diverged as error:
        fail(str(error), 1)
    except OSError as error:
        fail(f"{error.filename or 'the file system'}: {error.strerror or error}", 1)
    except typer.Abort as error:  # Typer turns EOFError into this, though no user has stopped anything
        raise error.__cause__ or error from None
    except KeyboardInterrupt:
        fail("stopped", STOPPED)
    except Exception as error:
        at = place(error)
        if not at:
            raise
        fail(in_one_line(f"{at}{in_words(error)}", LONGEST), 2)
