"""The researcher's connection to a federation's server, re-established when it is lost."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

PATIENCE = 30.0  # seconds that a lost server has to come back
PAUSE = 0.5  # seconds between two attempts
ONCE = ("submit_job", "abort_job")  # never retried: one could then be done twice, and nobody wants to wait for the other


class Connection:
    """A FLARE session: a method that does not reach the server is retried, with a new session."""

    def __init__(self, new_session: Callable[[], Any], say: Callable[[str], None]):
        self._new_session, self._say = new_session, say
        self._session: Any = new_session()
        self.losses = 0  # how many new sessions were needed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def close(self) -> None:
        """End the session."""
        with contextlib.suppress(Exception):  # the server may be gone
            self._session.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        deadline = math.inf
        while True:
            try:
                if self._session is None:
                    self._session = self._new_session()
                    self.losses += 1
                return getattr(self._session, name)(*arguments)
            except Exception as error:
                if self._session is not None and not is_lost(error):
                    raise
                self.close()
                self._session = None
                if name in ONCE or time.monotonic() > deadline:
                    raise
                if deadline == math.inf:
                    self._say(f"the connection to the server is lost: retrying for {PATIENCE:.0f} s")
                    deadline = time.monotonic() + PATIENCE
                time.sleep(PAUSE)


def is_lost(error: Exception) -> bool:
    """Whether an error means that the connection to the server is lost."""
    from nvflare.fuel.flare_api.api_spec import SessionClosed

    return isinstance(error, (OSError, SessionClosed))
