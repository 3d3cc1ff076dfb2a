"""Time per round and peak memory, against the number of participants and against the number of clients.

FedBiOAcc (two rounds per step, five local steps) on data cleaning's logistic regression with digit-sized images: 64 samples
of 8 x 8 bytes for each client. Every point runs in its own process, to measure its own peak memory.

    python benchmarks/growth.py                 writes results/growth.csv and ../docs/growth.svg
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

PARTICIPANTS, OF = (10, 30, 100, 300, 1000), 10_000
CLIENTS, OF_THEM = (100, 1000, 10_000, 100_000, 1_000_000), 100
SAMPLES, SIDE, BATCH, CHUNK, STEPS, REPEATS = 64, 8, 32, 100, 10, 4
TABLE = Path(__file__).parent / "results" / "growth.csv"
PICTURE = Path(__file__).parent.parent / "docs" / "growth.svg"


def population(clients: int) -> Any:
    """Random images for every client, in two flat arrays; built without a Python object per client."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedbilevel.core.population import Population, Shards
    from fedbilevel.core.problem import from_trees

    def loss(y: Any, rows: Any) -> Any:
        images, labels = rows
        logits = (images.reshape(len(images), -1) / 16.0) @ y
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None].astype(int), 1).mean()

    def f(x: Any, y: Any, rows: Any) -> Any:
        return loss(y, rows)

    def g(x: Any, y: Any, rows: Any) -> Any:
        return loss(y, rows) + jnp.sum(jnp.exp(x)[:, None] * y**2)

    side = SIDE * SIDE
    problem, x, y, _, _ = from_trees(f, g, jnp.full(side, -5.0), jnp.zeros((side, 10)))
    half = SAMPLES // 2

    def shards(seed: int) -> Shards:
        rng = np.random.default_rng(seed)
        images = rng.integers(0, 17, (clients * half, SIDE, SIDE), np.uint8)
        labels = rng.integers(0, 10, clients * half, np.uint8)
        start = jnp.arange(clients, dtype=jnp.int32) * half
        return Shards((jnp.asarray(images), jnp.asarray(labels)), start, jnp.full(clients, half, jnp.int32), half, True)

    return Population(problem, shards(0), shards(1), jnp.full(clients, 1 / clients), BATCH, True), x, y


def measure(clients: int, participants: int, steps: int) -> dict[str, float]:
    """One point: milliseconds per round, after compiling, and memory in MB with and without the data."""
    import jax
    from timing import run_steps, seconds

    from fedbilevel.algorithms.fedbioacc import FedBiOAcc
    from fedbilevel.core.participation import Uniform
    from fedbilevel.engines.simulated import SimulatedEngine

    everyone, x, y = population(clients)
    data = sum(leaf.nbytes for leaf in jax.tree.leaves((everyone.upper, everyone.lower)))
    simulator, algorithm, key = SimulatedEngine(everyone, Uniform(participants), CHUNK), FedBiOAcc(), jax.random.key(0)
    state, *_ = jax.jit(SimulatedEngine.init)(simulator, algorithm, x, y, key)
    program = run_steps.lower(simulator, algorithm, state, key, steps).compile()
    took = min(seconds(lambda: program(simulator, algorithm, state, key)) for _ in range(REPEATS))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return dict(
        clients=clients,
        participants=participants,
        ms_per_round=1e3 * took / (2 * steps),
        peak_mb=peak / 1e6,
        data_mb=data / 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", type=int, nargs=3, metavar=("CLIENTS", "PARTICIPANTS", "STEPS"), help="measure one")
    given = parser.parse_args()
    if given.point:
        print(json.dumps(measure(*given.point)))
        return
    points = [(OF, n) for n in PARTICIPANTS] + [(m, OF_THEM) for m in CLIENTS]
    rows = []
    for clients, participants in points:
        command = [sys.executable, __file__, "--point", str(clients), str(participants), str(STEPS)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print("".join(f"{name} {value:<12.6g}" for name, value in rows[-1].items()), flush=True)
    with TABLE.open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(
            {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
        )
    draw(rows[: len(PARTICIPANTS)], rows[len(PARTICIPANTS) :])


def draw(by_participants: list[dict[str, float]], by_clients: list[dict[str, float]]) -> None:
    """The four curves as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(8, 5), sharex="col", sharey="row", constrained_layout=True)
    sides = (
        (by_participants, "participants", f"participants, of {OF:,} clients"),
        (by_clients, "clients", f"clients, {OF_THEM} taking part"),
    )
    for column, (rows, along, label) in zip(axes.T, sides, strict=True):
        where = [row[along] for row in rows]
        column[0].loglog(where, [row["ms_per_round"] for row in rows], "o-")
        for name in ("peak", "data"):
            column[1].loglog(where, [row[f"{name}_mb"] for row in rows], "o-", label=name)
        column[1].set_xlabel(label)
    for of_row, label in zip(axes, ("ms per round", "MB"), strict=True):
        of_row[0].set_ylabel(label)
        of_row[0].yaxis.set_major_formatter("{x:,g}")
    for axis in axes[1]:
        axis.xaxis.set_major_formatter("{x:,.0f}")
    axes[1, 0].legend(frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
