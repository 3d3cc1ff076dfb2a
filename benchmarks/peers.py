"""FedAvg beside other simulators of federations: `make bench-peers`.

10 of 100 clients train an MLP 784-200-10 with five local steps of 64 rows and a step size of 0.1 in a round. The others have
the same ten clients in each round and the same minibatches, and must reach the same loss; ours draws both by itself, from the
same rows, and must come as near to it as drawing allows. Each runs in a process and an environment of its own; all take turns.

    python benchmarks/peers.py [--install] [--rounds N] [PEER ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import papers  # noqa: F401 (compiles as the command does)
import timing
from peer import BATCH, LOCAL_STEPS, STEP, Data

import fedbilevel as fb
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.base import Task

HERE, ENVIRONMENTS = Path(__file__).parent, Path("build/peers")
PINNED = {  # what each needs in its environment; none: ours
    "fedjax": ["fedjax==0.0.17", "jax==0.10.2"],
    "pfl": ["pfl[pytorch]==0.4.0"],
    "flower": ["flwr[simulation]==1.20.0", "torch==2.13.0"],
    "torch": [],
}
CLIENTS, COHORT, CHECKED = 100, 10, 50
TURNS, WARM = 5, 3  # rounds before the first turn
SAME, DRAWN = 1e-3, 0.1  # how far losses may be apart, relative to how far they fell: the same minibatches, and others


def generated() -> Data:
    """Noisy patterns of ten classes, and weights to start from."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, (CLIENTS, LOCAL_STEPS * BATCH), dtype=np.int32)
    images = 0.05 * rng.standard_normal((10, 784))[labels] + 0.3 * rng.standard_normal((*labels.shape, 784))
    cohorts = np.stack([rng.permutation(CLIENTS)[:COHORT] for _ in range(1000)])
    weights = [rng.standard_normal(shape) * (2 / shape[0]) ** 0.5 for shape in ((784, 200), (200, 10))]
    w1, w2 = (w.astype(np.float32) for w in weights)
    return Data(images.astype(np.float32), labels, cohorts, w1, np.zeros(200, np.float32), w2, np.zeros(10, np.float32))


def ours(data: Data) -> Experiment:
    """The same federation here."""

    def loss(x: Any, y: Any, rows: Any) -> Any:
        w1, b1, w2, b2 = y
        logits = jax.nn.relu(rows["images"] @ w1 + b1) @ w2 + b2
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), rows["labels"][:, None], 1))

    rows = [{"images": i, "labels": k} for i, k in zip(data.images, data.labels, strict=True)]
    start = (data.w1, data.b1, data.w2, data.b2)
    task = Task.of(loss, loss, jnp.zeros(1), start, lower=rows, upper=rows, batch_size=BATCH)
    return simulation(task, fb.FedAvg(gamma=STEP, local_steps=LOCAL_STEPS), clients_per_round=COHORT, steps=1)


class Ours:
    """Answers as a peer does."""

    def __init__(self, data: Data):
        self._data, self._experiment, self._programs = data, ours(data), {}

    def run(self, rounds: int) -> dict[str, float]:
        engine, algorithm, task = self._experiment.engine, self._experiment.algorithm, self._experiment.task
        key = jax.random.key(0)
        state, *_ = jax.jit(type(engine).init)(engine, algorithm, task.x, task.y, key)
        if rounds not in self._programs:
            self._programs[rounds] = timing.run_steps.lower(engine, algorithm, state, key, rounds).compile()
        reached: list[Any] = []
        seconds = timing.seconds(lambda: reached.append(self._programs[rounds](engine, algorithm, state, key)) or reached[0])
        return {"seconds": seconds, "loss": self._data.loss(*map(np.asarray, task.y_tree(reached[0].y)))}


class Peer:
    """A process that trains when it is told to."""

    def __init__(self, name: str, file: Path):
        python = ENVIRONMENTS / name / "bin" / "python" if PINNED[name] else Path(sys.executable)
        command = [str(python), str(HERE / f"peer_{name}.py"), str(file)]
        pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._process = subprocess.Popen(command, text=True, **pipes)

    def run(self, rounds: int) -> dict[str, float]:
        self._process.stdin.write(f"{rounds}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{' '.join(self._process.args)} ended")

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def installed(name: str) -> bool:
    """Whether what a peer needs is here."""
    return (ENVIRONMENTS / name / "installed").exists() if PINNED[name] else bool(importlib.util.find_spec("torch"))


def install(name: str) -> None:
    """An environment of its own, with the pinned versions, unless it is there."""
    folder = ENVIRONMENTS / name
    if PINNED[name] and not installed(name):
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PINNED[name]], check=True)
        (folder / "installed").touch()


def measure(names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Of each, the milliseconds of a round, the loss, and the ratio of its time to ours."""
    data = generated()
    start = data.loss(*data[3:])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "data.npz")
        np.savez(file, **data._asdict())
        peers: dict[str, Any] = {"ours": Ours(data), **{name: Peer(name, file) for name in names}}
        for peer in peers.values():
            peer.run(WARM), peer.run(rounds)
        taken: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(TURNS):
            for name, peer in peers.items():
                taken[name].append(peer.run(rounds)["seconds"])
        losses = {name: peer.run(CHECKED)["loss"] for name, peer in peers.items()}
        for name in names:
            peers[name].end()
    _check(start, losses)
    return {
        name: {
            "ms": 1e3 * statistics.median(taken[name]) / rounds,
            "loss": losses[name],
            "ratio": statistics.median(a / b for a, b in zip(taken[name], taken["ours"], strict=True)),
        }
        for name in peers
    }


def _check(start: float, losses: dict[str, float]) -> None:
    """End unless all have trained the same."""
    others = [loss for name, loss in losses.items() if name != "ours"]
    fallen = start - losses["ours"]
    if fallen < 0.5 or max(others) - min(others) > SAME * fallen or abs(losses["ours"] - others[0]) > DRAWN * fallen:
        raise SystemExit(f"not the same training: from a loss of {start:.4f} to {losses}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", default=list(PINNED), choices=list(PINNED), metavar="PEER")
    parser.add_argument("--install", action="store_true", help="make the environments of those that have none")
    parser.add_argument("--rounds", type=int, default=10, help="in a turn")
    given = parser.parse_args()
    if given.install:
        for name in given.peers:
            install(name)
    measured = measure(given.peers, given.rounds)
    print(f"{'':10}{'ms a round':>12}{f'loss after {CHECKED}':>16}{'time over ours':>16}")
    for name, of in measured.items():
        print(f"{name:10}{of['ms']:12.1f}{of['loss']:16.4f}{of['ratio']:16.2f}")


if __name__ == "__main__":
    main()
