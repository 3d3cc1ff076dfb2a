"""What a site insists on, whatever a server asks of it: the `[policy]` of its `site.toml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.errors import InputError
from fedbilevel.settings import nearest

REFUSABLE = ("gather",)


@dataclass(frozen=True)
class SitePolicy:
    """The conditions on which a site takes part; by default there are none."""

    refuse: Sequence[str] = ()  # gather: algorithms whose server needs single answers

    def __post_init__(self) -> None:
        for name in self.refuse:
            if name not in REFUSABLE:
                raise InputError(f"policy: there is nothing to refuse called {name!r}{nearest(name, REFUSABLE)}")

    def agree(self, algorithm: Algorithm) -> None:
        """Raise `InputError` unless a run of this algorithm meets the conditions."""
        if "gather" in self.refuse and algorithm.single_answers:
            raise InputError(
                f"this site refuses gather, but the server of {type(algorithm).__name__} needs what each site sends: refused"
            )
