"""The server's part of a job: runs a run folder's experiment with the job's sites as its clients."""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from nvflare.collab import collab

from fedbilevel.aggregations import bundled, text_of
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.engines.arrivals import ARRIVALS, ArrivalsFile
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.table_exchange import RemoteTables
from fedbilevel.errors import Diverged, InputError, in_one_line
from fedbilevel.federation.begin_message import BeginMessage
from fedbilevel.federation.compile_cache import keep_compiled
from fedbilevel.federation.flare import Flare, JobAborted
from fedbilevel.federation.job import SITES, STOP, Status, write_status
from fedbilevel.federation.nvflare_support import documented
from fedbilevel.federation.opened_sums import OPENED, OpenedSumsFile
from fedbilevel.federation.own_secret import own_secret, private_key
from fedbilevel.federation.pinned_code import sha256_here
from fedbilevel.federation.roster import BEGINNING, Roster
from fedbilevel.federation.sites_data import SitesData
from fedbilevel.federation.table_questions import TableQuestions
from fedbilevel.own_code import label
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.experiment import Experiment, Snapshot
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import privacy_text
from fedbilevel.runs.spending import RowSpending
from fedbilevel.runs.stopping import Interrupted, StopRequest
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.client_data import ClientData
from fedbilevel.tasks.data.preprocessing import fitted

if TYPE_CHECKING:
    from fedbilevel.engines.secure_sum import Signatures

CHECKPOINT_SECONDS = 3.0  # short, since a dead job costs more than a dead process: its sites must restart
logger = logging.getLogger(__name__)


class ExperimentServer:
    """What FLARE creates at the server for a job."""

    def __init__(self, folder: str, identity: str, sites: list[str]):
        self.folder, self.identity, self.sites = folder, identity, sites
        self._roster: Roster | None = None
        self._data = SitesData(Path(folder) / SITES, sites)
        self._said: list[str] = []  # about the sites' data

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
            write_status(folder.path, {"begun": True, "said": self._said, "left_out": self._reasons()})
            self._execute(folder, experiment)
        except (Diverged, JobAborted) as error:
            logger.warning("%s", error)
        except (InputError, RuntimeError, OSError) as error:
            logger.error("the run stopped: %s", error)
            ended = {"error": str(error), "final": isinstance(error, InputError)}
        except Exception as error:
            logger.exception("the run stopped")
            ended = {"error": in_one_line(f"{type(error).__name__}: {error}")}
        finally:
            if folder.holds(self.identity):
                self._data.add(self._roster.data if self._roster else {})  # also of sites that began late
                write_status(folder.path, {"ended": True, "said": self._said, "left_out": self._reasons(), **ended})

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
        fit = self._fit(configuration, transport)
        experiment, beginnings = self._described(configuration, fit)
        roster = self._roster = Roster(transport, beginnings, configuration.round_timeout)
        failures = roster.begin()
        self._data.add(roster.data)
        declared = experiment.task.declared
        if configuration.options.weights == "rows" or (declared and declared.found) or experiment.spending:
            for m in self._data.unknown:
                line = f"the run cannot begin before all sites have said how many rows they have; {failures[m]}"
                raise (InputError if m in roster.left_out else RuntimeError)(line)
            experiment, again = self._described(configuration, fit)
            if again != beginnings:
                beginnings, failures = again, roster.begin(again)
        for m, failure in failures.items():
            logger.warning("%s has not begun: %s", self.sites[m], failure)
        task = self._data.measurable(experiment.task)
        if not self._data.simulated or configuration.options.weights is not None:
            self._said = [self._data.line(task.population.weights.tolist())]
        shapes = call_shapes(experiment.algorithm, task.population, task.x, task.y)
        drawn, tested = configuration.options.participation(), None if self._data.simulated else self._data.test_rows
        rule, own = experiment.engine.aggregation, None
        if rule.server_adds_noise:
            own = self._own_key(own_secret(Path(collab.workspace.get_root_dir()) / "privacy"))
        record = ArrivalsFile(Path(self.folder) / ARRIVALS)
        signatures = self._signatures(rule, beginnings)
        opened = OpenedSumsFile(Path(self.folder) / OPENED, self.identity) if rule.hides else None
        engine = DeployedEngine(roster, task.population, drawn, shapes, tested, rule, own, record, signatures, opened)
        return dataclasses.replace(experiment, task=task, engine=engine)

    def _own_key(self, secret: bytes) -> Callable[[bytes], np.ndarray]:
        """What makes the words of a random key for a question of this run."""
        return lambda question: private_key(secret, b"\0".join([self.identity.encode(), question]))

    def _signatures(self, rule: Aggregation, beginnings: dict[int, bytes]) -> Signatures | None:
        """The sites' signatures, if the run's sums are secure."""
        if not rule.hides:
            return None
        from fedbilevel.federation.kit_identity import SiteSignatures

        agreed = BeginMessage.read(beginnings[0]).agreement()
        return SiteSignatures(Path(collab.workspace.get_root_dir()), self.sites, agreed)

    def _fit(self, configuration: Configuration, transport: Flare) -> str:
        """The preprocessing of the sites' tables: the one that the run began with, or from what they say; "" without tables."""
        columns = configuration.task_settings().columns
        if columns is None:
            return ""
        fit = RunFolder(Path(self.folder)).preprocessing()
        if fit is None:
            beginnings = self._beginnings(configuration, "", [1.0] * len(self.sites))
            questions = TableQuestions(transport, beginnings, max(configuration.round_timeout, BEGINNING))
            fit = fitted(columns, RemoteTables(questions, columns, len(self.sites)))
        return fit.encoded().decode()

    def _described(self, configuration: Configuration, fit: str) -> tuple[Experiment, dict[int, bytes]]:
        """The experiment, simulated, as far as the sites' data is known, and the message that begins it for each site."""
        experiment = configuration.experiment(ClientData(configuration.data, self._data.found, fit=fit))
        population = experiment.task.population
        if population.size != len(self.sites):
            raise InputError(f"the task has {population.size} clients, but the federation has {len(self.sites)} sites")
        if configuration.options.weights == "rows":
            population = self._data.by_rows(population)
        weights = [float(w) * population.size for w in population.weights]
        if isinstance(experiment.spending, RowSpending) and not self._data.unknown:
            experiment = dataclasses.replace(experiment, spending=self._data.costing(experiment.spending))
        messages = self._beginnings(configuration, fit, weights, experiment)
        return dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, population=population)), messages

    def _beginnings(
        self, configuration: Configuration, fit: str, weights: list[float], experiment: Experiment | None = None
    ) -> dict[int, bytes]:
        """For each site the message that begins the run, or that asks about its table if there is no experiment yet."""
        spending = experiment.spending if experiment else None
        rows = spending if isinstance(spending, RowSpending) else None
        aggregate = configuration.options.aggregate
        rule = bundled(aggregate)
        if experiment and rule.clients_add_noise:  # then sites must know the noise
            aggregate = text_of(experiment.engine.aggregation)
        task, algorithm, _ = configuration.names()
        message = BeginMessage(
            label(task),
            configuration.knobs,
            label(algorithm),
            configuration.hyperparameters,
            configuration.precision,
            self.identity,
            number=0,
            weight=1.0,
            code={"task": sha256_here(TASKS, task), "algorithm": sha256_here(ALGORITHMS, algorithm)},
            fit=fit,
            sites=self._data.found,
            aggregate=aggregate,
            names=tuple(self.sites),
            privacy="" if rows is None else privacy_text(rows.privacy),
            planned={} if spending is None or self._data.unknown else spending.planned(),
            weights=tuple(weights) if rule.hides else (),
        )
        return {m: dataclasses.replace(message, number=m, weight=w).encoded() for m, w in enumerate(weights)}

    def _reasons(self) -> list[str]:
        """Why sites are left out, one line each."""
        return [str(failure) for failure in self._roster.left_out.values()] if self._roster else []


def _is_aborted() -> bool:
    return bool(collab.is_aborted)
