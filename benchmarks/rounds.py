"""Every algorithm's step at the papers' sizes against the machine: `make bench`.

We time a step inside a compiled loop of steps, alternating with products of matrices, and count the operations that the
step's own products require. The first fraction is of the rate of a large square product, the second of that of the step's
largest product, for as many clients as are computed together; each by the library here that is best at it (`peak.py`). Compile
time is all time up to the first step, without a cache. Algorithms with a lower level per client run on few-shot learning,
with convolutions as wide as the paper's; the others on hyper-representation. Products use JAX's default arithmetic, which has
10 bits on NVIDIA's GPUs.

    python benchmarks/rounds.py [ALGORITHM ...]
"""

from __future__ import annotations

import argparse
import statistics
from typing import NamedTuple

import jax
import operations
from papers import experiment
from peak import SQUARE, Best
from timing import SIDE, compiled, in_turns, ratio, seconds

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.runs.experiment import Experiment

REPEATS = 7
WIDE = dict(filters=64, tasks=4)


class Measured(NamedTuple):
    """Of one algorithm."""

    compiling: float  # seconds
    milliseconds: float  # a step
    operations: int  # a step
    fraction: float  # of the rate of a square product
    batched: float  # of the rate of its own largest product


def at_papers_size(name: str, data: str = "") -> tuple[Experiment, int]:
    """An experiment with an algorithm, and of how many steps its time is taken."""
    local = ALGORITHMS[name].load().lower_level == "local"
    return (experiment(name, task="few-shot", knobs=WIDE), 2) if local else (experiment(name, data=data), 10)


def measure(name: str, data: str = "") -> Measured:
    """An algorithm's step, against products of matrices."""
    of, count = at_papers_size(name, data)
    steps, compiling = compiled(of, count)
    seconds(steps)
    square, batched = Best.at(SQUARE), Best.at(operations.largest(of))
    taken = in_turns({"square": square.run, "batched": batched.run, "steps": steps}, REPEATS)
    work = operations.of_steps(of, count)
    fractions = (
        work / best.operations / ratio(taken["steps"], taken[kind]) for kind, best in (("square", square), ("batched", batched))
    )
    return Measured(compiling, 1e3 * statistics.median(taken["steps"]) / count, work // count, *fractions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "algorithms", nargs="*", default=[name for name in ALGORITHMS if not ALGORITHMS[name].load().own_x], metavar="ALGORITHM"
    )
    parser.add_argument("--data", default="", help="folder with MNIST; generated images of its shape unless given")
    given = parser.parse_args()
    best = Best.at(SQUARE)
    rate = best.operations / min(seconds(best.run) for _ in range(5))
    print(f"{jax.devices()[0].device_kind}: {rate / 1e9:.0f} GFLOP/s in a product, {SIDE} x {SIDE}, by {best.library}\n")
    print(f"{'algorithm':18}{'compile s':>10}{'ms/step':>10}{'GFLOP/step':>12}{'fraction':>10}{'batched':>10}")
    for name in given.algorithms:
        of = measure(name, given.data)
        print(
            f"{name:18}{of.compiling:10.1f}{of.milliseconds:10.2f}{of.operations / 1e9:12.2f}"
            f"{of.fraction:10.2f}{of.batched:10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
