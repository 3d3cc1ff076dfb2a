"""The researcher's connection to a federation's server, made anew when it is lost."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

PATIENCE = 30.0  # seconds for which a server that was there may fail to answer
PAUSE = 0.5  # seconds between two attempts
ONCE = ("submit_job", "abort_job")  # what could be done twice, and what is done when nobody wants to wait


class Connection:
    """The engine's session: a method of it that does not reach the server is tried again, with a new session."""

    def __init__(self, new_session: Callable[[], Any], say: Callable[[str], None]):
        self._new_session, self._say = new_session, say
        self._session: Any = new_session()
        self.losses = 0  # how often a new session had to be made

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
                    self._say(f"the connection to the server is lost: trying again for {PATIENCE:.0f} s")
                    deadline = time.monotonic() + PATIENCE
                time.sleep(PAUSE)


def is_lost(error: Exception) -> bool:
    """Whether an error says that there is no connection to the server any more."""
    from nvflare.fuel.flare_api.api_spec import SessionClosed

    return isinstance(error, (OSError, SessionClosed))
