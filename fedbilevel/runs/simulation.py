"""Experiments whose clients are simulated in this process."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fedbilevel.aggregations import text_of
from fedbilevel.algorithms import called
from fedbilevel.algorithms.base import Algorithm, require_algorithm
from fedbilevel.core.aggregation import Aggregation, require_aggregation
from fedbilevel.core.devices import require_memory
from fedbilevel.core.mean_check import check_means
from fedbilevel.core.participation import Everyone, Participation, require_participation
from fedbilevel.engines.arrivals import schedule
from fedbilevel.engines.attacks import Attack
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.in_process import InProcess
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.engines.simulated_clients import fitting
from fedbilevel.errors import InputError
from fedbilevel.runs.duration import require_time
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.spending import with_privacy
from fedbilevel.tasks.base import Task


def simulation(
    task: Task,
    algorithm: Algorithm,
    *,
    participation: Participation | None = None,
    aggregation: Aggregation | None = None,
    **options: Any,
) -> Experiment:
    """An experiment on simulated clients; a centralised method has a single one, with all rows.

    The options are those of `RunOptions`; any `Participation` may replace the three that say who takes part, and any
    `Aggregation` the one that says how answers are aggregated.
    """
    require_algorithm(algorithm)
    if aggregation is not None:
        options["aggregate"] = text_of(require_aggregation(aggregation))
    checked = RunOptions(**options)
    rule = aggregation or checked.aggregation()
    if checked.arrivals and not rule.buffers:
        raise InputError("arrivals are for an aggregation that does not wait for all answers: choose buffered")
    if rule.buffers and (checked.attack or checked.chunk_size or checked.products != "default"):
        raise InputError("an attack, a chunk size and products are for clients computed together: leave them out with buffered")
    if rule.buffers and checked.keep_best:
        raise InputError("keep_best needs rows that only clients computed together hold out: leave it out with buffered")
    drawn = checked.participation() if participation is None else participation
    require_participation("participation", drawn)
    drawn.capacity(task.population.size)
    if algorithm.pooled:
        if not rule.streams or rule.buffers or checked.attack:
            raise InputError(f"{called(algorithm)} pools all rows in one client: leave out the aggregation and the attack")
        engine = SimulatedEngine(task.population.pooled(), Everyone(), products=checked.products)
    else:
        attack = Attack.parse(checked.attack) if checked.attack else None
        population = attack.poisoned(task.population) if attack else task.population
        engine = SimulatedEngine(population, drawn, checked.chunk_size, checked.products, rule, attack)
    engine, spending = with_privacy(task, algorithm, engine, checked)
    require_memory(f"a round of {called(algorithm)}", _bytes(task, engine), "lower batch_size, clients_per_round or chunk_size")
    experiment = Experiment(task, algorithm, engine, checked, spending)
    require_time(experiment, engine)
    if not task.known_means:
        check_means(task.population, task.x, task.y, algorithm.pooled)
    if not rule.buffers:
        return experiment
    population = engine.population  # which may be private
    clients = InProcess(
        dataclasses.replace(task, population=population), algorithm, rule, schedule(checked.arrivals, checked.seed)
    )
    return dataclasses.replace(experiment, engine=DeployedEngine(clients, population, drawn, aggregation=rule))


def simulated(experiment: Experiment) -> SimulatedEngine:
    """The experiment's engine; `InputError` if its clients are not simulated."""
    if not isinstance(experiment.engine, SimulatedEngine):
        raise InputError("only simulated experiments can be counted or run together")
    return experiment.engine


def _bytes(task: Task, engine: SimulatedEngine) -> int:
    """The least that a round holds: all rows, two states, and two points and a minibatch for each client computed at once."""
    population = engine.population
    shards, cohort = (population.upper, population.lower), engine.participation.capacity(population.size)
    rows = sum(leaf.nbytes for leaf in jax.tree.leaves([s.rows for s in shards]))
    point = task.x.nbytes + task.y.nbytes
    state = point + (population.size * task.y.nbytes if task.lower_level == "local" else 0)
    state += 4 * population.size * task.x.nbytes if task.own_x else 0  # what the clients keep
    batch = sum((population.batch_size or s.longest) * s.row_bytes() for s in shards)
    at_once = engine.chunk_size or (fitting(point) if jax.default_backend() == "cpu" else cohort)
    return rows + 2 * state + min(cohort, at_once) * (2 * point + batch)
