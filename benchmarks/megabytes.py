"""Megabytes, up and down together, until a test accuracy is reached, for six algorithms and several compressions.

Data cleaning on the digits with ten clients, steps that suit the task without compression, at most 400 rounds.

    python benchmarks/megabytes.py              writes results/megabytes.csv and prints a table for the documentation
"""

from __future__ import annotations

import csv
from pathlib import Path

from fedbilevel.errors import Diverged
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions

ALGORITHMS = ("fedbio", "fedbioacc", "simfbo", "fedmsa", "lfednest", "fedpace")
RULES = {
    "mean": "mean",
    "8 bits": "quantized(bits=8)",
    "4 bits": "quantized(bits=4)",
    "4 bits, down 8": "quantized(bits=4, down=8)",
    "top-k, 1 in 10": "top-k",
    "random-k, 1 in 10": "random-k",
}
TARGET, ROUNDS, EVERY = 0.85, 400, 4
TABLE = Path(__file__).parent / "results" / "megabytes.csv"


def megabytes(algorithm: str, rule: str) -> float | None:
    """What had crossed when the accuracy was first seen at the target; None if it never was."""
    options = RunOptions(rounds=ROUNDS, every=EVERY, aggregate=RULES[rule])
    try:
        for moment in Configuration.resolve("data-cleaning", {}, algorithm, {}, options).experiment().run():
            if moment.metrics is not None and (moment.metrics["test_accuracy"] or 0) >= TARGET:
                return (moment.totals.bytes_up + moment.totals.bytes_down) / 1e6
    except Diverged:
        pass
    return None


def main() -> None:
    found = {}
    print(f"| MB to {TARGET:.0%} | {' | '.join(RULES)} |\n|---|{'---|' * len(RULES)}")
    for algorithm in ALGORITHMS:
        each = {rule: megabytes(algorithm, rule) for rule in RULES}
        found[algorithm] = each
        print(f"| {algorithm} | {' | '.join('never' if n is None else f'{n:.2f}' for n in each.values())} |", flush=True)
    with TABLE.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["algorithm", *RULES])
        rows.writerows([name, *each.values()] for name, each in found.items())


if __name__ == "__main__":
    main()
