"""A wheel, built from the sources and installed into an empty environment, works, and so do the projects that `new` writes."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True, text=True)
    return folder


@pytest.fixture(scope="module")
def programs(built, tmp_path_factory):
    """The programs of an environment that holds the wheel and what it needs, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    done(folder / "bin/python", "-m", "pip", "install", "--quiet", next(built.glob("*.whl")), where=folder)
    return folder / "bin"


def done(*command, where):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_environment(built, programs, tmp_path):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fedbilevel/py.typed", "fedbilevel/report/page.js", "fedbilevel/command/templates/task.py.txt"} <= set(names)
    assert not any(name.startswith(("tests", "docs", "examples")) for name in names)
    assert len(list(built.glob("*.tar.gz"))) == 1
    command = programs / "fedbilevel"
    done(command, "run", "data-cleaning", "simfbo", "--rounds", "10", "--out", "here", where=tmp_path)
    done(command, "report", "here", where=tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    assert json.loads((tmp_path / "here" / "simfbo" / "result.json").read_text())["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["task", "algorithm"])
def test_a_new_project_passes_its_own_tests_in_an_empty_environment(kind, programs, tmp_path):
    done(programs / "fedbilevel", "new", kind, f"my-{kind}", where=tmp_path)
    done(programs / "python", "-m", "pip", "install", "--quiet", f"./my-{kind}[dev]", where=tmp_path)
    assert "2 passed" in done(programs / "pytest", "-q", where=tmp_path / f"my-{kind}")
    assert f"my-{kind}" in done(programs / "fedbilevel", "list", where=tmp_path)
