"""A site of a federation: takes part in runs with its own data, and tells the server how many rows it has, and nothing more."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from nvflare.collab import collab

from fedbilevel.aggregations import bundled
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.core.devices import memory_ceiling
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.engines.table_exchange import answered
from fedbilevel.errors import InputError, NotFinite, in_one_line
from fedbilevel.federation.begin_message import BeginMessage, Holdings
from fedbilevel.federation.compile_cache import keep_compiled
from fedbilevel.federation.nvflare_support import documented
from fedbilevel.federation.site_data import SiteData
from fedbilevel.federation.site_store import DiskStore
from fedbilevel.federation.sparse_log import SparseLog
from fedbilevel.federation.table_questions import parted
from fedbilevel.tasks.data.table_sums import SiteTable

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
        logger.error("this site cannot take part: %s", error)
        raise InputError("this site could not load its data; its log says why") from None


def _where(error: Exception) -> str:
    """The last calls that led to an error, the innermost first."""
    calls = traceback.extract_tb(error.__traceback__)[-6:]
    return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in reversed(calls))


SERVER = "server"  # FLARE's name for it


class Site:
    """What FLARE creates at a site for a job; its three published methods are all that the server can call."""

    def __init__(self) -> None:
        self._runtime: ClientRuntime | None = None
        self._begun: dict[bytes, bytes] = {}  # the run that it takes part in, and its reply
        self._tables: dict[bytes, SiteTable] = {}  # the run that asks about it, and its table
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
                self._refusals.warning(f"refused: {in_one_line(error)}")
                return [False, str(Failure.of(error).kind), str(error)]
            except Exception as error:
                self._refusals.warning(f"a request failed: {in_one_line(repr(error))}; {_where(error)}")
                why = f" ({error.strerror})" if isinstance(error, OSError) else ""  # without the file's name
                return [False, str(Kind.BROKEN), f"{type(error).__name__}{why} at the site: see its log"]

    def _agreed(self, request: bytes) -> tuple[BeginMessage, SiteData, Any]:
        """The run that a message begins, the site's data, and the task with its settings; `InputError` if the site refuses."""
        run = BeginMessage.read(request)
        with _unsaid():
            own = SiteData.read(self._kit / "local" / "site.toml")
        own.agree(run.task, run.knobs)
        return run, own, own.configured("task", run.task, run.code, run.knobs)

    def _describe(self, request: bytes) -> bytes:
        beginning, question = parted(request)
        if beginning not in self._tables:
            run, own, settings = self._agreed(beginning)
            own.policy.agree_to_open_sums()
            with _unsaid():
                self._tables = {beginning: own.table(settings, run.number)}
        return answered(self._tables[beginning], question)

    def _begin(self, request: bytes) -> bytes:
        run, own, settings = self._agreed(request)
        jax.config.update("jax_enable_x64", run.precision == "float64")
        keep_compiled(self._kit)
        algorithm = own.configured("algorithm", run.algorithm, run.code, run.hyperparameters)
        rule = bundled(run.aggregate)
        own.policy.agree(algorithm, rule)
        with memory_ceiling(own.policy.memory * 1e9):
            with _unsaid():
                task, population = own.load(settings, run.number, run.sites, run.fit)
            own.policy.agree_rows(population)
        known, store = call_shapes(algorithm, population, task.x, task.y), DiskStore(self._kit / "kept", run.identity)
        self._runtime = ClientRuntime(
            algorithm, population, run.number, run.weight, known, store, rule, self._identity(run, rule)
        )
        logger.info("takes part in run %s: %s with %s, as client %d", run.identity, run.task, run.algorithm, run.number)
        found = task.declared.found if task.declared else ()
        self._begun = {request: json.dumps(asdict(Holdings.of(population, own.loader == "share", found))).encode()}
        return self._begun[request]

    def _identity(self, run: BeginMessage, rule: Aggregation) -> Identity | None:
        """Who this site is to the others, if the run's sums are secure."""
        if not rule.hides:
            return None
        from fedbilevel.federation.kit_identity import KitIdentity

        return KitIdentity(self._kit, run.names, run.number, run.identity)

    def _answer(self, request: bytes) -> bytes:
        if self._runtime is None:
            raise InputError("no run has begun here: refused")
        return self._runtime.answer(request)
