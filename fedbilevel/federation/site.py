"""A site of a federation: takes part in runs with its own data, and tells the server how many rows it has, and nothing more."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import Array
from nvflare.collab import collab

from fedbilevel.aggregations import bundled
from fedbilevel.aggregations.private_sum import PrivateSum
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.devices import memory_ceiling
from fedbilevel.core.population import Population
from fedbilevel.core.privacy import RowPrivacy
from fedbilevel.core.private_tasks import require_private
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.engines.table_exchange import answered
from fedbilevel.errors import InputError, NotFinite, Withheld, in_one_line
from fedbilevel.federation.answered_sums import AnsweredSumsFile
from fedbilevel.federation.begin_message import BeginMessage, Holdings
from fedbilevel.federation.compile_cache import keep_compiled
from fedbilevel.federation.nvflare_support import documented
from fedbilevel.federation.own_noise import OwnNoise
from fedbilevel.federation.privacy_ledger import Ledger
from fedbilevel.federation.private_answers import PrivateAnswers
from fedbilevel.federation.site_data import SiteData
from fedbilevel.federation.site_store import CHECKPOINTS, DiskStore, make_room
from fedbilevel.federation.sparse_log import SparseLog
from fedbilevel.federation.table_questions import parted
from fedbilevel.report.suspects import SiteRows
from fedbilevel.runs.options import read_privacy
from fedbilevel.tasks.base import Task
from fedbilevel.tasks.label_errors import LabelErrors, judged

if TYPE_CHECKING:
    from fedbilevel.engines.secure_sum import Identity

logger = logging.getLogger(__name__)

Reply = list  # [True, bytes], or [False, the kind of a `Failure`, its line]


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """During the block, keep errors in the site's own files to its log: the line could name them."""
    try:
        yield
    except InputError as error:
        raise Withheld("this site could not load its data; its log says why", error) from None


def _where(error: Exception) -> str:
    """The last calls that led to an error, the innermost first."""
    calls = traceback.extract_tb(error.__traceback__)[-6:]
    return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in reversed(calls))


def _ledger(own: SiteData) -> Ledger:
    """What the site's rows have been asked for so far."""
    policy = own.policy
    return Ledger.of_site(own.file.parent / policy.ledger, policy.epsilon, policy.delta)


SERVER = "server"  # FLARE's name for it


class _Agreed(NamedTuple):
    """A run that complies with what the site insists on, as far as that can be said without its data."""

    run: BeginMessage
    own: SiteData
    settings: Any  # the task with its knobs
    algorithm: Algorithm
    rule: Aggregation
    privacy: RowPrivacy | None


class Site:
    """What FLARE creates at a site for a job; its three published methods are all that the server can call."""

    def __init__(self) -> None:
        self._runtime: ClientRuntime | None = None
        self._begun: dict[bytes, bytes] = {}  # the run that it takes part in, and its reply
        self._tables: dict[bytes, Callable[[bytes], bytes]] = {}  # the run that asks about its table, and what answers
        self._refusals = SparseLog(logger)
        self._one_at_a_time = threading.Lock()

    @documented(collab.init)
    def prepare(self) -> None:
        """Find the site's own folder."""
        self._kit = Path(collab.workspace.get_root_dir())

    @documented(collab.publish)
    def begin(self, request: bytes) -> Reply:
        """Take part in the run that the server names; the reply says how many rows the site has, and if they are its own."""
        return self._guarded(lambda: self._begun.get(request) or self._begin(request))

    @documented(collab.publish)
    def describe(self, request: bytes) -> Reply:
        """Answer a question about the site's table before a run begins: with categories or sums, and no row."""
        return self._guarded(lambda: self._describe(request))

    @documented(collab.publish)
    def answer(self, request: bytes) -> Reply:
        """Answer one request of the run."""
        return self._guarded(lambda: self._answer(request))

    def _guarded(self, work: Callable[[], bytes]) -> Reply:
        """Let no traceback leave the site: a refusal is one line, and any other failure is only its type."""
        with self._one_at_a_time:
            try:
                if collab.caller != SERVER:
                    raise InputError(f"{collab.caller} is not the server: a site answers nobody else")
                return [True, work()]
            except (InputError, NotFinite) as error:
                self._refusals.warning(f"refused: {in_one_line(error.reason if isinstance(error, Withheld) else error)}")
                return [False, str(Failure.of(error).kind), str(error)]
            except Exception as error:
                self._refusals.warning(f"a request failed: {in_one_line(repr(error))}; {_where(error)}")
                why = f" ({error.strerror})" if isinstance(error, OSError) else ""  # without the file's name
                return [False, str(Kind.BROKEN), f"{type(error).__name__}{why} at the site: see its log"]

    def _agreed(self, request: bytes) -> _Agreed:
        """What a message begins; `InputError`, before any data is read, if the site refuses."""
        run = BeginMessage.read(request)
        with _unsaid():
            own = SiteData.read(self._kit / "local" / "site.toml")
        own.agree(run.task, run.knobs)
        settings = own.configured("task", run.task, run.code, run.knobs)
        jax.config.update("jax_enable_x64", run.precision == "float64")
        algorithm = own.configured("algorithm", run.algorithm, run.code, run.hyperparameters)
        rule, privacy = bundled(run.aggregate), read_privacy(run.privacy)
        own.policy.agree(algorithm, rule, privacy is not None)
        own.policy.agree_weights(rule, run.weights)
        return _Agreed(run, own, settings, algorithm, rule, privacy)

    def _describe(self, request: bytes) -> bytes:
        beginning, question = parted(request)
        if beginning not in self._tables:
            run, own, settings, _, rule, _ = self._agreed(beginning)
            own.policy.agree_to_open_sums()
            if rule.clients_add_noise:
                raise InputError(
                    "tables are preprocessed from each site's exact sums, which private-sum does not hide: refused"
                )
            with _unsaid():
                table = own.table(settings, run.number)
            own.policy.agree_fewest(table.fewest)
            self._tables = {beginning: partial(answered, table, len(run.names))}
        return self._tables[beginning](question)

    def _begin(self, request: bytes) -> bytes:
        run, own, settings, algorithm, rule, privacy = self._agreed(request)
        keep_compiled(self._kit)
        with memory_ceiling(own.policy.memory * 1e9):
            with _unsaid():
                task, population = own.load(settings, run.number, run.sites, run.fit)
            task.require_kind(algorithm)
            own.policy.agree_rows(population)
            population = dataclasses.replace(population, privacy=privacy)
            if privacy is not None:
                require_private(population, task.x, task.y)
            known = call_shapes(algorithm, population, task.x, task.y)
            times = own.policy.agree_work(algorithm, population, known, run.number)
        memory = own.policy.memory * 1e9
        store = DiskStore(self._kit / "kept", run.identity, CHECKPOINTS * memory)
        answers = None
        if privacy is not None:
            answers = PrivateAnswers(run, algorithm, population, known, _ledger(own))
            answers.require(run.planned)
        noise = None
        if isinstance(rule, PrivateSum):
            noise = OwnNoise(run.identity, rule, _ledger(own))
            noise.require(run.planned)
        answered = None
        if rule.hides and noise is None:  # which is other noise for every sum
            answered = AnsweredSumsFile(self._kit / "sums", run.identity, run.names)
        identity, observe = self._identity(run, rule), self._lists(run, own, settings, task, population)
        self._runtime = ClientRuntime(
            *(algorithm, population, run.number, run.weight, known, store, rule, identity),
            own=answers,
            noise=noise,
            observe=observe,
            answered=answered,
            memory=memory,
            times=times,
        )
        logger.info("takes part in run %s: %s with %s, as client %d", run.identity, run.task, run.algorithm, run.number)
        found = task.declared.found if task.declared else ()
        self._begun = {request: json.dumps(asdict(Holdings.of(population, own.loader == "share", found))).encode()}
        return self._begun[request]

    def _lists(
        self, run: BeginMessage, own: SiteData, settings: Any, task: Task, population: Population
    ) -> Callable[[Array, Array], None] | None:
        """What writes the site's list of suspects whenever metrics are due, if its rows are being cleaned."""
        if not isinstance(settings, LabelErrors) or own.loader != "table":
            return None
        assert task.preprocessing is not None
        rows, source = population.lower.rows, own.file.parent / own.path
        site, table = run.names[run.number], own.table(settings, run.number)
        listed = SiteRows.of(site, table, source, rows["label"], task.preprocessing.classes)
        folder = self._kit / "clean" / run.identity

        def write(x: Array, y: Array) -> None:
            make_room(folder)
            listed.write(folder, judged(x, task.y_tree(y), rows))

        return write

    def _identity(self, run: BeginMessage, rule: Aggregation) -> Identity | None:
        """Who this site is to the others, if the run's sums are secure."""
        if not rule.hides:
            return None
        from fedbilevel.federation.kit_identity import KitIdentity

        return KitIdentity(self._kit, run.names, run.number, run.agreement())

    def _answer(self, request: bytes) -> bytes:
        if self._runtime is None:
            raise InputError("no run has begun here: refused")
        return self._runtime.answer(request)
