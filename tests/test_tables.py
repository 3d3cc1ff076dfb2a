"""Tables of several sites become rows as if they had been one table, from sums alone, and what is wrong in one is named."""

import dataclasses
import json
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from killing import kill_after_rows
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from test_recorded import imported

import fedbilevel as fb
from fedbilevel.core.devices import memory_ceiling
from fedbilevel.core.participation import Everyone
from fedbilevel.engines import wire
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.deployed import DeployedEngine
from fedbilevel.engines.failure import Failure
from fedbilevel.engines.loopback import Loopback
from fedbilevel.engines.table_exchange import RemoteTables, answered
from fedbilevel.errors import Withheld
from fedbilevel.federation.site_data import SiteData
from fedbilevel.federation.table_questions import parted
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.data.preprocessing import fitted
from fedbilevel.tasks.data.table_files import opened
from fedbilevel.tasks.data.table_sums import Deviations, Names, Totals, length
from fedbilevel.tasks.data.tables import Here, site_table

EXAMPLE = Path(__file__).parent.parent / "examples" / "clinic_tables.py"
COLUMNS = fb.Columns(label="label", features=["time", "size", "colour"], categories=["colour"], split="role")
CSV = "time,size,colour,label,role\n1,2,red,0,train\n2,,blue,1,validation\n4,3,red,1,train\n"


def made(rng, rows, missing=0.2, offset=1.7e9):
    """A table with a column of large numbers, one with gaps and one of categories, in which rows alternate between roles."""

    def gaps(cells):
        return [None if rng.random() < missing else cell for cell in cells]

    return {
        "time": (offset + rng.random(rows)).tolist(),
        "size": gaps(rng.normal(3, 20, rows).tolist()),
        "colour": gaps(rng.choice(["red", "blue", "green"], rows).tolist()),
        "label": rng.normal(size=rows).tolist(),
        "role": ["train", "validation"] * (rows // 2) + ["train"] * (rows % 2),
    }


def in_order(tables):
    """The features of all rows in the order of the tables, whose rows alternate between the roles."""
    parts = []
    for lower, upper in zip(tables.lower, tables.upper, strict=True):
        whole = np.empty((len(lower["label"]) + len(upper["label"]), tables.width))
        whole[0::2], whole[1::2] = lower["features"], upper["features"]
        parts.append(whole)
    return np.concatenate(parts)


def pooled(tables):
    """What scikit-learn makes of all tables in one."""
    columns = {name: [cell for table in tables for cell in table[name]] for name in tables[0]}
    numbers = np.array([columns["time"], columns["size"]], float).T
    colours = np.array(columns["colour"], object)[:, None]
    scaled = make_pipeline(SimpleImputer(), StandardScaler()).fit_transform(numbers)
    encoder = make_pipeline(
        SimpleImputer(missing_values=None, strategy="most_frequent"), OneHotEncoder(sparse_output=False, dtype=float)
    )
    return np.concatenate([scaled, encoder.fit_transform(colours)], 1)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32), st.lists(st.integers(2, 30), min_size=1, max_size=5), st.sampled_from([0.0, -1e6, 1.7e9]))
def test_the_fit_is_that_of_all_rows_in_one_table(seed, sizes, offset):
    rng = np.random.default_rng(seed)
    tables = [made(rng, rows, offset=offset) for rows in sizes]
    for table in tables:  # every site has some, but no site need have all
        table["size"][0], table["colour"][0] = 1.0, "red"
    rounding = 1e-9 + 20 * np.spacing(abs(offset))  # of the numbers themselves, whose deviation is below 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns that are the same everywhere
        np.testing.assert_allclose(in_order(fb.tables(tables, COLUMNS)), pooled(tables), atol=rounding)


def test_digits_are_not_lost_beside_a_large_offset():
    rng = np.random.default_rng(0)
    tables = [made(rng, rows) for rows in (50, 7)]
    times = np.concatenate([np.array(table["time"]) - 1.7e9 for table in tables])
    fit = fb.tables(tables, COLUMNS).preprocessing
    np.testing.assert_allclose(fit.means[0] - 1.7e9, times.mean(), atol=5e-7)
    np.testing.assert_allclose(fit.deviations[0], times.std(), rtol=1e-9)


def test_only_names_and_two_vectors_leave_a_site_whatever_its_rows():
    rng, answers = np.random.default_rng(0), []
    sites = [site_table(opened(made(rng, rows)), COLUMNS, m) for m, rows in enumerate((40, 4))]

    class Watched(Here):
        def union(self, question):
            answers.append(question)
            return super().union(question)

        def total(self, question):
            each = [site.answer(question) for site in sites]
            assert {answer.shape for answer in each} == {(length(COLUMNS, question),)}
            answers.append(question)
            return np.sum(each, 0)

    fit = fitted(COLUMNS, Watched(sites))
    assert [type(question) for question in answers] == [Names, Totals, Deviations]
    assert length(COLUMNS, answers[1]) == 2 * (2 + 3) + 3 and length(COLUMNS, answers[2]) == 6
    np.testing.assert_array_equal(sites[1].answer(answers[1])[:4], [0, 4, 0, 2])  # no place of the other site
    assert (fit.training, fit.validating) == ([20, 2], [20, 2])


def test_declared_categories_are_not_asked_for():
    class Silent(Here):
        def union(self, question):
            raise AssertionError("asked for names")

    columns = fb.Columns(label="label", features=["colour"], categories={"colour": ["red", "green", "blue", "black"]})
    site = site_table(opened(made(np.random.default_rng(0), 30)), columns, 0)
    assert fitted(columns, Silent([site])).names == ["colour=red", "colour=green", "colour=blue", "colour=black"]


@pytest.mark.parametrize(
    "question", [None, ("rows",), Totals({"colour": ["red"], "label": []}, 3), Totals({}, 1), Deviations(np.ones(9))]
)
def test_a_site_refuses_any_other_question(question):
    site = site_table(opened(made(np.random.default_rng(0), 6, missing=0)), COLUMNS, 1)
    with pytest.raises(fb.InputError, match=r"refused|not one of its categories"):
        site.answer(question)


def test_csv_parquet_and_dictionaries_give_the_same_rows(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = made(np.random.default_rng(1), 30)
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    lines = [",".join("" if cell is None else str(cell) for cell in cells) for cells in zip(*table.values(), strict=True)]
    (tmp_path / "a.csv").write_bytes("\n".join([",".join(table), *lines]).encode("utf-8-sig"))  # as spreadsheets do
    first, *others = (fb.tables([source], COLUMNS) for source in (table, tmp_path / "a.csv", tmp_path / "a.parquet"))
    for other in others:
        assert other.preprocessing == first.preprocessing
        for level in ("lower", "upper"):
            for name, of in getattr(first, level)[0].items():
                np.testing.assert_array_equal(of, getattr(other, level)[0][name])


def test_labels_can_be_classes_and_weights_are_one_on_average():
    tables = [
        {"a": [1, 2, 3], "ill": ["no", "yes", "no"], "w": [1, 2, 3]},
        {"a": [1, 1], "ill": ["maybe", "no"], "w": [6, 8]},
    ]
    found = fb.tables(tables, fb.Columns(label="ill", categories=["ill"], weight="w"))
    assert found.preprocessing.classes == ["maybe", "no", "yes"] and found.preprocessing.names == ["a"]
    rows = [*found.lower, *found.upper]
    assert sorted(np.concatenate([of["label"] for of in rows])) == [0, 1, 1, 1, 2]
    assert sorted(np.concatenate([of["weight"] for of in rows])) == [0.25, 0.5, 0.75, 1.5, 2]


def test_without_a_column_for_it_a_seeded_fraction_validates():
    tables = [made(np.random.default_rng(2), rows) for rows in (30, 3, 2)]
    plain = fb.Columns(label="label", features=["time"], validation=0.2)
    found, again = fb.tables(tables, plain), fb.tables(tables, plain)
    assert [len(of["label"]) for of in found.upper] == [6, 1, 1] and found.sizes == [24, 2, 1] and found.places == 27
    np.testing.assert_array_equal(found.upper[0]["label"], again.upper[0]["label"])
    other = fb.tables(tables, fb.Columns(label="label", features=["time"], validation=0.2, seed=1))
    assert not np.array_equal(found.upper[0]["label"], other.upper[0]["label"])
    np.testing.assert_array_equal(np.concatenate([of["place"] for of in found.lower]), np.arange(27))


WRONG = {
    "an empty file": ("", r"0.csv is empty: give a table with a header and rows"),
    "no rows": ("time,size,colour,label,role\n", r"0.csv has a header but no rows: .*"),
    "no such column": (CSV.replace("size", "sise", 1), r"0.csv:1: there is no column 'size'; did you mean sise or time\?"),
    "a column twice": (CSV.replace("size", "time", 1), r"0.csv:1: the header has 2 columns 'time': .*"),
    "semicolons": (CSV.replace(",", ";"), r"0.csv:1: the columns are separated by semicolons: .*"),
    "tabs": (CSV.replace(",", "\t"), r"0.csv:1: the columns are separated by tabs: .*"),
    "text": (CSV.replace("4,3", "4,three"), r"0.csv:4: column 'size': 'three' is not a number: correct it, or .*"),
    "a decimal comma": (CSV.replace("4,3", '4,"3,5"'), r"0.csv:4: .*'3,5' is not a number: write decimals with a point"),
    "an underscore": (CSV.replace("4,3", "4,1_000"), r"0.csv:4: column 'size': '1_000' is not a number: .*"),
    "infinity": (CSV.replace("4,3", "4,-inf"), r"0.csv:4: column 'size': '-inf' is not a number between .*"),
    "a huge number": (CSV.replace("4,3", "4,1e999"), r"0.csv:4: column 'size': '1e999' is not a number between .*"),
    "too few cells": (CSV.replace("4,3,", "4,"), r"0.csv:4: 4 cells, but the header has 5 columns"),
    "no label": (CSV.replace("red,1,", "red,,"), r"0.csv:4: column 'label' has no value: .*"),
    "the word nan as label": (CSV.replace("red,1,", "red,NaN,"), r"0.csv:4: column 'label' has no value: .*"),
    "another role": (
        CSV.replace("red,1,train", "red,1,test"),
        r"0.csv:4: column 'role' must be 'train' or 'validation', no or yes",
    ),
    "nothing to validate": (
        CSV.replace("validation", "train"),
        r"0.csv has no rows for 'validation', 'yes' in column 'role': .*",
    ),
    "one label": (CSV.replace(",0,", ",1,"), r"the label 'label' is the same in every row of every site, .*"),
    "nothing there": (
        CSV.replace("1,2,", "1,,").replace("4,3", "4,NA"),
        r"column 'size' is missing in every row of every site: .*",
    ),
    "no category there": (
        CSV.replace("red", "").replace("blue", ""),
        r"column 'colour' is missing in every row of every site: .*",
    ),
    "a huge cell": (CSV.replace("blue", "b" * 200_000), r"0.csv:3: it is not a CSV file \(field larger than field limit .*\)"),
    "an open quote": (CSV.replace("blue", '"blue'), r"0.csv:4: it is not a CSV file \(unexpected end of data\)"),
    "latin-1": (CSV.replace("blue", "grün").encode("latin-1"), r"0.csv:3: it is not text in UTF-8: save it as CSV in UTF-8"),
    "utf-16": (CSV.encode("utf-16"), r"0.csv:1: it is not text in UTF-8: save it as CSV in UTF-8"),
    "a binary file": (b"\x00\x01" * 50, r"0.csv:1: it is not text in UTF-8: save it as CSV in UTF-8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_file_is_one_line_with_its_place(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, line = WRONG[case]
    Path("0.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(fb.InputError) as caught:
        fb.tables(["0.csv"], COLUMNS)
    assert re.fullmatch(line, str(caught.value))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=40), st.integers(0, len(CSV)), st.integers(0, len(CSV)))
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path_factory, inside, start, end):
    file = tmp_path_factory.mktemp("damaged") / "0.csv"
    file.write_bytes(CSV.encode()[:start] + inside + CSV.encode()[end:])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fb.tables([file], COLUMNS)
    except fb.InputError as error:
        assert "\n" not in str(error) and re.search("0.csv|column|label", str(error))


def test_other_wrong_sources_are_named(tmp_path):
    good = made(np.random.default_rng(0), 10)
    found = {
        "missing.csv": r"there is no file .*missing.csv",
        "a.xlsx": r".*a.xlsx must be a table whose name ends in .csv or .parquet: save it as one",
        tmp_path.with_suffix(".csv"): r".*cannot be read: it is not a file",
    }
    tmp_path.with_suffix(".csv").mkdir()
    (tmp_path / "a.parquet").write_bytes(b"no")
    found[tmp_path / "a.parquet"] = r".*a.parquet is not a Parquet file \(.*\)"
    for source, line in found.items():
        with pytest.raises(fb.InputError) as caught:
            fb.tables([good, source], COLUMNS)
        assert re.fullmatch(line, str(caught.value))
    with pytest.raises(fb.InputError, match="table 1: its columns must have equally many rows; given: 'time' 9, 'size' 10"):
        fb.tables([good, {**good, "time": good["time"][1:]}], COLUMNS)
    with pytest.raises(fb.InputError, match="table 1, row 3: column 'size': 'many' is not a number"):
        fb.tables([good, {**good, "size": [1, 2, "many", *range(7)]}], COLUMNS)
    with pytest.raises(fb.InputError, match="table 1: the column 'age' is not in table 0: leave it out, or name the features"):
        fb.tables([good, {**good, "age": [1] * 10}], fb.Columns(label="label", categories=["colour", "role"]))
    with pytest.raises(fb.InputError, match="table 0, row 1: column 'size': a weight must not be below 0"):
        fb.tables([{**good, "size": [-1] * 10}], fb.Columns(label="label", features=["time"], weight="size"))
    names = {**good, "colour": [f"Ms {k}" for k in range(10)]} | {"role": good["role"]}
    many = [{**names, "colour": [f"Ms {10 * m + k}" for k in range(10)]} for m in range(11)]
    with pytest.raises(fb.InputError, match="'colour' of all sites together has 110 categories, more than the 100"):
        fb.tables(many, COLUMNS)


def test_a_constant_feature_is_warned_about_and_becomes_zero():
    table = made(np.random.default_rng(0), 10) | {"time": [0.1 + 1.7e9] * 10}
    with pytest.warns(UserWarning, match="column 'time' has the same value in every row of every site, and says nothing"):
        found = fb.tables([table], COLUMNS)
    assert not found.lower[0]["features"][:, 0].any()


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (dict(label=""), "label must be the name of a column"),
        (dict(label="a", features=[]), "features must be the names of one column at least"),
        (dict(label="a", features="b"), "features must be a list of names"),
        (dict(label="a", features=["a"]), "the column 'a' has two roles"),
        (dict(label="a", features=["b"], categories=["c"]), "categories names 'c', which is no feature and not the label"),
        (dict(label="a", categories={"b": ["x", "x"]}), "the categories of 'b' must be a list of names, each once"),
        (dict(label="a", validation=1.0), "validation must be a number above 0 and below 1; given: 1.0"),
    ],
)
def test_columns_that_cannot_be_are_refused(wrong, line):
    with pytest.raises(fb.InputError, match=line):
        fb.Columns(**wrong)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The names in the example, and the folder of its tables."""
    names = {"__name__": "example"}
    exec(compile(EXAMPLE.read_text(), EXAMPLE, "exec"), names)
    folder = tmp_path_factory.mktemp("example") / "clinics"
    names["make_tables"](folder)
    return names, folder


def test_a_tabular_task_of_four_unequal_sites_takes_at_most_thirty_lines(example):
    own = EXAMPLE.read_text().split("def make_tables")[0].split('"""', 2)[2]
    assert len([line for line in own.splitlines() if line.strip()]) <= 30
    assert len({len((example[1] / f"{m}.csv").read_text().splitlines()) for m in range(4)}) == 4


def test_the_command_keeps_the_preprocessing_and_is_not_continued_on_other_tables(run, example, tmp_path):
    code, out, err = run("show", EXAMPLE)
    assert (code, err) == (
        0,
        "",
    ) and "by --data: label: diagnosis; weight: weight; split: role; features: radius, perimeter" in out
    assert run("run", EXAMPLE, "fedavg", "--rounds", 5)[2].endswith(
        "a task on tables needs them: give the folder with one for each client with --data\n"
    )
    folder = shutil.copytree(example[1], tmp_path / "clinics")
    assert run("run", EXAMPLE, "fedavg", "--rounds", 5, "--data", folder, "--out", "here")[0] == 0
    task, stored = example[0]["cleaning"]().build(str(folder)), fb.load("here/fedavg")
    stored.save("a.npz")
    x, y, history = loaded = fb.load("a.npz")  # which is still three things
    assert loaded.preprocessing == stored.preprocessing == task.preprocessing
    assert history == stored.history and x.shape == task.x.shape
    features = loaded.preprocessing.apply(folder / "2.csv")
    assert features.shape == (131, len(y) - 1)
    np.testing.assert_array_equal(np.sort(features, 0), np.sort(_rows(task, 2), 0))

    (tmp_path / "here/fedavg/result.json").unlink()
    (folder / "0.csv").write_text("\n".join((example[1] / "0.csv").read_text().splitlines()[:-1]))
    forget_the_task()
    code, _, err = run("resume", "here")
    assert code == 2 and "fedavg: the tables have changed since the run began: restore them, or start a new run" in err
    shutil.copy(example[1] / "0.csv", folder)
    forget_the_task()
    assert run("resume", "here")[0] == 0


def forget_the_task():
    """Have the next command build its task, as another process would: only the newest is kept."""
    Configuration.resolve("quadratic", {}, "fedavg", {}, RunOptions(rounds=5)).built_task()


def _rows(task, m):
    population = task.population
    return np.concatenate([getattr(population.only(m), level).rows["features"] for level in ("lower", "upper")])


def test_new_rows_with_an_unknown_category_are_refused(example):
    preprocessing = example[0]["cleaning"]().build(str(example[1])).preprocessing
    new = {name: [None] for name in preprocessing.columns.features}
    filled = preprocessing.apply(new)[0]
    assert filled.sum() == 2 and set(filled) == {0, 1}  # means, and the two most frequent categories
    with pytest.raises(fb.InputError, match="the table, row 1: column 'texture': 'odd' is not one of its categories"):
        preprocessing.apply(new | {"texture": ["odd"]})


@pytest.mark.slow
def test_a_tabular_task_survives_kill_9_and_is_swept_and_reported(run, example, tmp_path):
    command = [sys.executable, "-m", "fedbilevel", "run", EXAMPLE, "simfbo", "--rounds", "8000", "--every", "400"]
    command += ["--data", example[1], "--out", tmp_path / "here"]
    kill_after_rows(command, tmp_path / "here/simfbo/metrics.jsonl", env={**os.environ, "JAX_ENABLE_X64": "1"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run("resume", "here")[0] == 0
        task = example[0]["cleaning"]().build(str(example[1]))
        whole = fb.solve(task, algorithm="simfbo", rounds=8000, every=400)
    resumed = fb.load("here/simfbo")
    for name in ("step", "upper_loss", "lower_loss", "accuracy"):
        assert [row[name] for row in resumed.history] == [row[name] for row in whole.history]
    assert resumed.preprocessing == whole.preprocessing
    grid = ["--grid", "lam=0.003,0.03", "--seeds", 1, "--rounds", 10, "--data", example[1]]
    assert run("sweep", EXAMPLE, "simfbo", *grid, "--out", "swept")[0] == 0
    assert run("report", "here", "swept")[0] == 0
    (page,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', Path("report.html").read_text(), re.S)
    sizes = [[rows] for rows in task.preprocessing.training]
    assert json.loads(page)["holdings"][0]["counts"]["lower"] == sizes and sum(map(sum, sizes)) == task.x.size


class Wire:
    """Sites behind a transport, of which one may misbehave."""

    def __init__(self, sites, wrong=None):
        self.sites, self.wrong, self.sent = sites, wrong, []

    def ask(self, requests):
        replies, failures = {}, {}
        for m, request in requests.items():
            try:
                replies[m] = answered(self.sites[m], len(self.sites), request)
            except fb.InputError as error:
                failures[m] = Failure.of(error)
        if self.wrong is not None:
            replies[1] = wire.encode(self.wrong)
        self.sent += replies.values()
        return replies, failures


def remote(tables, columns=COLUMNS):
    return [site_table(opened(table), columns, m) for m, table in enumerate(tables)]


def test_across_a_transport_the_fit_and_the_run_have_the_bits_of_the_simulation(example):
    names, folder = example
    task = names["cleaning"]()
    columns, files = names["COLUMNS"], [folder / "0.csv", folder / "1.csv"]
    sites = remote(files, columns)
    fit = fitted(columns, RemoteTables(Wire(sites), columns, 2))
    whole = task.build(fb.tables(files, columns))
    assert fit == whole.preprocessing == fb.Preprocessing.decoded(fit.encoded())

    server, algorithm = task.build(fb.Tables.of(fit, {})), fb.FedAvg()
    shapes = call_shapes(algorithm, server.population, server.x, server.y)
    runtimes = {}
    for m, site in enumerate(sites):
        at_site = task.build(fb.Tables.of(fit, {m: site}))
        assert at_site.x.shape == server.x.shape and not np.any(_rows(at_site, 1 - m))
        runtimes[m] = ClientRuntime(algorithm, at_site.population.only(m), m, call_shapes=shapes)
    engine = DeployedEngine(Loopback(runtimes), server.population, Everyone(), shapes)
    simulated = simulation(whole, algorithm, rounds=2, every=1)
    deployed = dataclasses.replace(simulated, task=server, engine=engine)
    both = ([moment for moment in run.run() if moment.metrics] for run in (simulated, deployed))
    for ours, theirs in zip(*both, strict=True):
        assert theirs.totals == ours.totals
        for name, value in ours.metrics.items():  # the deployed run also counts absences
            np.testing.assert_allclose(theirs.metrics[name], value, rtol=1e-6)


def test_a_site_takes_only_a_fit_for_its_own_columns_and_rows(example, tmp_path):
    names, folder = example
    settings, own = names["cleaning"](), SiteData(tmp_path / "site.toml", "cleaning", "table", path=str(folder / "1.csv"))
    fit = settings.build(str(folder)).preprocessing
    task, population = own.load(settings, 1, fit=fit.encoded().decode())
    assert task.x.size == sum(fit.training) and int(population.lower.size[0]) == fit.training[1]
    other = dataclasses.replace(fit.columns, weight="")
    for number, wrong, line in (
        (1, dataclasses.replace(fit, columns=other, means=fit.means[:-1], deviations=fit.deviations[:-1]), "other columns"),
        (4, fit, "for other columns or sites"),
        (2, fit, "has other rows than when the run began"),
        (1, dataclasses.replace(fit, validating=[10**9] * 4), "or too many"),
    ):
        with pytest.raises(fb.InputError, match=line):
            own.load(settings, number, fit=wrong.encoded().decode())
    with pytest.raises(fb.InputError, match=r"path must name a \.csv or \.parquet file"):
        dataclasses.replace(own, path="").table(settings, 0)
    with pytest.raises(fb.InputError, match='loader = "share" has no table with named features'):
        dataclasses.replace(own, loader="share").table(settings, 0)
    assert parted(b"\x02" + bytes(7) + b"abcd") == (b"ab", b"cd")
    with pytest.raises(fb.InputError, match="cut off"):
        parted(b"\x09" + bytes(7) + b"abcd")


def test_no_cell_crosses_in_an_error_or_an_answer_about_numbers():
    table = made(np.random.default_rng(0), 10, missing=0) | {"colour": ["secret", *["red"] * 9]}
    sites = remote([table])
    question = wire.encode(Totals({"colour": ["red"]}, 1))
    with pytest.raises(Withheld, match=r"^this site cannot answer about its table; its log says why$") as raised:
        answered(sites[0], 1, question)
    assert "'secret' is not one of its categories" in raised.value.reason
    transport = Wire(sites)
    fitted(COLUMNS, RemoteTables(transport, COLUMNS, 1))
    names, totals, deviations = (wire.decode(answer) for answer in transport.sent)
    assert names == [["red", "secret"]] and totals.shape == (10,) and deviations.shape == (6,)


def test_what_a_server_asks_for_is_bounded(example, tmp_path):
    names, folder = example
    settings, own = names["cleaning"](), SiteData(tmp_path / "site.toml", "cleaning", "table", path=str(folder / "1.csv"))
    fit = settings.build(str(folder)).preprocessing
    many, other = [*map(str, range(101)), *fit.categories["symmetry"]], ["low", "medium", "high", "none"]
    for change, line in (
        (dict(categories={**fit.categories, "symmetry": many}), "has 104 categories, more than"),
        (dict(categories={**fit.categories, "texture": other}), "its parts do not fit together"),
        (dict(validating=[n * 10**5 for n in fit.validating]), "rows: about .* GB of memory are needed"),
    ):
        wrong = dataclasses.replace(fit, **change).encoded().decode()
        with memory_ceiling(1e8), pytest.raises(fb.InputError, match=line):
            own.load(settings, 1, fit=wrong)


@pytest.mark.parametrize(
    "wrong", [("odd",), [], [["a"], ["b"]], [["\x1b[31m"]], [[1]], [[f"{k}" for k in range(101)]], [["a" * 101]], np.ones(3)]
)
def test_a_site_that_sends_something_else_than_categories_is_named(wrong):
    sites = remote([made(np.random.default_rng(m), 9) for m in range(2)])
    with pytest.raises(fb.InputError, match="client 1"):
        RemoteTables(Wire(sites, wrong), COLUMNS, 2).union(Names())


@pytest.mark.parametrize("wrong", ["sums", np.ones(3), np.full(6, np.nan), np.ones(6, np.float32), np.ones((6, 1))])
def test_sums_of_another_form_are_refused(wrong):
    sites = remote([made(np.random.default_rng(m), 9) for m in range(2)])
    with pytest.raises(fb.InputError, match="client 1 answers with"):
        RemoteTables(Wire(sites, wrong), COLUMNS, 2).total(Deviations(np.zeros(3)))


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("by", [-20, -0.5, 0.5, 1e9])
def test_counts_that_no_table_has_are_refused(place, by):
    """By place: rows and training rows of both sites, numbers that are there, their sums, counts of both categories."""
    sites = remote([made(np.random.default_rng(m), 12, missing=0) | {"colour": ["red", "blue"] * 6} for m in range(2)])
    question = Totals({"colour": ["blue", "red"]}, 2)
    honest = sites[1].answer(question)
    assert honest[:4].tolist() == [0, 12, 0, 6] and honest[10:].tolist() == [6, 6]
    wrong = honest + by * np.eye(12)[place]
    table = RemoteTables(Wire(sites, wrong), COLUMNS, 2)
    if 7 <= place < 10:
        np.testing.assert_array_equal(table.total(question), sites[0].answer(question) + wrong)
    else:
        with pytest.raises(fb.InputError, match="client 1 answers with numbers of rows that no table has"):
            table.total(question)


TASK = """
import jax.numpy as jnp
import fedbilevel as fb

@fb.task(headline="error", columns=fb.Columns("label", ["size"], split="role"))
def mine(data: fb.Tables) -> fb.Task:
    def f(x, y, rows):
        return jnp.mean((rows["features"] @ y - rows["label"]) ** 2)

    def g(x, y, rows):
        return f(x, y, rows) + jnp.exp(x) * (y @ y)

    start = jnp.zeros(()), jnp.zeros(1)
    return fb.Task.of(f, g, *start, lower=data.lower, upper=data.upper, row_metrics={"error": f})
"""


def test_a_task_on_tables_in_memory_is_not_recorded_as_one_that_a_folder_describes(run, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    rng = np.random.default_rng(0)
    with imported(tmp_path / "mine.py") as module:
        task = module.mine().build(fb.tables([made(rng, 9), made(rng, 6)], module.mine.columns))
        solution = fb.solve(task, algorithm="simfbo", rounds=4, out="here")
        (tmp_path / "here/result.json").unlink()  # as if it had been stopped
        assert run("resume", "here")[2].count("its task was made in Python, and no file describes it") == 1
        assert RunFolder(tmp_path / "here").headline == "error"
        swept = fb.sweep(task, "simfbo", {"eta_x": [fb.SimFBO().eta_x]}, rounds=4, seeds=1)
        assert swept.cells[0].mean("error") == pytest.approx(solution.history[-1]["error"], rel=1e-6)
