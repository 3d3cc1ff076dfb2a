"""Run folders that version 0.1.0 left can be resumed: `folders-0.1.0` has runs that it stopped, and the same to their ends."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.stopping import StopRequest

FOLDERS = Path(__file__).parent / "folders-0.1.0"


@pytest.mark.parametrize(
    "name", ["fedbioacc-local", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fedbioacc", "adafbio"))]
)
def test_a_run_of_version_0_1_goes_on_to_its_own_end(name, tmp_path):
    shutil.copytree(FOLDERS / "stopped" / name, tmp_path / name)
    resumed, whole = RunFolder(tmp_path / name), RunFolder(FOLDERS / "whole" / name)
    before = len(resumed.rows())
    with jax.enable_x64(False):
        resumed.execute(StopRequest(), lambda moment: None)
    assert before < len(resumed.rows()) == len(whole.rows())
    for ours, theirs in zip(resumed.rows(), whole.rows(), strict=True):
        names = [name for name in theirs if name != "seconds"]
        np.testing.assert_allclose([ours[n] for n in names], [theirs[n] for n in names], rtol=1e-4)
    np.testing.assert_allclose(resumed.x(), whole.x(), rtol=1e-4)
