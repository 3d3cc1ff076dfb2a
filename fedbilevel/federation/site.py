"""A site of a federation: takes part in runs with its own data, and tells the server nothing more."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from nvflare.collab import collab

from fedbilevel.aggregations import bundled
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.aggregation import Aggregation
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.failure import Failure, Kind
from fedbilevel.errors import InputError, NotFinite, in_one_line
from fedbilevel.federation.begin_message import BeginMessage
from fedbilevel.federation.compile_cache import keep_compiled
from fedbilevel.federation.job import OWN_DATA, SIMULATED
from fedbilevel.federation.nvflare_support import documented
from fedbilevel.federation.site_data import SiteData
from fedbilevel.federation.site_store import DiskStore
from fedbilevel.registry import find

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
MOST_LINES = 200  # refusals logged in a job before most are left out


class Site:
    """What FLARE creates at a site for a job; its two published methods are all that the server can call."""

    def __init__(self) -> None:
        self._runtime: ClientRuntime | None = None
        self._begun: dict[bytes, bytes] = {}  # the run that it takes part in, and its reply
        self._refused = 0
        self._one_at_a_time = threading.Lock()

    @documented(collab.init)
    def prepare(self) -> None:
        """Find the site's own folder."""
        self._kit = Path(collab.workspace.get_root_dir())

    @documented(collab.publish)
    def begin(self, request: bytes) -> Reply:
        """Take part in the run that the server names; the reply says whether the site's data is its own."""
        return self._guarded(lambda: self._begun.get(request) or self._begin(request))

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
                self._log(f"refused: {in_one_line(error)}")
                return [False, str(Failure.of(error).kind), str(error)]
            except Exception as error:
                self._log(f"a request failed: {in_one_line(repr(error))}; {_where(error)}")
                return [False, str(Kind.BROKEN), f"{type(error).__name__} at the site: see its log"]

    def _log(self, line: str) -> None:
        """Log a warning; of very many, which would fill the disk, only one in a thousand."""
        self._refused += 1
        if self._refused <= MOST_LINES or self._refused % 1000 == 0:
            logger.warning("%s", line)
        if self._refused == MOST_LINES:
            logger.warning("%d requests were refused or failed: from now on one in 1000 is logged", MOST_LINES)

    def _begin(self, request: bytes) -> bytes:
        run = BeginMessage.read(request)
        jax.config.update("jax_enable_x64", run.precision == "float64")
        keep_compiled(self._kit)
        with _unsaid():
            own = SiteData.read(self._kit / "local" / "site.toml")
        own.agree(run.task, run.knobs)
        algorithm = find(ALGORITHMS.bundled, "algorithm", run.algorithm).configure(run.algorithm, run.hyperparameters)
        rule = bundled(run.aggregate)
        own.policy.agree(algorithm, rule)
        with _unsaid():
            task, population = own.load(run.knobs)
        known, store = call_shapes(algorithm, population, task.x, task.y), DiskStore(self._kit / "kept", run.identity)
        self._runtime = ClientRuntime(
            algorithm, population, run.number, run.weight, known, store, rule, self._identity(run, rule)
        )
        logger.info("takes part in run %s: %s with %s, as client %d", run.identity, run.task, run.algorithm, run.number)
        word = SIMULATED if own.loader == "share" else OWN_DATA
        self._begun = {request: word}
        return word

    def _identity(self, run: BeginMessage, rule: Aggregation) -> Identity | None:
        """Who this site is to the others, if the run's sums are secure."""
        if not rule.hides:
            return None
        from fedbilevel.federation.kit_identity import KitIdentity

        return KitIdentity(self._kit, run.sites, run.number, run.identity)

    def _answer(self, request: bytes) -> bytes:
        if self._runtime is None:
            raise InputError("no run has begun here: refused")
        return self._runtime.answer(request)
