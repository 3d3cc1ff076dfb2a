"""Starts that a kill interrupts before any of their writes: all of what was to begin, or nothing."""

import itertools
import os
import sys

import pytest

from fedbilevel.errors import InputError
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep

WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Killed(BaseException):
    """As SIGKILL, after which nothing is written any more."""


class Death:
    """Comes before the n-th change of files below a folder, and stays."""

    def __init__(self):
        self.folder, self.left = None, 0
        sys.addaudithook(self)  # for good: Python cannot remove one

    def __call__(self, event, arguments):
        if self.folder is None or not (event in WRITES or (event == "open" and (arguments[2] or 0) & WRITING)):
            return
        if str(arguments[0]).startswith(str(self.folder)):
            self.left -= 1
            if self.left < 0:
                raise Killed

    def comes(self, folder, left, work):
        """Whether it comes before the work is done."""
        self.folder, self.left = folder, left
        try:
            work()
        except Killed:
            return True
        finally:
            self.folder = None
        return False


DEATH = Death()


def configurations(seed):
    options = RunOptions(rounds=5, seed=seed)
    return {name: Configuration.resolve("quadratic", {"clients": 3}, name, {}, options) for name in ("simfbo", "fedbio")}


def begin(folder, runs, force=False):
    RunFolder.create({folder / name: configuration for name, configuration in runs.items()}, force)


def resumed(folder):
    RunFolder.complete(folder)
    try:
        return {run.path.name: run.configuration for run in RunFolder.find(folder)}
    except InputError:
        return {}


@pytest.mark.parametrize("replaces", [False, True])
def test_runs_begin_all_or_none_whenever_a_kill_comes(tmp_path, replaces):
    old, new = configurations(1) if replaces else {}, configurations(2)
    seen = []
    for left in itertools.count():
        folder = tmp_path / str(left)
        if replaces:
            begin(folder, old)
        died = DEATH.comes(folder, left, lambda folder=folder: begin(folder, new, force=True))
        for again in itertools.count():  # and once more while it is being completed
            if not DEATH.comes(folder, again, lambda folder=folder: RunFolder.complete(folder)):
                break
        assert resumed(folder) in (old, new) and (died or resumed(folder) == new)
        seen.append(resumed(folder) == new)
        if not died:
            break
    assert len(seen) > 8 and not seen[0] and sorted(seen) == seen


def test_what_a_killed_start_left_is_not_replaced_without_being_asked(tmp_path):
    folder, new = tmp_path / "out", configurations(2)
    for left in itertools.count():
        DEATH.comes(folder, left, lambda: begin(folder, new))
        if (folder / "starting.json").exists():
            break
    with pytest.raises(InputError, match="already holds a run: resume it"):
        begin(folder, configurations(3))
    assert resumed(folder) == new


def test_a_sweep_begins_whole_or_not_at_all(tmp_path):
    options = RunOptions(rounds=5)
    old, new = (Sweep("quadratic", {"clients": 3}, "simfbo", {}, {"gamma_x": [0.1, x]}, 1, options) for x in (0.2, 0.3))
    for left in itertools.count():
        path = tmp_path / str(left)
        SweepFolder.create(path, old)
        (path / "results.jsonl").write_text("")
        died = DEATH.comes(path, left, lambda path=path: SweepFolder.create(path, new, force=True, metric="upper_loss"))
        folder = SweepFolder(path)
        if (path / "sweep.json").exists() and folder.sweep == new:
            assert folder.metric == "upper_loss" and folder.results() == {}
        else:
            assert died
        if not died:
            break
    assert left > 4


def test_a_start_that_was_damaged_begins_no_run(tmp_path):
    folder = tmp_path / "out"
    for left in itertools.count():
        DEATH.comes(folder, left, lambda: begin(folder, configurations(2)))
        if (folder / "starting.json").exists():
            break
    plan = folder / "starting.json"
    plan.write_text(plan.read_text().replace('"noise": 0.0', '"noise": -1'))
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError, match=r"starting.json: quadratic: noise must be a number of at least 0; given: -1"):
        RunFolder.complete(folder)
    assert sorted(folder.rglob("*")) == before
