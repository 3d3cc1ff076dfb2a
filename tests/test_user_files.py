"""Every file a user can touch: however it is damaged, it is read, or refused in one line that names it."""

import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_files import damaged, make

from fedbilevel.command.options import Settings
from fedbilevel.errors import InputError
from fedbilevel.federation.job import read_status
from fedbilevel.federation.provision import Federation
from fedbilevel.federation.site_data import SiteData
from fedbilevel.library.solution import load
from fedbilevel.report import reproduction_page
from fedbilevel.report.page import encoded
from fedbilevel.report.page_data import contents
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.reproductions import plan, results
from fedbilevel.runs.reproductions.study import Study
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.tasks.data.preprocessing import Preprocessing
from fedbilevel.user_files import read_arrays


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    return folder


def report(folder):
    encoded(contents([RunFolder(folder / "run")], [SweepFolder(folder / "sweep")]))


def tables(folder):
    study = Study(plan.read("mine", folder / "plans"), folder / "study", plans=folder / "plans")
    study.line(*study.reproduction.lines()[0])
    results.collect(study)
    reproduction_page.results_page(folder / "plans")


def restored(folder):
    run = RunFolder(folder / "run")
    run.checkpoint(run.experiment())


USES = {
    "run/config.json": report,
    "run/metrics.jsonl": report,
    "run/result.json": report,
    "run/x.npy": report,
    "run/solution.npz": lambda folder: load(folder / "run"),
    "run/checkpoint": restored,
    "sweep/sweep.json": report,
    "sweep/ranking.json": report,
    "sweep/results.jsonl": report,
    "plans/mine.toml": lambda folder: plan.read("mine", folder / "plans"),
    "plans/mine.tuned.toml": tables,
    "study/lines/all/SimFBO/work.json": tables,
    "study/lines/all/SimFBO/results.jsonl": tables,
    "plans/results/mine.json": tables,
    "plans/results/mine.csv": tables,
    "settings.toml": lambda folder: Settings.read(folder / "settings.toml", "quadratic").of("simfbo"),
    "federation.toml": Federation.read,
    "site.toml": lambda folder: SiteData.read(folder / "site.toml"),
    "preprocessing.json": lambda folder: Preprocessing.load(folder / "preprocessing.json").filler(2),
    "rows.npz": lambda folder: read_arrays(folder / "rows.npz"),
    "starting.json": RunFolder.complete,
    "job.json": read_status,
}


@st.composite
def damage(draw, name, content):
    return damaged(lambda options: draw(st.sampled_from(options)), name, content)


@pytest.mark.parametrize("name", USES)
def test_a_damaged_file_is_read_or_refused_in_one_line_that_names_it(made, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(made, folder, dirs_exist_ok=True)
    whole = (folder / name).read_bytes()
    USES[name](folder)

    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(damage(name, whole))
    def is_read_or_refused(content):
        (folder / name).write_bytes(content)
        try:
            USES[name](folder)
        except InputError as error:
            assert os.path.basename(name) in str(error) and "\n" not in str(error)

    is_read_or_refused()


@pytest.mark.parametrize("name", USES)
def test_a_folder_in_place_of_a_file_is_refused_in_one_line(made, name, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    if name in ("run/x.npy", "job.json"):  # what they would tell is left out
        USES[name](tmp_path)
        return
    with pytest.raises(InputError, match=os.path.basename(name)) as caught:
        USES[name](tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("replace", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["run/config.json", "run/x.npy", "settings.toml"])
def test_what_would_be_read_for_ever_is_refused(made, name, replace, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    replace(tmp_path / name)
    with pytest.raises(InputError, match=f"{os.path.basename(name)} cannot be read: it is not a file"):
        RunFolder(tmp_path / "run").x() if name.endswith(".npy") else USES[name](tmp_path)
