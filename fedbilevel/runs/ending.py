"""How a run ended."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class Result(TypedDict):
    """What `result.json` holds, besides the rest of the last row of a run that finished."""

    status: Literal["finished", "diverged"]
    step: NotRequired[int]  # of the last row
    best_round: NotRequired[int]  # which x, y and the metrics are of, if not of the last row
    reason: NotRequired[str]  # of divergence
    caveats: NotRequired[list[str]]
    warnings: NotRequired[list[str]]  # what looks wrong, with what to do
