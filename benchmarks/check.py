"""Check that we are still as fast, relative to what is measured beside us, as when `baseline.json` was written.

python benchmarks/check.py            fails if a ratio has fallen by more than a third
python benchmarks/check.py --write    writes the current ratios
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import jax
import peers
import rounds
import sweep

BASELINE, MOST_LOST = Path(__file__).with_name("baseline.json"), 1 / 3
ALGORITHMS, AGAINST_TORCH = ("simfbo", "mefbo", "fednest", "fedbioacc", "distbio"), ("simfbo", "mefbo", "fednest")
PEER_ROUNDS = 10


def measured() -> dict[str, float]:
    """The ratios of now, by name; those against PyTorch where it is installed."""
    ratios: dict[str, float] = {}
    for name in ALGORITHMS:
        of = rounds.measure(name)
        ratios[f"{name}, fraction of the best square product's rate"] = of.fraction
        ratios[f"{name}, fraction of the rate of its own largest product"] = of.batched
    if importlib.util.find_spec("torch"):
        import sequential_torch

        for name in AGAINST_TORCH:
            ratios[f"{name}, PyTorch's time over ours"] = sequential_torch.compare(name, 10, ["cpu"], "")["cpu ratio"]
    installed = [name for name in peers.PINNED if peers.installed(name)]
    for name, of_peer in peers.measure(installed, PEER_ROUNDS).items() if installed else ():
        if name in installed:
            ratios[f"FedAvg, {name}'s time over ours"] = of_peer["ratio"]
    for cell in sweep.CELLS[:2]:
        ratios[f"sweep of {cell[1]} on {cell[0]}, one by one over together"] = sweep.measure(*cell).ratio
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the baseline")
    write = parser.parse_args().write
    if jax.default_backend() != "cpu":
        sys.exit("the baseline is of CPUs: set JAX_PLATFORMS=cpu")
    now = {name: round(ratio, 2) for name, ratio in measured().items()}
    before = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    fallen = [name for name, ratio in now.items() if not write and ratio < (1 - MOST_LOST) * before.get(name, 0)]
    print(f"{'ratio':60}{'baseline':>10}{'now':>8}")
    for name, ratio in now.items():
        print(f"{name:60}{before.get(name, float('nan')):10.2f}{ratio:8.2f}{'  fell' if name in fallen else ''}")
    for name in (name for name in before if name not in now):
        print(f"{name:60}{before[name]:10.2f}{'':8}  not measured: install the bench extra")
    if write:
        BASELINE.write_text(json.dumps({**before, **now}, indent=4) + "\n")
    sys.exit(f"{len(fallen)} of {len(now)} ratios fell by more than a third" if fallen else 0)


if __name__ == "__main__":
    main()
