"""What low-precision matrix products cost in accuracy and gain in time, on hyper-representation at the papers' size.

Every precision makes the same steps from the same start with the same draws; on devices without it, such as CPUs, the
numbers are the same.

    python benchmarks/precision.py [--steps 1000] [--seeds 3] [--data FOLDER]
"""

from __future__ import annotations

import argparse
import statistics

import jax
from papers import experiment
from timing import compiled, in_turns, ratio

from fedbilevel.engines.simulated import PRODUCTS

ALGORITHMS, COUNT, REPEATS = ("simfbo", "fedbioacc", "mefbo"), 20, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default="", help="folder with MNIST; generated images of its shape unless given")
    given = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, {given.steps} steps, {given.seeds} seeds\n")
    print(f"{'algorithm':12}{'products':10}{'test accuracy':>14}{'upper loss':>12}{'ms/step':>10}{'faster than float32':>21}")
    for name in ALGORITHMS:
        works = {}
        for products in PRODUCTS:
            works[products], _ = compiled(experiment(name, data=given.data, products=products), COUNT)
        in_turns(works, 1)
        taken = in_turns(works, REPEATS)
        for products in PRODUCTS:
            ends = [last(name, products, seed, given.steps, given.data) for seed in range(given.seeds)]
            accuracy, loss = (statistics.mean(end[metric] for end in ends) for metric in ("test_accuracy", "upper_loss"))
            spent = 1e3 * statistics.median(taken[products]) / COUNT
            print(f"{name:12}{products:10}{accuracy:14.4f}{loss:12.5f}{spent:10.3f}", end="")
            print(f"{ratio(taken['float32'], taken[products]):21.2f}", flush=True)


def last(name: str, products: str, seed: int, steps: int, data: str) -> dict:
    """The metrics at the end of a run."""
    *_, end = experiment(name, data=data, products=products, seed=seed, steps=steps, every=10**6).run()
    return end.metrics or {}


if __name__ == "__main__":
    main()
