"""A wheel, built from the sources and installed into an empty environment, works."""

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_environment(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT], check=True, capture_output=True, text=True
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fedbilevel/py.typed", "fedbilevel/report/page.js", "fedbilevel/command/templates/task.py.txt"} <= set(names)
    assert not any(name.startswith(("tests", "docs", "examples")) for name in names)
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 1

    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True, capture_output=True, text=True)
    command = [tmp_path / "empty" / "bin" / "fedbilevel"]
    arguments = ["run", "data-cleaning", "simfbo", "--rounds", "10", "--out", "here"]
    subprocess.run([*command, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
    subprocess.run([*command, "report", "here"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    assert json.loads((tmp_path / "here" / "simfbo" / "result.json").read_text())["status"] == "finished"
