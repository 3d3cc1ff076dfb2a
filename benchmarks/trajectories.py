"""Check that a change leaves every number as it was: compare trajectories of all algorithms bit for bit between two commits.

python benchmarks/trajectories.py record FILE     runs the matrix and writes the results
python benchmarks/trajectories.py compare FILE    runs it again and says what differs

The matrix: every algorithm on the noisy quadratic, simulated with sampled cohorts and dropouts; all but the centralised ones
on clients behind a loopback transport; small runs of four other tasks; a sweep; and a run that is interrupted and resumed. It
compares every row of metrics except its seconds, or of traffic behind the transport, and the last x, which sweeps lack.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.algorithms import ALGORITHMS

NOISY = ("--knob", "noise=0.3", "--knob", "clients=6", "--every", "10", "--seed", "7")
SAMPLED = ("--clients-per-round", "4", "--dropout", "0.2")
OTHERS = {
    "data-cleaning": ("fedbioacc", "simfbo", "mefbo", "fedavg"),
    "hyper-representation": ("simfbo", "fbo-aggitd", "adafbio"),
    "loss-tuning": ("fednest", "mefbo"),
    "regularisation": ("fedbio", "commfedbio", "stocbio"),
}


def by_lower_level() -> dict[str, list[str]]:
    """The names of all algorithms for an x that clients share, by whose problem y solves."""
    names: dict[str, list[str]] = {"global": [], "local": []}
    for name, entry in ALGORITHMS.items():
        if not entry.load().own_x:
            names[entry.load().lower_level].append(name)
    return names


def command(*arguments: str, interrupted_once: Path | None = None) -> None:
    """Run `fedbilevel`; where a file is given, interrupt it as Ctrl-C would a second after that file has appeared."""
    process = subprocess.Popen([sys.executable, "-m", "fedbilevel", *arguments], stdout=subprocess.DEVNULL)
    if interrupted_once is not None:
        while process.poll() is None and not interrupted_once.exists():
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    code = process.wait()
    if code != (0 if interrupted_once is None else 128 + signal.SIGINT):
        sys.exit(f"fedbilevel {' '.join(arguments)}: exit code {code}")


def folders(path: Path) -> Iterator[tuple[str, Any]]:
    """Of each run below: its metrics, and the bytes of its x."""
    for folder in sorted(p.parent for p in path.glob("*/metrics.jsonl")):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        yield folder.name, {"rows": [without_time(row) for row in rows], "x": digest(np.load(folder / "x.npy"))}


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    """All that must not change."""
    return {name: value for name, value in row.items() if name != "seconds"}


def digest(array: Any) -> str:
    """Equal for equal bits alone."""
    array = np.asarray(array)
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def simulated(work: Path) -> Iterator[tuple[str, Any]]:
    for lower, names in by_lower_level().items():
        out = work / lower
        level = ("--knob", f"lower_level={lower}")
        command("run", "quadratic", *names, "--rounds", "60", *NOISY, *SAMPLED, *level, "--out", str(out))
        yield from ((f"simulated/{name}", found) for name, found in folders(out))
    for task, algorithms in OTHERS.items():
        command("run", task, *algorithms, "--rounds", "30", "--every", "10", "--out", str(work / task))
        yield from ((f"{task}/{name}", found) for name, found in folders(work / task))


def deployed(work: Path) -> Iterator[tuple[str, Any]]:
    from fedbilevel.core.participation import Uniform
    from fedbilevel.engines.call_shapes import call_shapes
    from fedbilevel.engines.client_runtime import ClientRuntime
    from fedbilevel.engines.deployed import DeployedEngine
    from fedbilevel.engines.loopback import Loopback
    from fedbilevel.tasks.quadratic import Quadratic

    for lower, names in by_lower_level().items():
        task = Quadratic(noise=0.3, clients=5, lower_level=lower).build()  # type: ignore[arg-type]
        population = task.population
        for name in names:
            algorithm = ALGORITHMS[name].configure(name, {})
            if algorithm.pooled:
                continue
            known = call_shapes(algorithm, population, task.x, task.y)
            runtimes = {m: ClientRuntime(algorithm, population.only(m), m, 1.0, known) for m in range(population.size)}
            engine = DeployedEngine(Loopback(runtimes), population, Uniform(3), known)
            key = jax.random.key(11)
            state, totals, *_ = engine.init(algorithm, task.x, task.y, jax.random.fold_in(key, 0))
            traffic = [totals._asdict()]
            for t in range(1, 4):
                state, totals, *_ = engine.step(algorithm, state, jax.random.fold_in(key, t))
                traffic.append(totals._asdict())
            yield f"deployed/{name}", {"rows": traffic, "x": digest(state.x)}


def swept(work: Path) -> Iterator[tuple[str, Any]]:
    out = work / "sweep"
    grid = ("--grid", "gamma_x=0.01,0.02,0.05", "--grid", "gamma_y=0.2,0.5", "--seeds", "2")
    command("sweep", "quadratic", "simfbo", "--rounds", "60", "--every", "20", *grid, "--out", str(out))
    for line in (out / "results.jsonl").read_text().splitlines():
        run = json.loads(line)
        yield f"sweep/{run['cell']} {run['seed']}", {"rows": [without_time(row) for row in run["rows"]], "x": ""}


def resumed(work: Path) -> Iterator[tuple[str, Any]]:
    out = work / "resumed"
    options = ("--rounds", "400000", "--every", "100000", "--knob", "noise=0.3")
    folder = out / "simfbo"
    command("run", "quadratic", "simfbo", *options, "--out", str(out), interrupted_once=folder / "metrics.jsonl")
    if not (folder / "checkpoint").exists() or (folder / "result.json").exists():
        sys.exit("the run that is to be resumed was not interrupted on its way")
    command("resume", str(out))
    yield from ((f"resumed/{name}", found) for name, found in folders(out))


def matrix() -> dict[str, Any]:
    """Everything that must stay as it is, by name."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in (simulated, deployed, swept, resumed):
            found |= dict(part(Path(folder)))
            print(f"{part.__name__}: {len(found)} trajectories so far", flush=True)
    return json.loads(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    found = matrix()
    if given.what == "record":
        given.file.write_text(json.dumps(found, indent=1) + "\n")
        return
    before = json.loads(given.file.read_text())
    different = [name for name in before if differs(before[name], found.get(name))]
    for name in different:
        print(f"differs: {name}")
    print(f"{len(before) - len(different)} of {len(before)} trajectories are bit-identical")
    sys.exit(1 if different else 0)


def differs(before: dict[str, Any], now: dict[str, Any] | None) -> bool:
    """Whether a number of before is another one now; numbers that were not there before may have come."""
    if now is None or before["x"] != now["x"] or len(before["rows"]) != len(now["rows"]):
        return True
    pairs = zip(before["rows"], now["rows"], strict=True)
    return any(old != {k: new.get(k) for k in old} for old, new in pairs)


if __name__ == "__main__":
    main()
