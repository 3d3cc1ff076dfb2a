"""Accuracy against ε: SimFBO tunes the regularisation of three hospitals, with every row kept private.

    python benchmarks/privacy.py [--out docs/privacy.svg]

Writes a table, and the picture of docs/privacy.md. The steps and the bounds were chosen by hand, not privately.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions

EPSILONS = (0.5, 1, 2, 4, 8, 16)
SEEDS = 5
STEPS = dict(eta_x=0.5, gamma_x=0.5, eta_y=0.3, gamma_y=0.3, eta_u=0.1, gamma_u=0.1, radius=1.0)


def accuracies(privacy: str) -> list[float]:
    """The test accuracy at the end of a run, for each seed; its mean and range are printed."""
    options = RunOptions(rounds=40, every=40, privacy=privacy, loss_bound=1e9)
    experiment = Configuration.resolve("regularisation", {"clients": 3}, "simfbo", STEPS, options).experiment()
    found = []
    for seed in range(SEEDS):
        *_, last = replace(experiment, options=replace(options, seed=seed)).run()
        found.append(float((last.metrics or {})["test_accuracy"] or 0))
    print(f"| {privacy or 'none'} | {np.mean(found):.3f} | {min(found):.3f} to {max(found):.3f} |", flush=True)
    return found


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/privacy.svg"))
    out = parser.parse_args().out
    plain = accuracies("")
    private = {epsilon: accuracies(f"rows(epsilon={epsilon}, metric_noise=300)") for epsilon in EPSILONS}
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.axhline(float(np.mean(plain)), color="gray", linestyle="--", label="without privacy")
    axes.plot(EPSILONS, [np.mean(found) for found in private.values()], "o-", label="SimFBO, 40 rounds")
    axes.fill_between(EPSILONS, *zip(*((min(found), max(found)) for found in private.values()), strict=True), alpha=0.2)
    axes.set(xscale="log", xlabel="ε at δ = 10⁻⁵", ylabel="test accuracy", xticks=EPSILONS)
    axes.set_xticklabels([f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
