"""What a step of an algorithm costs, as the engine counts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.population import Population
from fedbilevel.core.problem import Problem
from fedbilevel.core.traffic import Totals
from fedbilevel.runs.derivative_counts import Tally
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.simulation import simulated, simulation
from fedbilevel.tasks.base import Task

CLIENTS, STEPS = 2, 200
LENGTHS = ((100, 200), (300, 200), (100, 600))  # of x and y: three, since a message is a |x| + b |y| + c floats


@dataclass(frozen=True)
class Cost:
    """Means over steps: round trips, and floats, gradients and second-order products of one client."""

    NAMES: ClassVar[tuple[str, ...]] = ("rounds", "floats up", "floats down", "gradients", "second-order products")

    rounds: float
    up: np.ndarray
    down: np.ndarray
    gradients: float
    second_order: float

    def texts(self) -> list[str]:
        """As a reader wants them."""
        return [_number(self.rounds), _floats(self.up), _floats(self.down), _number(self.gradients), _number(self.second_order)]


def cost(name: str) -> Cost:
    """Of a step with default hyperparameters."""
    algorithm = ALGORITHMS[name].configure(name, {})
    experiments = [simulation(_task(algorithm, *lengths), algorithm, steps=STEPS) for lengths in LENGTHS]
    clients = simulated(experiments[0]).population.size
    traffic = [_traffic(experiment) for experiment in experiments]
    equations = np.asarray([[*lengths, 1] for lengths in LENGTHS])
    up, down = (np.linalg.solve(equations, [sent[k] / clients for sent in traffic]) for k in (1, 2))
    start, end = Tally(experiments[0]).at([0, STEPS])
    gradients, second_order = ((b - a) / STEPS / clients for a, b in zip(start, end, strict=True))
    return Cost(traffic[0][0], up, down, gradients, second_order)


def _task(algorithm: Any, x_length: int, y_length: int) -> Task:
    """Some problem with vectors of these lengths: traffic does not depend on which."""

    def loss(x: Any, y: Any, rows: Any) -> Any:
        return jnp.mean(rows) * jnp.sum(x) + jnp.sum(y**2)

    x, rows = jnp.zeros(x_length), [np.ones((4, 1))] * CLIENTS
    population = Population.build(Problem(loss, loss), rows, rows, batch_size=1, own_x=x if algorithm.own_x else None)
    return Task(population, x, jnp.zeros(y_length), lambda x, y: {}, type(algorithm).lower_level)


def _traffic(experiment: Experiment) -> np.ndarray:
    """Rounds, floats up and floats down of a step, as means over steps."""
    engine, algorithm = simulated(experiment), experiment.algorithm
    shapes = engine.state_shapes(algorithm, experiment.task.x, experiment.task.y, jax.random.key(0))
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def of_step(step: Any) -> Any:
        return engine.step(algorithm, state, jax.random.fold_in(jax.random.key(0), step))[1]

    each = jax.jit(lambda: lax.map(of_step, jnp.arange(STEPS)))()
    return np.mean([Totals().plus(jax.tree.map(lambda a: a[k], each)) for k in range(STEPS)], axis=0)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value - round(value)) < 1e-6 else f"about {value:.3g}"


def _floats(parts: np.ndarray) -> str:
    exact = all(abs(v * 10 - round(v * 10)) < 1e-6 for v in parts)
    numbers = [f"{v:.3g}" for v in parts]
    terms = [unit if n == "1" and unit else f"{n} {unit}".strip() for n, unit in zip(numbers, ("|x|", "|y|", ""), strict=True)]
    kept = [term for term, v in zip(terms, parts, strict=True) if abs(v) > 1e-6]
    return ("" if exact else "about ") + (" + ".join(kept) or "0")
