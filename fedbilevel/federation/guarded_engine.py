"""FLARE's processes under guard.

python -m fedbilevel.federation.guarded_engine MODULE ARGUMENTS      one of FLARE's programs
"""

from __future__ import annotations

import importlib.metadata
import runpy
import sys

from fedbilevel.errors import InputError, in_one_line


def guard() -> None:
    """Guard this process, before one of FLARE's programs starts in it; `InputError` if that cannot be done to this version."""
    try:
        from fedbilevel.federation.guards import install

        install()
    except (ImportError, AttributeError) as error:
        found = f"nvflare {importlib.metadata.version('nvflare')} cannot be guarded ({in_one_line(error)})"
        raise InputError(f"{found}: install the version that is known to work, 2.9.0") from error


def main() -> None:
    """Start one of FLARE's programs under guard."""
    try:
        guard()
    except InputError as error:
        sys.exit(f"fedbilevel: {error}")
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
