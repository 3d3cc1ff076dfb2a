"""Every algorithm's step at the papers' sizes against the machine: `make bench`.

The time is that of a step inside a compiled loop of steps, in turns with a matrix product; the fraction is of the rate of
that product, for the operations that the step's matrix products must do. Compiling is from the first call to the first
step's start, with an empty cache.

    python benchmarks/rounds.py [ALGORITHM ...]
"""

from __future__ import annotations

import argparse
import statistics

import jax
import operations
from papers import experiment
from timing import PRODUCT_OPERATIONS, SIDE, compiled, in_turns, product, ratio, seconds

from fedbilevel.algorithms import ALGORITHMS

REPEATS, COUNT = 7, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", default=list(ALGORITHMS), metavar="ALGORITHM")
    parser.add_argument("--data", default="", help="folder with MNIST; generated images of its shape unless given")
    given = parser.parse_args()
    multiply = product()
    seconds(multiply)
    rate = PRODUCT_OPERATIONS / min(seconds(multiply) for _ in range(5))
    print(f"{jax.devices()[0].device_kind}: {rate / 1e9:.0f} GFLOP/s in a product of float32 matrices, {SIDE} x {SIDE}\n")
    print(f"{'algorithm':18}{'compile s':>10}{'ms/step':>10}{'GFLOP/step':>12}{'fraction':>10}")
    for name in given.algorithms:
        of = experiment(name, data=given.data)
        steps, compiling = compiled(of, COUNT)
        seconds(steps)
        taken = in_turns({"product": multiply, "steps": steps}, REPEATS)
        work = operations.of_steps(of, COUNT)
        fraction = work / PRODUCT_OPERATIONS / ratio(taken["steps"], taken["product"])
        spent = 1e3 * statistics.median(taken["steps"]) / COUNT
        print(f"{name:18}{compiling:10.1f}{spent:10.2f}{work / COUNT / 1e9:12.2f}{fraction:10.2f}", flush=True)


if __name__ == "__main__":
    main()
