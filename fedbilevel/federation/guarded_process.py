"""Whether this process is guarded: what FLARE starts in it refuses to run if it is not."""

from __future__ import annotations

_guarded = False


def mark_guarded() -> None:
    """Say that this process is guarded."""
    global _guarded
    _guarded = True


def require_guarded() -> None:
    """Raise `RuntimeError` unless this process is guarded."""
    if not _guarded:
        raise RuntimeError(
            "this kit runs only under its guards: start it with 'fedbilevel federation start', not with FLARE's own"
        )
