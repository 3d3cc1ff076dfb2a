"""What the numbers of a run say about its settings: a line for each thing that looks wrong, with what to do about it.

The lines hold no numbers that change from run to run, so that Python shows each once for a loop of many solves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.algorithms.base import Algorithm, Penalised
from fedbilevel.core.clients import PerClient
from fedbilevel.core.population import Population
from fedbilevel.core.problem import LOSSES
from fedbilevel.core.sets import EVERYWHERE
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.runs.experiment import Experiment
from fedbilevel.settings import settings
from fedbilevel.tasks.base import Judged, Task

FEWEST_STEPS = 20  # fewer say nothing about where a run goes
FELT = 2e-3  # of f: suited steps on x give at least 15 times that, steps a hundred times too small a third of it
MOVED = 1e-2  # of |x₀|, or of each entry if x starts at 0
USED_UP = 0.1  # of the longest ∇h: what is left where x has nearly arrived
NOTICED = 1e-3  # of a loss
AT_BOUND = 0.9  # of the radius: clients project u before it is averaged
LARGE = 1e3  # of a column of rows, or of the ratio of two columns
SHARED = 0.9  # of what f has fallen by: as much, at least, is to remain where g alone leads
GIVEN_UP = 0.05  # of what the headline had gained
LOOKED_AT = 1000  # rows
ANOTHER = "or tune an algorithm with step sizes."
Rows = Sequence[Mapping[str, Any]]  # of metrics


def advice_on_run(experiment: Experiment, rows: Rows, state: Any, judged: Judged | None = None) -> list[str]:
    """The lines about a run that has ended in this state, with these rows of metrics; `judged` knows the task's headline."""
    if rows[-1]["step"] < FEWEST_STEPS:
        return []
    tuned = is_tuned(experiment.algorithm)
    found = [u_bounded(rows, experiment.algorithm)]
    task, (x, y) = experiment.task, experiment.engine.point(state)
    if isinstance(x, PerClient):
        return [line for line in (*found, loss_risen(rows, tuned)) if line]
    start, end = np.asarray(task.start[0]), np.asarray(x)
    if task.population.problem.sets.x == EVERYWHERE:  # within a set, ∇h may be long at a solution
        found.append(x_unmoved(rows, start, end, tuned))
    simulated = isinstance(experiment.engine, SimulatedEngine)
    if not np.array_equal(start, end):  # otherwise f is not what the method descends
        found.append(loss_risen(rows, tuned))
        if judged and not experiment.options.keep_best:
            found.append(past_its_best(rows, judged, simulated))
        if simulated and (judged is None or judged.headline in LOSSES):  # otherwise rows that neither loss sees judge y
            found.append(y_sees_f(rows, task, x, experiment.algorithm, state))
    if simulated:
        found.append(lower_unfollowed(rows, task, x, y, tuned))
    return [line for line in found if line]


def advice_on_data(experiment: Experiment) -> list[str]:
    """The lines about the clients' rows, where this process has them; known before the run."""
    return unscaled(experiment.engine.population) if isinstance(experiment.engine, SimulatedEngine) else []


def is_tuned(algorithm: Algorithm) -> bool:
    """Whether a step size of the algorithm can be changed: some measure theirs."""
    return any(setting.decades for setting in settings(type(algorithm)).values())


def x_unmoved(rows: Rows, start: np.ndarray, end: np.ndarray, tuned: bool) -> str:
    """Whether x went nowhere: the most that its move can have changed f by is next to nothing, and ∇h is not used up.

    Methods that do not report the length of ∇h, such as FedAvg, are not judged.
    """
    norms = [float(norm) for row in rows if (norm := row.get("hypergradient_norm")) is not None]
    if not norms or norms[-1] <= USED_UP * max(norms):
        return ""
    move, size = np.linalg.norm(end - start), np.linalg.norm(start) or np.sqrt(start.size)
    if max(norms) * move > FELT * _largest(rows, "upper_loss") or move > MOVED * size:
        return ""
    remedy = "Multiply the step on x by ten until the run diverges, then divide it by three." if tuned else "Make more rounds."
    return f"x hardly moved. {remedy}"


def loss_risen(rows: Rows, tuned: bool) -> str:
    """Whether f ends above its start."""
    if rows[-1]["upper_loss"] <= rows[0]["upper_loss"] + NOTICED * _largest(rows, "upper_loss"):
        return ""
    smaller = "divide the step on x by ten; if that does not help, the steps on y and u too."
    remedy = smaller if tuned else f"see whether fewer rounds end lower, {ANOTHER}"
    return f"The upper loss ends above its start. Unless y began better for f than g lets it be, {remedy}"


def u_bounded(rows: Rows, algorithm: Algorithm) -> str:
    """Whether u ends at the bound that its method sets."""
    radius, norm = getattr(algorithm, "radius", None), rows[-1].get("u_norm")
    if radius is None or norm is None or norm < AT_BOUND * radius:
        return ""
    return (
        f"u ends at its bound, radius = {radius:g}, so x's direction is wrong. Divide the step on u by ten; "
        "if it still ends there, raise radius or add weight decay to g."
    )


def lower_unfollowed(rows: Rows, task: Task, x: Array, y: Array, tuned: bool) -> str:
    """Whether y is no better for g at the last x than y₀ would be."""
    at_start = float(task.evaluate(x, jnp.broadcast_to(task.y, y.shape))["lower_loss"])
    at_end = rows[-1]["lower_loss"]
    if not at_end > at_start - NOTICED * max(abs(at_start), abs(at_end)):
        return ""
    steps = "Divide the step on x by ten, or multiply that on y by ten if y hardly moved."
    remedy = steps if tuned else f"Standardise the columns of the rows, make more rounds, {ANOTHER}"
    return f"The lower level is not followed: at the last x, y is no better for g than where it started. {remedy}"


def y_sees_f(rows: Rows, task: Task, x: Array, algorithm: Algorithm, state: Any) -> str:
    """Whether f is as low as it is also because y descends it: of its fall less than nine tenths remain where g alone leads."""
    led_by_g = algorithm.led_by_g(state) if isinstance(algorithm, Penalised) else None
    if led_by_g is None:
        return ""
    first, last = rows[0]["upper_loss"], rows[-1]["upper_loss"]
    if not last < first or first - float(task.evaluate(x, led_by_g)["upper_loss"]) > SHARED * (first - last):
        return ""
    return (
        "y also descends f, and the upper loss is lower there than where g alone leads: y is fitted to f's rows "
        "too. Judge y by rows that neither loss sees, and x by a y that is trained on g anew."
    )


def past_its_best(rows: Rows, judged: Judged, simulated: bool) -> str:
    """Whether the task's headline has fallen well below its best while f did not rise."""
    headline, sign = judged.headline, 1 if judged.better.get(judged.headline) == "higher" else -1
    both = [(row.get(headline), row["upper_loss"]) for row in rows]  # a federation may not know the headline
    known = [(sign * value, loss) for value, loss in both if value is not None and loss is not None]
    if not known or headline in LOSSES:
        return ""
    (first, _), (best, f_then), (last, f_now) = known[0], max(known), known[-1]
    if last >= best - GIVEN_UP * (best - first) or f_now > f_then:
        return ""
    kept = (
        ", or hold some of these rows out with keep_best, which ends with the round that is best on them" if simulated else ""
    )
    found = (
        f"{headline} was better earlier in the run, and the upper loss has not risen since: x is fitted to the few rows of f."
    )
    return f"{found} Make fewer rounds{kept}."


def unscaled(population: Population) -> list[str]:
    """Which arrays of rows have columns that are huge, or much wider than others."""
    lines = {}
    for level, shards in (("lower", population.lower), ("upper", population.upper)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(shards.rows):
            if leaf.ndim < 2 or not leaf.size or not jnp.issubdtype(leaf.dtype, jnp.floating):
                continue
            name, what = jax.tree_util.keystr(path), _complaint(leaf)
            if what and name not in lines:
                lines[name] = f"The rows' {level}{name} {what}. Standardise its columns: subtract means, divide by deviations."
    return list(lines.values())


def _complaint(leaf: Array) -> str:
    """What is wrong with an array's columns, as a predicate."""
    picked = np.linspace(0, len(leaf) - 1, min(len(leaf), LOOKED_AT)).astype(int)
    columns = np.asarray(leaf[picked], float).reshape(len(picked), -1)
    if np.sqrt(np.mean(columns**2, 0)).max() >= LARGE:
        return "has columns of 10³ or more"
    away = np.abs(columns - columns.mean(0)).max(0)
    varying = away > 1e-6 * np.abs(columns).max(0)
    if leaf.ndim == 2 and varying.any() and columns.std(0).max() >= LARGE * away[varying].min():
        return "has columns whose deviations differ by 10³ or more"
    return ""


def _largest(rows: Rows, name: str) -> float:
    return max(abs(value) for row in rows if (value := row[name]) is not None)
