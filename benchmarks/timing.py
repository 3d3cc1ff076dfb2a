"""Time things side by side: what is compared is timed alternately, together with the machine's matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.runs.experiment import Experiment

SIDE, TIMES = 2048, 4  # of the square matrices whose product is the machine's rate, and how often it is taken


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes until its result is there."""
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


def in_turns(works: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """The seconds that each of them took, every time that all of them had their turn."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            taken[name].append(seconds(work))
    return taken


def ratio(slow: list[float], fast: list[float]) -> float:
    """The median of the ratios of neighbouring times."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


PRODUCT_OPERATIONS = TIMES * 2 * SIDE**3


def product() -> Callable[[], Array]:
    """Some products of matrices, of `PRODUCT_OPERATIONS` floating-point operations."""
    matrix = jnp.full((SIDE, SIDE), 1 / SIDE, jnp.float32)
    multiply = jax.jit(lambda a: lax.fori_loop(0, TIMES, lambda _, b: a @ b, a))
    return lambda: multiply(matrix)


@partial(jax.jit, static_argnums=4)
def run_steps(simulator: Any, algorithm: Any, state: Any, key: Array, count: int) -> Any:
    """The state after so many steps, as one program."""
    return lax.fori_loop(0, count, lambda t, s: simulator.step(algorithm, s, jax.random.fold_in(key, t))[0], state)


def program_of(experiment: Experiment, count: int) -> tuple[Any, Callable[[], Any]]:
    """The program of so many steps of an experiment from its start, and what runs it."""
    simulator, algorithm, task = experiment.engine, experiment.algorithm, experiment.task
    key = jax.random.key(experiment.options.seed)
    state, *_ = jax.jit(type(simulator).init)(simulator, algorithm, task.x, task.y, key)
    program = run_steps.lower(simulator, algorithm, state, key, count).compile()
    return program, lambda: program(simulator, algorithm, state, key)


def compiled(experiment: Experiment, count: int) -> tuple[Callable[[], Any], float]:
    """What makes so many steps of an experiment from its start, and how long it took until they could begin."""
    began = time.perf_counter()
    _, run = program_of(experiment, count)
    return run, time.perf_counter() - began
