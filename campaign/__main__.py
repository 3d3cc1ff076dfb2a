"""Run the campaign: `python -m campaign [--seed N] [--only TEXT] [--part inputs|calls|kills] [--every N]`.

It prints each failure with the command that repeats it, and one line of counts; it fails if there is any failure.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path

from campaign.case import Case
from campaign.parts import PARTS, listing

TESTS = Path(__file__).parent.parent / "tests"


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="chooses other cases")
    parser.add_argument("--only", default="", help="run the cases whose names contain this text")
    parser.add_argument("--part", choices=PARTS, help="run one part")
    parser.add_argument("--every", type=int, default=1, help="run one in so many cases")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # some cases are no text
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        made = _prepared(Path(scratch))
        from campaign.workers import failures

        counts, found = {}, 0
        for part in PARTS if given.part is None else (given.part,):
            listed = partial(listing, part, given.seed, made)
            cases = [case for case in listed() if given.only in case.name][:: given.every]
            counts[part] = len(cases)
            found += failures(listed, cases, made, given.workers, partial(_say, f"--seed {given.seed} --part {part}"))
    print(f"campaign: {', '.join(f'{n} {PARTS[part]}' for part, n in counts.items())}: {found} failures")
    sys.exit(bool(found))


def _say(chosen: str, case: Case, problem: str) -> None:
    again = f"python -m campaign {chosen} --only {shlex.quote(case.name)}"
    print(f"FAILED {case.shown or case.name}\n{problem.strip()}\nagain: {again}\n", flush=True)


def _prepared(scratch: Path) -> Path:
    """The folder that all cases have copies of; the workers inherit the environment."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    os.environ["XDG_STATE_HOME"] = str(scratch / "state")
    os.environ.pop("FEDBILEVEL_DATA", None)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(scratch / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    from campaign.folders import made

    folder = scratch / "made"
    folder.mkdir()
    made(folder)
    return folder


if __name__ == "__main__":
    main()
