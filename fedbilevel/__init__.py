"""Federated bilevel optimization: one algorithm, simulated in one process or deployed across many.

Names are imported on first use, so `import fedbilevel` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedbilevel.algorithms import ALGORITHMS

if TYPE_CHECKING:
    __version__: str

    from fedbilevel.algorithms.base import Algorithm as Algorithm
    from fedbilevel.algorithms.base import algorithm as algorithm
    from fedbilevel.algorithms.fedavg import FedAvg as FedAvg
    from fedbilevel.algorithms.fedbio import FedBiO as FedBiO
    from fedbilevel.algorithms.fedbio_local import FedBiOLocal as FedBiOLocal
    from fedbilevel.algorithms.fedbioacc import FedBiOAcc as FedBiOAcc
    from fedbilevel.algorithms.fedmbo import FedMBO as FedMBO
    from fedbilevel.algorithms.fedpace import FedPace as FedPace
    from fedbilevel.algorithms.fedpace_local import FedPaceLocal as FedPaceLocal
    from fedbilevel.algorithms.fedpace_own import FedPaceOwn as FedPaceOwn
    from fedbilevel.algorithms.mefbo import MeFBO as MeFBO
    from fedbilevel.algorithms.simfbo import SimFBO as SimFBO
    from fedbilevel.core.aggregation import Aggregation as Aggregation
    from fedbilevel.core.aggregation import aggregation as aggregation
    from fedbilevel.core.clients import Clients as Clients
    from fedbilevel.core.clients import at_client as at_client
    from fedbilevel.core.clients import iterate as iterate
    from fedbilevel.core.participation import Bernoulli as Bernoulli
    from fedbilevel.core.participation import Dropouts as Dropouts
    from fedbilevel.core.participation import Everyone as Everyone
    from fedbilevel.core.participation import Uniform as Uniform
    from fedbilevel.core.population import Client as Client
    from fedbilevel.core.population import Population as Population
    from fedbilevel.core.privacy import RowPrivacy as RowPrivacy
    from fedbilevel.core.problem import Pair as Pair
    from fedbilevel.core.problem import Point as Point
    from fedbilevel.core.problem import Problem as Problem
    from fedbilevel.core.sets import Ball as Ball
    from fedbilevel.core.sets import Box as Box
    from fedbilevel.core.sets import Simplex as Simplex
    from fedbilevel.errors import Diverged as Diverged
    from fedbilevel.errors import InputError as InputError
    from fedbilevel.library.clean import clean as clean
    from fedbilevel.library.report_page import write_report as write_report
    from fedbilevel.library.resume import resume as resume
    from fedbilevel.library.solution import Solution as Solution
    from fedbilevel.library.solution import load as load
    from fedbilevel.library.solve import solve as solve
    from fedbilevel.library.sweep import sweep as sweep
    from fedbilevel.library.sweep_result import SweepResult as SweepResult
    from fedbilevel.library.tune import tune as tune
    from fedbilevel.library.tune_result import TuneResult as TuneResult
    from fedbilevel.report.tensorboard import TensorBoard as TensorBoard
    from fedbilevel.settings import choice as choice
    from fedbilevel.settings import count as count
    from fedbilevel.settings import flag as flag
    from fedbilevel.settings import real as real
    from fedbilevel.settings import step_size as step_size
    from fedbilevel.settings import text as text
    from fedbilevel.tasks.base import Task as Task
    from fedbilevel.tasks.client_data import ClientData as ClientData
    from fedbilevel.tasks.data.columns import Columns as Columns
    from fedbilevel.tasks.data.preprocessing import Preprocessing as Preprocessing
    from fedbilevel.tasks.data.tables import Tables as Tables
    from fedbilevel.tasks.data.tables import tables as tables
    from fedbilevel.tasks.declare import task as task
    from fedbilevel.tasks.models.from_torch import from_torch as from_torch

_MODULES = {
    name: module
    for module, names in {
        "algorithms.base": ["Algorithm", "algorithm"],
        "core.aggregation": ["Aggregation", "aggregation"],
        "core.clients": ["Clients", "at_client", "iterate"],
        "errors": ["Diverged", "InputError"],
        "core.participation": ["Bernoulli", "Dropouts", "Everyone", "Uniform"],
        "core.population": ["Client", "Population"],
        "core.privacy": ["RowPrivacy"],
        "core.problem": ["Pair", "Point", "Problem"],
        "core.sets": ["Ball", "Box", "Simplex"],
        "report.tensorboard": ["TensorBoard"],
        "library.clean": ["clean"],
        "library.report_page": ["write_report"],
        "library.resume": ["resume"],
        "library.solution": ["Solution", "load"],
        "library.solve": ["solve"],
        "library.sweep": ["sweep"],
        "library.sweep_result": ["SweepResult"],
        "library.tune": ["tune"],
        "library.tune_result": ["TuneResult"],
        "settings": ["choice", "count", "flag", "real", "step_size", "text"],
        "tasks.base": ["Task"],
        "tasks.client_data": ["ClientData"],
        "tasks.data.columns": ["Columns"],
        "tasks.data.preprocessing": ["Preprocessing"],
        "tasks.data.tables": ["Tables", "tables"],
        "tasks.declare": ["task"],
        "tasks.models.from_torch": ["from_torch"],
    }.items()
    for name in names
}

_ALGORITHMS = {entry.name: entry for entry in ALGORITHMS.bundled.values()}
__all__ = ["ALGORITHMS", *_ALGORITHMS, *_MODULES]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _ALGORITHMS:
        return _ALGORITHMS[name].load()
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("fedbilevel")
    if name in _MODULES:
        return getattr(importlib.import_module(f"fedbilevel.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'fedbilevel' has no attribute {name!r}")
