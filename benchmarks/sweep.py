"""Seeds and a grid as one program against one run after another, on small cells.

Both are timed on their second time, so that compiling is apart; one after another reuses one compiled program, since
step sizes are arguments of it.

    python benchmarks/sweep.py
"""

from __future__ import annotations

import time

from fedbilevel.configuration import Configuration
from fedbilevel.sweeps.together import run_together

SEEDS, ROUNDS = 5, 2000
CELLS = [
    ("quadratic", "simfbo", dict(noise=0.1), [dict(gamma_x=x, gamma_y=y) for x in (0.01, 0.02, 0.03) for y in (0.1, 0.2, 0.3)]),
    ("quadratic", "fedbioacc", dict(noise=0.1), [dict(eta=x, gamma=y) for x in (0.03, 0.06, 0.1) for y in (0.3, 0.5, 1)]),
    ("regularisation", "simfbo", {}, [dict(gamma_x=x, gamma_y=y) for x in (0.5, 1, 2) for y in (0.1, 0.2, 0.3)]),
    ("data-cleaning", "simfbo", {}, [dict(gamma_x=x, gamma_y=y) for x in (30, 60, 100) for y in (0.1, 0.2, 0.3)]),
]


def main() -> None:
    print(f"{'task':16} {'algorithm':10} {'runs':>5} {'first, together':>16} {'together':>9} {'one by one':>11} {'ratio':>6}")
    for task, algorithm, knobs, cells in CELLS:
        settings = dict(rounds=ROUNDS, every=ROUNDS)
        experiments = [
            Configuration.resolve(task, knobs, algorithm, cell, seed=seed, **settings).experiment()
            for cell in cells
            for seed in range(SEEDS)
        ]
        first, second = (_timed(lambda: run_together(experiments)) for _ in range(2))
        list(experiments[0].run())
        alone = _timed(lambda: [list(experiment.run()) for experiment in experiments])
        seconds = f"{first:14.1f} s {second:7.1f} s {alone:9.1f} s"
        print(f"{task:16} {algorithm:10} {len(experiments):5} {seconds} {alone / second:6.1f}", flush=True)


def _timed(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
