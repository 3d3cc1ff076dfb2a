"""Breakdown curves: the accuracy that robust rules leave against the number of clients that lie, for several attacks.

FedBiO cleans the digits' labels with ten clients, a linear model and 100 rounds; each client's clean data is of one class. A
rule is told how many may lie (`byzantine`), and mixes nearest neighbours before, but for the median. Krum is left out: taking
one client's answer, it has an accuracy of 0.11 here without any liar.

    python benchmarks/breakdown.py              writes results/breakdown.csv and ../docs/breakdown.svg
"""

from __future__ import annotations

import csv
from pathlib import Path

from fedbilevel.errors import Diverged
from fedbilevel.report.styles import SCREEN, legend_above, look, save
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions

RULES = {
    "mean": "",
    "median": "byzantine={f}",
    "trimmed-mean": "byzantine={f}, before=nnm",
    "geometric-median": "byzantine={f}, before=nnm",
    "multi-krum": "byzantine={f}, before=nnm",
    "centred-clipping": "byzantine={f}, before=nnm, radius=1",
}
ATTACKS = ("sign-flip", "ipm", "alie")
CLIENTS, LIARS, ROUNDS = 10, (0, 2, 3, 4), 100
KNOBS = {"clients": CLIENTS, "layers": 1}
TABLE = Path(__file__).parent / "results" / "breakdown.csv"
PICTURE = Path(__file__).parent.parent / "docs" / "breakdown.svg"


def accuracy(rule: str, attack: str, liars: int) -> float:
    """The last test accuracy; that of a guess if the run diverges."""
    settings = RULES[rule].format(f=liars)
    options = RunOptions(
        rounds=ROUNDS,
        every=ROUNDS,
        aggregate=f"{rule}({settings})" if settings else rule,
        attack=f"{attack}:{liars}" if liars else "",
    )
    try:
        *_, last = Configuration.resolve("data-cleaning", KNOBS, "fedbio", {}, options).experiment().run()
    except Diverged:
        return 0.1
    return float((last.metrics or {})["test_accuracy"] or 0.1)


def main() -> None:
    found: dict[tuple[str, str, int], float] = {}
    for rule in RULES:
        honest = accuracy(rule, "", 0)
        for attack in ATTACKS:
            for liars in LIARS:
                found[rule, attack, liars] = accuracy(rule, attack, liars) if liars else honest
            print(rule, attack, *(f"{found[rule, attack, liars]:.3f}" for liars in LIARS), flush=True)
    with TABLE.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["rule", "attack", "liars", "test_accuracy"])
        rows.writerows([*key, f"{value:.4f}"] for key, value in found.items())
    draw(found)


def draw(found: dict[tuple[str, str, int], float]) -> None:
    """A panel for each attack, a line for each rule."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SCREEN.settings):
        figure = Figure(figsize=(SCREEN.width, SCREEN.height), layout="constrained")
        for axis, attack in zip(figure.subplots(1, len(ATTACKS), sharey=True), ATTACKS, strict=True):
            for k, rule in enumerate(RULES):
                axis.plot(LIARS, [found[rule, attack, liars] for liars in LIARS], label=rule, marker=".", **look(k))
            axis.set(title=attack, xlabel=f"liars of {CLIENTS} clients", xticks=LIARS)
        figure.axes[0].set_ylabel("test accuracy")
        legend_above(figure, *figure.axes[0].get_legend_handles_labels())
        save(figure, PICTURE, SCREEN)


if __name__ == "__main__":
    main()
