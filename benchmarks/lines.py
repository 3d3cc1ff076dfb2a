"""Lines of a reproduction by several processes at once, which may share a GPU.

    python benchmarks/lines.py ours OUT --methods FedPace,FedMSA [--processes 8] [--data FOLDER]

What is finished in OUT is not run again. `fedbilevel reproduce ours --methods FedPace,FedMSA --out OUT --publish` then makes
table and picture, with the stored numbers of the other methods.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from pathlib import Path


def run(name: str, out: Path, data: str, panel: str, method: str) -> str:
    """Run a line."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from fedbilevel.runs.reproductions.plan import read
    from fedbilevel.runs.reproductions.study import Study
    from fedbilevel.tasks.data.datasets import data_folder

    study = Study(read(name), out, data_folder(data))
    study.run_line(*next(line for line in study.lines() if (line[0].name, line[1].name) == (panel, method)))
    return f"{panel}, {method}"


def main() -> None:
    """Read the command line, and run lines; a line that fails leaves the others alone."""
    from fedbilevel.runs.reproductions.plan import read

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", required=True)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--data", default="")
    given = parser.parse_args()
    wanted = given.methods.split(",")
    lines = [(p.name, m.name) for p, m in read(given.name).lines() if m.name in wanted]
    lines.sort(key=lambda line: wanted.index(line[1]))
    failed = []
    with multiprocessing.get_context("spawn").Pool(given.processes, maxtasksperchild=4) as pool:
        begun = {line: pool.apply_async(run, (given.name, given.out, given.data, *line)) for line in lines}
        for line, result in begun.items():
            try:
                print(result.get(), flush=True)
            except Exception as error:
                failed.append(line)
                print(*line, "failed:", error, flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(lines)} lines failed: run the same command again")


if __name__ == "__main__":
    main()
