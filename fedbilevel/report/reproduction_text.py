"""How a reproduction's numbers are written: on its scale, with their deviation and the number of runs behind them."""

from __future__ import annotations

from fedbilevel.runs.reproductions.plan import Column, Reproduction
from fedbilevel.runs.reproductions.table_numbers import Number


def scaled(plan: Reproduction, value: float) -> float:
    """A value of the metric on the reproduction's scale."""
    return {"percent": 100 * value, "error": 100 * (1 - value), "plain": value}[plan.scale]


def shown(plan: Reproduction, value: float) -> str:
    """A single value of the metric, without trailing zeros."""
    return f"{value:.4g}" if plan.scale == "plain" else f"{round(scaled(plan, value), 2):g}"


def heading(plan: Reproduction, column: Column) -> str:
    """A column's heading."""
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
    """A number as the paper prints it: rounds, or per cent with two decimals."""
    return f"{value:g}" if column.reach is not None else f"{value:.2f}"


def _aligned(plan: Reproduction, value: float) -> str:
    """A value of the metric among others, all with the same number of decimals."""
    return f"{value:.4g}" if plan.scale == "plain" else f"{scaled(plan, value):.2f}"


def _share(number: Number) -> str:
    """How many runs are behind a number, if not all."""
    return "" if number.of == number.runs else f" ({number.of} of {number.runs} runs)"
