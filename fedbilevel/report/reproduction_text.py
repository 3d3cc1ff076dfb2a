"""How the numbers of a reproduction are written: on its scale, with their deviation and how many runs they are of."""

from __future__ import annotations

from fedbilevel.runs.reproductions.plan import Column, Reproduction
from fedbilevel.runs.reproductions.table_numbers import Number


def scaled(plan: Reproduction, value: float) -> float:
    """A value of the metric on the reproduction's scale."""
    return {"percent": 100 * value, "error": 100 * (1 - value), "plain": value}[plan.scale]


def shown(plan: Reproduction, value: float) -> str:
    """A value of the metric by itself: without zeros that say nothing."""
    return f"{value:.4g}" if plan.scale == "plain" else f"{round(scaled(plan, value), 2):g}"


def heading(plan: Reproduction, column: Column) -> str:
    """What a column is."""
    if column.at is not None:
        return f"after {column.at} rounds"
    return f"rounds to {shown(plan, column.reach or 0.0)}{'' if plan.scale == 'plain' else ' %'}"


def written(plan: Reproduction, column: Column, number: Number | None) -> str:
    """A line's number in a column, with its deviation."""
    if number is None:
        return "diverged" if column.at is not None else "not reached"
    if column.at is None:
        return f"{number.mean:.0f} ± {number.deviation:.0f}{_share(number)}"
    deviation = f"{number.deviation:.2g}" if plan.scale == "plain" else f"{100 * number.deviation:.2f}"
    return f"{_aligned(plan, number.mean)} ± {deviation}{_share(number)}"


def brief(plan: Reproduction, number: Number | None) -> str:
    """A line's number without its deviation."""
    return "–" if number is None else _aligned(plan, number.mean) + _share(number)


def printed(column: Column, value: float) -> str:
    """A number of the paper's as it has it: rounds, or per cent with two decimals."""
    return f"{value:g}" if column.reach is not None else f"{value:.2f}"


def _aligned(plan: Reproduction, value: float) -> str:
    """A value of the metric among others: all with the same decimals."""
    return f"{value:.4g}" if plan.scale == "plain" else f"{scaled(plan, value):.2f}"


def _share(number: Number) -> str:
    """Of how many runs it is, if not of all."""
    return "" if number.of == number.runs else f" ({number.of} of {number.runs} runs)"
