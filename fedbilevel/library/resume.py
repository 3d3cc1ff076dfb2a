"""The command `resume` as a call."""

from __future__ import annotations

from pathlib import Path

from fedbilevel.errors import Diverged, InputError, warn
from fedbilevel.library.paths import path_of
from fedbilevel.library.recorded import execute
from fedbilevel.library.solution import Solution, load, only_run
from fedbilevel.library.sweep import continued
from fedbilevel.library.sweep_result import SweepResult
from fedbilevel.library.tune import continued as continued_tuning
from fedbilevel.library.tune_result import TuneResult
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.stopping import resume_command
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.tuning.folder import TuningFolder
from fedbilevel.runs.versions import changes_since, note_on_changes
from fedbilevel.user_files import naming


def resume(folder: str | Path, *, changed_code: bool = False, trust_code: bool = False) -> Solution | SweepResult | TuneResult:
    """Continue a run, a sweep or a tuning that was stopped or killed, whether a call or the command began it.

    It shows its progress, and Ctrl-C leaves what is done. One that has ended is not run again.

    Args:
        folder: the folder of the run, the sweep or the tuning.
        changed_code: continue although your own file with the task or algorithm has changed.
        trust_code: execute the file of a run that somebody else began, or that began elsewhere.

    Returns:
        What `load` gives for a run, what `sweep` returns for a sweep, and what `tune` returns for a tuning.

    Raises:
        InputError: there is nothing to continue, or it may not be continued.
        Diverged: the run diverged, now or before.
    """
    place, said = path_of("folder", folder), {"changed": changed_code, "trusted": trust_code}
    if (place / "sweep.json").exists():
        return continued(SweepFolder(place), said)
    if TuningFolder.find(place):
        return continued_tuning(place, said)
    RunFolder.complete(place)
    run = only_run(place)
    if run.configuration.federation:
        raise InputError(f"{run.path} is a run on a federation: continue it with '{resume_command(run.path)}'")
    if run.result is None or any(said.values()):
        with naming(run.path):
            run.confirm_code(**said)
    if run.result is None and (run.path / "checkpoint").exists():
        note = note_on_changes(run.path, changes_since(run.versions, *run.configuration.packages()))
        if note:
            warn(note)
    execute(run)
    ended = run.result
    if ended is not None and ended["status"] == "diverged":
        raise Diverged(ended.get("reason", f"{run.path} diverged"))
    return load(run.path)
