"""A picture of who holds what."""

from __future__ import annotations

from pathlib import Path

from fedbilevel.tasks.base import Holdings

NUMBERED = 20  # up to this many clients and classes, the counts are written out


def holdings(held: Holdings, title: str, path: Path) -> None:
    """Save a panel for each purpose: a row per client, a column per class, darker for more samples."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, classes = next(iter(held.counts.values())).shape
    height = min(max(2.5, 0.28 * clients), 9) + 1
    width = min(max(3.5, 0.42 * classes), 8)
    figure = Figure(figsize=(1 + width * len(held.counts), height), layout="constrained")
    axes = figure.subplots(1, len(held.counts), squeeze=False)[0]
    for axis, (purpose, counts) in zip(axes, held.counts.items(), strict=True):
        image = axis.imshow(counts, cmap="Blues", vmin=0, vmax=max(counts.max(), 1), aspect="auto", interpolation="nearest")
        axis.set_xticks(range(classes), held.classes, rotation=0 if sum(map(len, held.classes)) < 8 * width else 90)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=20))
        axis.set(xlabel=held.unit, ylabel="client", title=f"{purpose}: {counts.sum():,} samples")
        if clients <= NUMBERED and classes <= NUMBERED:
            for m, c in zip(*counts.nonzero(), strict=True):
                colour = "white" if counts[m, c] > 0.6 * counts.max() else "black"
                axis.text(c, m, counts[m, c], ha="center", va="center", fontsize=7, color=colour)
        else:
            figure.colorbar(image, ax=axis, label="samples")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
