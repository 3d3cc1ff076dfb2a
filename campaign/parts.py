"""The parts of the campaign, each with its cases."""

from __future__ import annotations

from pathlib import Path

from campaign.case import Case

PARTS = {"inputs": "inputs", "calls": "library calls", "kills": "kills"}  # by name, in words
LINES, DAMAGES, CALLS = 250, 350, 250  # of the many possible ones, chosen by the seed


def listing(part: str, seed: int, made: Path) -> list[Case]:
    """The cases of a part; what each needs is imported only where it is run."""
    if part == "inputs":
        from campaign import command_lines, damaged_files

        return [*command_lines.cases(seed, LINES), *damaged_files.cases(made, seed, DAMAGES)]
    if part == "calls":
        from campaign import library_calls

        return library_calls.cases(seed, CALLS)
    from campaign import kills

    return kills.cases()
