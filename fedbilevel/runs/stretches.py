"""How many steps a compiled stretch takes, so that the host looks at it often enough, and not more often."""

from __future__ import annotations

import jax

from fedbilevel.engines.engine import UNLIMITED

STRETCH_SECONDS = 0.25  # how long a compiled stretch runs before the host looks at it


class StretchLength:
    """The length of the next stretch, from the pace of the last."""

    def __init__(self) -> None:
        self._alone = jax.process_count() == 1  # several processes must all make the same calls, however long those take
        self._steps = 1 if self._alone else UNLIMITED

    def end(self, step: int, last: int) -> int:
        """The step before which a stretch from `step` ends, at the run's last at the latest."""
        return min(step + self._steps, last)

    def took(self, steps: int, seconds: float) -> None:
        """Note the pace of a stretch."""
        if self._alone:
            self._steps = max(1, min(2 * self._steps, int(steps / (seconds + 1e-6) * STRETCH_SECONDS)))
