"""Every file a user can touch: however it is damaged, it is read, or refused in one line that names it."""

import dataclasses
import hashlib
import json
import os
import shutil
import tomllib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.command.options import Settings
from fedbilevel.engines import wire
from fedbilevel.errors import InputError
from fedbilevel.federation.job import read_status
from fedbilevel.federation.provision import Federation
from fedbilevel.federation.site_data import SiteData
from fedbilevel.report import reproduction_page
from fedbilevel.report.page import encoded
from fedbilevel.report.page_data import contents
from fedbilevel.runs.checkpoint import MAGIC
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.reproductions import plan, results
from fedbilevel.runs.reproductions.study import Study
from fedbilevel.runs.stopping import StopRequest
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep
from fedbilevel.user_files import read_arrays

KNOBS = {"clients": 2, "x_dimension": 2, "y_dimension": 2}
PLAN = """
title = "One method"
paper = "nobody's"
task = "quadratic"
metric = "x_error"
scale = "plain"
rounds = 4
every = 2
seeds = 2
claimed = [["SimFBO"]]
knobs = { clients = 2, x_dimension = 2, y_dimension = 2 }
columns = [{ at = 4 }, { reach = 0.5 }]
published = { all = { SimFBO = [0.5, 3] } }

[[panels]]
name = "all"
run = { clients_per_round = 2 }

[[methods]]
name = "SimFBO"
algorithm = "simfbo"
hyperparameters = { local_steps = 2 }
paper = { "eta_x+gamma_x" = 0.03 }
grid = { "eta_x+gamma_x" = [0.01, 0.03] }

[quick]
task = "quadratic"
rounds = 2
"""
SETTINGS = 'task = "quadratic"\nknobs = { clients = 2 }\nhyperparameters = { simfbo = { gamma_x = 0.1 } }\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with one of every file, each as the program writes it."""
    folder = tmp_path_factory.mktemp("made")
    options = RunOptions(rounds=4, every=2)
    (run,) = RunFolder.create({folder / "run": Configuration.resolve("quadratic", KNOBS, "simfbo", {}, options)})
    run.execute(StopRequest(), lambda moment: None)
    sweep = Sweep("quadratic", KNOBS, "simfbo", {"local_steps": 2}, {"gamma_x": [0.01, 0.02]}, 2, options)
    SweepFolder.create(folder / "sweep", sweep, metric="upper_loss").execute()
    (folder / "plans/results").mkdir(parents=True)
    (folder / "plans/mine.toml").write_text(PLAN)
    study = Study(plan.read("mine", folder / "plans"), folder / "study", plans=folder / "plans")
    study.tune()
    study.run()
    (folder / "plans/results/mine.csv").write_text(results.to_csv(results.collect(study)))
    (folder / "plans/results/mine.json").write_text(json.dumps(dataclasses.asdict(study.description())))
    (folder / "settings.toml").write_text(SETTINGS)
    Federation(folder, "localhost", 8002, ("a", "b")).write()
    (folder / "site.toml").write_text('task = "quadratic"\nloader = "share"\nclient = 1\nknobs = { clients = 2 }\n')
    np.savez(folder / "rows.npz", upper=np.zeros((2, 3)), lower=np.ones(2))
    planned = {name: json.loads((folder / "run/config.json").read_bytes()) for name in ("one", "other")}
    (folder / "starting.json").write_text(json.dumps(planned))
    (folder / "job.json").write_text(json.dumps({"begun": True, "left_out": ["a: refused"], "final": False}))
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
    "rows.npz": lambda folder: read_arrays(folder / "rows.npz"),
    "starting.json": RunFolder.complete,
    "job.json": read_status,
}
DEEP = "a value nested very deeply"
NESTED = "[" * 3000 + "]" * 3000
VALUES = [None, True, -1, 0, 3, 10**30, 1.5, -0.0, float("nan"), float("inf"), "", "text", "..", [], [1], {}, {"a": 1}, DEEP]


def places(tree, path=()):
    """The paths to all values of a tree but the tree itself."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in ((*path, key), *places(value, (*path, key)))]


@st.composite
def changed(draw, tree):
    """The tree with a value removed, replaced, or added."""
    tree = json.loads(json.dumps(tree))
    *path, last = draw(st.sampled_from(places(tree) or [("added",)]))
    inner = tree
    for key in path:
        inner = inner[key]
    how = draw(st.sampled_from(("remove", "replace", "replace", "add")))
    if isinstance(inner, list) and how == "add":
        inner.append(draw(st.sampled_from(VALUES)))
    elif how == "add":
        inner[draw(st.sampled_from(("unknown", "name", "versions", "é\n")))] = draw(st.sampled_from(VALUES))
    elif how == "remove":
        del inner[last]
    else:
        inner[last] = draw(st.sampled_from(VALUES))
    return tree


def json_text(tree):
    return json.dumps(tree).replace(json.dumps(DEEP), NESTED)


def toml_text(tree):
    def written(value):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {written(v)}" for k, v in value.items() if v is not None) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(written(v) for v in value if v is not None) + "]"
        return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")

    lines = [f"{json.dumps(name)} = {written(value)}\n" for name, value in tree.items() if value is not None]
    return "".join(lines).replace(json.dumps(DEEP), NESTED)


def payload_bytes(tree, leaves):
    content = wire.encode({"leaves": leaves, **tree})
    return MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


@st.composite
def damaged(draw, name, content):
    """The file's bytes cut, filled with others, or with a value in it changed."""
    how = draw(st.sampled_from(("cut", "overwritten", "other", "changed", "changed", "changed", "changed")))
    at = draw(st.integers(0, len(content)))
    if how == "cut":
        return content[:at]
    if how == "overwritten":
        return content[:at] + draw(st.binary(min_size=1, max_size=4)) + content[at + draw(st.integers(0, 4)) :]
    if how == "other" or name.endswith((".npy", ".npz", ".csv")):
        return draw(st.binary(max_size=40))
    if name.endswith(".toml"):
        return toml_text(draw(changed(tomllib.loads(content.decode())))).encode()
    if name.endswith(".json"):
        return json_text(draw(changed(json.loads(content)))).encode()
    if name.endswith(".jsonl"):
        lines = content.splitlines()
        k = draw(st.integers(0, len(lines) - 1))
        lines[k] = json_text(draw(changed(json.loads(lines[k])))).encode()
        return b"\n".join(lines) + b"\n"
    _, _, payload = content[len(MAGIC) :].partition(b"\n")
    tree = wire.decode(payload)
    return payload_bytes(draw(changed({k: v for k, v in tree.items() if k != "leaves"})), tree["leaves"])


@pytest.mark.parametrize("name", USES)
def test_a_damaged_file_is_read_or_refused_in_one_line_that_names_it(made, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(made, folder, dirs_exist_ok=True)
    whole = (folder / name).read_bytes()
    USES[name](folder)

    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(damaged(name, whole))
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
