"""The command run in this process, and how it must end: well, or in one line that leaves nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedbilevel.command import main

LONGEST = 2000  # characters of a line


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str
    raised: str = ""  # what it should have said in a line


def ended(arguments: Sequence[str], folder: Path) -> Ended:
    """Run the command in a folder."""
    out, err, before, raised, code = io.StringIO(), io.StringIO(), Path.cwd(), "", 0
    os.chdir(folder)
    sys.argv = ["fedbilevel", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else -1
    except BaseException:
        raised = traceback.format_exc(limit=-3)
    finally:
        os.chdir(before)
    return Ended(code, out.getvalue(), err.getvalue(), raised)


def problem(arguments: Sequence[str], folder: Path) -> str:
    """What is wrong with how the command ends, or nothing."""
    before = content(folder)
    end = ended(arguments, folder)
    if end.raised:
        return end.raised
    if "Traceback" in end.out + end.err:
        return f"a traceback is shown: {end.out[-500:]}{end.err[-500:]}"
    if end.code == 0:
        return f"it succeeds and complains: {end.err[:500]}" if end.err else ""
    if end.code not in (1, 2):
        return f"it ends with code {end.code}: {end.err[:500]}"
    if not end.err.startswith("fedbilevel: ") or end.err.count("\n") != 1 or len(end.err) > LONGEST:
        return f"it ends with code {end.code}, and not in one line: {end.err[:1000]!r}"
    if end.code == 2 and (after := content(folder)) != before:
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        return f"it refuses ({end.err.strip()[:300]}) and leaves {', '.join(changed[:5])} behind"
    return ""


def content(folder: Path) -> dict[str, str]:
    """All that is below a folder, by path."""
    return {str(path.relative_to(folder)): _of(path) for path in sorted(folder.rglob("*"))}


def _of(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
