"""The server's part of a job: runs a run folder's experiment with the job's sites as its clients."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import signal
from collections.abc import Mapping
from pathlib import Path

import jax
from nvflare.collab import collab

from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.failure import Failures
from fedbilevel.errors import Diverged, InputError, in_one_line
from fedbilevel.federation.begin_message import BeginMessage
from fedbilevel.federation.compile_cache import keep_compiled
from fedbilevel.federation.flare import Flare
from fedbilevel.federation.job import SIMULATED, SITES, STOP, Status, write_status
from fedbilevel.federation.nvflare_support import documented
from fedbilevel.federation.roster import Roster
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import Experiment, Snapshot
from fedbilevel.runs.files import write_atomically
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.stopping import Interrupted, StopRequest
from fedbilevel.tasks.base import Task
from fedbilevel.user_files import read_json

CHECKPOINT_SECONDS = 3.0  # short, since a dead job costs more than a dead process: its sites must restart
logger = logging.getLogger(__name__)


class ExperimentServer:
    """What FLARE creates at the server for a job."""

    def __init__(self, folder: str, identity: str, sites: list[str]):
        self.folder, self.identity, self.sites = folder, identity, sites
        self._left_out: Failures = {}
        self._data: Mapping[int, bytes] = {}  # what the sites say about theirs

    @documented(collab.main)
    def run(self) -> None:
        """Run from the checkpoint, or from the start, to the end; the outcome is in the run folder."""
        folder = RunFolder(Path(self.folder))
        if not folder.holds(self.identity):
            raise InputError(f"{folder.path} holds a different run from the job's: submit it again")
        jax.config.update("jax_enable_x64", folder.configuration.precision == "float64")
        keep_compiled(Path(collab.workspace.get_root_dir()))
        present = {proxy.name: proxy for proxy in collab.clients}
        numbers = {self.sites.index(name): proxy for name, proxy in present.items() if name in self.sites}
        transport = Flare(numbers, dict(enumerate(self.sites)), folder.configuration.round_timeout, _is_aborted)
        ended: Status = {}
        try:
            experiment = self.experiment(folder.configuration, transport)
            write_status(folder.path, {"begun": True, "left_out": self._reasons()})
            self._execute(folder, experiment)
        except Diverged as error:
            logger.warning("%s", error)
        except (InputError, RuntimeError, OSError) as error:
            logger.error("the run stopped: %s", error)
            ended = {"error": str(error), "final": isinstance(error, InputError)}
        except Exception as error:
            logger.exception("the run stopped")
            ended = {"error": in_one_line(f"{type(error).__name__}: {error}")}
        finally:
            if folder.holds(self.identity):
                self._all_simulated()
                write_status(folder.path, {"ended": True, "left_out": self._reasons(), **ended})

    def _execute(self, folder: RunFolder, experiment: Experiment) -> None:
        stop = StopRequest()

        def observe(moment: Snapshot) -> None:
            if (folder.path / STOP).exists():
                stop.signum = signal.SIGINT

        try:
            folder.execute(stop, observe, CHECKPOINT_SECONDS, experiment)
        except Interrupted:
            logger.info("stopped on request, after a checkpoint")

    def experiment(self, configuration: Configuration, transport: Flare) -> Experiment:
        """The experiment that the configuration describes, once the sites have begun it."""
        experiment = configuration.experiment()
        task, population = experiment.task, experiment.task.population
        if population.size != len(self.sites):
            raise InputError(f"the task has {population.size} clients, but the federation has {len(self.sites)} sites")
        names = ("task", "knobs", "algorithm", "hyperparameters", "precision")
        common = {name: getattr(configuration, name) for name in names}
        common |= {"identity": self.identity, "aggregate": configuration.options.aggregate, "sites": tuple(self.sites)}
        beginnings = {
            m: BeginMessage(**common, number=m, weight=float(w) * population.size).encoded()
            for m, w in enumerate(population.weights)
        }
        roster = Roster(transport, beginnings, configuration.round_timeout)
        for m, failure in roster.begin().items():
            logger.warning("%s has not begun: %s", self.sites[m], failure)
        self._left_out, self._data = roster.left_out, roster.data
        if not self._all_simulated():
            task = _without_truths(task)
        shapes = call_shapes(experiment.algorithm, population, task.x, task.y)
        engine = DeployedEngine(
            roster, population, configuration.options.participation(), shapes, configuration.options.aggregation()
        )
        return dataclasses.replace(experiment, task=task, engine=engine)

    def _reasons(self) -> list[str]:
        """Why sites are left out, one line each."""
        return [str(failure) for failure in self._left_out.values()]

    def _all_simulated(self) -> bool:
        """Whether every site has said that its data is simulated, in this job or in an earlier one of the run."""
        file, known = Path(self.folder) / SITES, dict[str, bool]()
        with contextlib.suppress(InputError):
            known = read_json(file, dict[str, bool])
        known |= {self.sites[m]: word == SIMULATED for m, word in self._data.items()}
        write_atomically(file, json.dumps(known).encode())
        return all(known.get(site) for site in self.sites)


def _is_aborted() -> bool:
    return bool(collab.is_aborted)


def _without_truths(task: Task) -> Task:
    """The task without the metrics that only simulated data can have."""
    return dataclasses.replace(
        task, metrics=lambda x, y: {name: value for name, value in task.metrics(x, y).items() if name not in task.truths}
    )
