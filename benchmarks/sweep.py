"""Seeds and a grid as one program against one run after another, on small cells.

Both are timed after a first run, so compiling is excluded; runs one after another reuse one compiled program, since step
sizes are its arguments.

    python benchmarks/sweep.py
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from timing import in_turns, ratio

from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps.batched_runs import run_together

SEEDS, ROUNDS, REPEATS = 5, 1000, 3
CELLS: list[tuple[str, str, dict[str, Any], list[dict[str, float]]]] = [
    ("quadratic", "simfbo", dict(noise=0.1), [dict(gamma_x=x, gamma_y=y) for x in (0.01, 0.02, 0.03) for y in (0.1, 0.2, 0.3)]),
    ("quadratic", "fedbioacc", dict(noise=0.1), [dict(eta=x, gamma=y) for x in (0.03, 0.06, 0.1) for y in (0.3, 0.5, 1)]),
    ("regularisation", "simfbo", {}, [dict(gamma_x=x, gamma_y=y) for x in (0.5, 1, 2) for y in (0.1, 0.2, 0.3)]),
]


class Measured(NamedTuple):
    """Seconds for all runs."""

    runs: int
    together: float
    one_by_one: float
    ratio: float


def measure(task: str, algorithm: str, knobs: dict[str, Any], cells: list[dict[str, float]]) -> Measured:
    """A sweep's runs together, and one by one."""
    experiments = [
        Configuration.resolve(task, knobs, algorithm, cell, RunOptions(seed=seed, rounds=ROUNDS, every=ROUNDS)).experiment()
        for cell in cells
        for seed in range(SEEDS)
    ]
    works = {
        "together": lambda: run_together(experiments) and None,
        "one by one": lambda: [list(experiment.run()) for experiment in experiments] and None,
    }
    in_turns(works, 1)
    taken = in_turns(works, REPEATS)
    together, alone = (statistics.median(taken[name]) for name in works)
    return Measured(len(experiments), together, alone, ratio(taken["one by one"], taken["together"]))


def main() -> None:
    print(f"{'task':16} {'algorithm':10} {'runs':>5} {'together':>10} {'one by one':>12} {'ratio':>6}")
    for task, algorithm, knobs, cells in CELLS:
        of = measure(task, algorithm, knobs, cells)
        print(f"{task:16} {algorithm:10} {of.runs:5} {of.together:8.2f} s {of.one_by_one:10.2f} s {of.ratio:6.1f}", flush=True)


if __name__ == "__main__":
    main()
