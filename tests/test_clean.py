"""`fedbilevel clean` and `fb.clean`: planted errors are found and named, in tables and in folders of images."""

import csv
import re
import warnings

import numpy as np
import pytest
from PIL import Image

import fedbilevel as fb
from fedbilevel.errors import InputError
from fedbilevel.report.cleaned import site_names
from fedbilevel.report.suspects import SiteRows
from fedbilevel.tasks.data.image_tables import opened_images
from fedbilevel.tasks.data.tables import tables, text_columns
from fedbilevel.tasks.label_errors import LabelErrors, Model, Verdict, judged

WRONG = {"north": {9, 20}, "south": {11, 25, 26}}  # lines of the files
CLASSES = ("ill", "well")


def make_tables(folder):
    """Two sites whose label is the sign of `level`, but for some lines; five lines of each were checked."""
    folder.mkdir()
    for m, (site, wrong) in enumerate(WRONG.items()):
        rng = np.random.default_rng(m)
        with (folder / f"{site}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["level", "smoker", "noise", "diagnosis", "seen twice"])
            for line in range(2, 34 + m):
                kind = line % 2
                level, smoker = (2 * kind - 1) * rng.uniform(1, 2), ["no", "yes"][rng.integers(2)]
                row = [
                    f"{level:.3f}",
                    smoker,
                    f"{rng.normal():.3f}",
                    CLASSES[kind ^ (line in wrong)],
                    "yes" if line < 7 else "no",
                ]
                table.writerow(row)
    return folder


def test_planted_errors_are_listed_for_each_site(run, tmp_path):
    make_tables(tmp_path / "clinics")
    columns = "--label", "diagnosis", "--checked", "seen twice"
    code, out, err = run("clean", "clinics", *columns, "--rounds", 60, "--out", "here")
    assert code == 0, err
    for site, wrong in WRONG.items():
        found = list(csv.DictReader((tmp_path / f"here/sites/{site}/suspects.csv").read_text().splitlines()))
        assert {int(row["row"]) for row in found} == wrong
        assert all(float(row["trust"]) < 0.5 and row["label"] != row["suggested label"] for row in found)
        assert [row["trust"] for row in found] == sorted(row["trust"] for row in found)
        page = (tmp_path / f"here/sites/{site}/page.html").read_text()
        assert f"{len(wrong)} of {27 + (site == 'south')} unchecked rows are suspected" in page
        assert re.search(rf"{site}: {len(wrong)} of \d+ unchecked rows are suspected: here/sites/{site}/suspects.csv", out)
    lists = [tmp_path / f"here/sites/{site}/suspects.csv" for site in WRONG]
    before = [file.read_bytes() for file in lists]
    for file in (tmp_path / "here/fedpace-own/result.json", *lists):
        file.unlink()
    code, out, err = run("resume", "here")  # as after an interruption
    assert code == 0 and [file.read_bytes() for file in lists] == before, err
    library = fb.clean(sorted((tmp_path / "clinics").glob("*.csv")), label="diagnosis", checked="seen twice", rounds=60)
    for columns, wrong in zip(library, WRONG.values(), strict=True):
        assert {int(row) for row, bad in zip(columns["row"], columns["suspected"], strict=True) if bad} == wrong


def make_images(folder, seed):
    """Bright and dark images; one is in the other's folder, and two of each kind were checked."""
    rng = np.random.default_rng(seed)
    for k in range(20):
        kind = k % 2
        label = ("dark", "bright")[kind ^ (k == 10)]
        inside = folder / ("checked" if k < 4 else ".") / label
        inside.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 80, (12, 10, 3)) + 150 * kind
        Image.fromarray(pixels.astype(np.uint8)).save(inside / f"{k}.{'png' if k % 3 else 'jpg'}")


def test_images_in_folders_are_rows(tmp_path):
    for site in ("a", "b"):
        make_images(tmp_path / site, ord(site))
    found = fb.clean([tmp_path / "a", tmp_path / "b"], rounds=60)
    for columns in found:
        suspects = [n for n, bad in enumerate(columns["suspected"]) if bad]
        assert [columns["row"][n] for n in suspects] == ["bright/10.png"]
        assert [columns["suggested"][n] for n in suspects] == ["dark"] and len(columns["row"]) == 16
    (tmp_path / "a/dark/3.png").write_bytes(b"no image")
    (tmp_path / "a/dark/scan.TIF").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"images in .tif files, which are left out"):
        opened_images(tmp_path / "a")
    (tmp_path / "a/dark/scan.TIF").unlink()
    with pytest.raises(InputError, match=r"a/dark/3.png: it is not an image"):
        fb.clean([tmp_path / "a", tmp_path / "b"])


def listed(rows, labels, classes, images=None):
    """A site's rows, all of which are suspected to be of the first class."""
    n = len(rows)
    verdict = Verdict(np.linspace(0.1, 0.4, n), np.zeros(n, int), np.ones(n, bool), np.full(n, 0.5))
    return SiteRows("here", rows, np.asarray(labels), classes, images), verdict


def test_images_of_16_bits_are_those_of_8(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16)).astype(np.uint8)
    (tmp_path / "kind").mkdir()
    Image.fromarray(pixels).save(tmp_path / "kind/1.png")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "kind/2.png")
    (_, eight), (_, sixteen) = opened_images(tmp_path).rows
    assert eight == sixteen and eight[2:] == (pixels / 255).ravel().tolist()
    site, verdict = listed(["kind/1.png", "kind/2.png"], [0, 0], ["kind"], tmp_path)
    site.write(tmp_path, verdict)
    shown = re.findall('src="([^"]+)', (tmp_path / "page.html").read_text())
    assert len(shown) == 2 and shown[0] == shown[1]


def test_no_cell_of_a_list_is_a_formula(tmp_path):
    classes = ["=1+cmd|' /C calc'!A0", "+a", "-a", "@a", "\ta", "\ra", "-1", "+1e3", "a=1"]
    site, verdict = listed(["=row", *"abcdefgh"], range(9), classes)
    site.write(tmp_path, verdict)
    with (tmp_path / "suspects.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["label"] for row in found] == [*("'" + name for name in classes[:6]), *classes[6:]]
    assert found[0]["row"] == "'=row" and {row["suggested label"] for row in found} == {"'" + classes[0]}


def test_a_file_name_that_is_not_text_is_listed(tmp_path):
    site, verdict = listed([b"a/\xe9.png".decode("utf-8", "surrogateescape")], [0], ["a"])
    site.write(tmp_path, verdict)
    assert all(r"a/\udce9.png" in (tmp_path / name).read_text("utf-8") for name in ("suspects.csv", "page.html"))


def test_each_site_has_a_name_of_its_own(tmp_path):
    folders = [tmp_path / name for name in ("hospital.north", "hospital.south")]
    for folder in folders:
        folder.mkdir()
    assert site_names(folders) == ["hospital.north", "hospital.south"]
    assert site_names([tmp_path / "a.b.csv", tmp_path / "c.csv"]) == ["a.b", "c"]
    assert site_names([tmp_path / "a.csv", tmp_path / "a.parquet"]) == ["a.csv", "a.parquet"]


def test_a_verdict_is_the_models():
    x, rows = np.array([-2.0, 0.0, 3.0]), {"features": np.array([[1.0], [-1.0]]), "label": [1, 1], "place": np.array([2, 0])}
    found = judged(x, Model(np.array([[0.0, 1.0]]), np.zeros(2)), rows)
    sigmoid = 1 / (1 + np.exp(-np.array([1.0, -1, 3, -2])))
    wanted = Verdict(sigmoid[:2], np.array([1, 0]), np.array([False, True]), sigmoid[2:])
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs)


def test_what_cannot_be_cleaned_is_one_line(run, tmp_path):
    make_tables(tmp_path / "clinics")
    (tmp_path / "empty").mkdir()
    make_images(tmp_path / "pictures" / "north", 0)
    cases = {
        ("clean",): "give a folder with the sites' tables, or --federation",
        ("clean", "clinics", "--federation", "x"): "give either a folder with tables or --federation, not both",
        (
            "clean",
            "empty",
        ): "holds no tables: give a folder with a .csv or .parquet file, or a folder of images, for each client",
        ("clean", "clinics"): "north.csv:1: there is no column 'label'; did you mean level?",
        ("clean", "clinics", "--label", "diagnosis", "--checked", "smoker", "--features", "level,,noise"): "names of columns",
        ("clean", "clinics", "--label", "diagnosis", "--checked", "noise"): "must be 'train' or 'validation', no or yes",
        ("clean", "clinics/north.csv"): "clinics/north.csv is a file, not a folder",
        ("clean", "pictures/north"): "pictures/north holds the images of one client: give the folder that has such a folder",
    }
    for words, line in cases.items():
        code, _, err = run(*words)
        assert code == 2 and line in err, (words, err)


LEVELS = [f"{k % 2 + k / 100}" for k in range(12)]
TABLE = {"level": LEVELS, "label": ["a", "b"] * 6, "checked": ["yes", "yes", "no", "no"] * 3}
MISTAKES = {"word": "unknown", "decimal comma": "1,5", "infinity": "-inf", "huge number": "1e300"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_among_numbers_does_not_make_them_categories(mistake):
    table = {**TABLE, "level": [*LEVELS[:7], MISTAKES[mistake], *LEVELS[8:]]}
    with pytest.raises(InputError, match=rf"table 1, row 8: column 'level': '{MISTAKES[mistake]}' is not a number"):
        fb.clean([TABLE, table])


def test_words_are_categories_and_codes_are_numbers():
    table = {**TABLE, "ward": ["none", "", "x", "2"] * 3, "code, old": ["n/a", "1", "2", ""] * 3, "size": [None, *range(11)]}
    assert text_columns([table, TABLE], fb.Columns("label", split="checked")) == []  # as many numbers as words
    table["ward"] = ["none", "y", "x", "2"] * 3
    assert text_columns([table], fb.Columns("label", split="checked")) == ["ward"]
    assert text_columns([table], fb.Columns("label", ["level"], split="checked")) == []


def test_tables_with_other_columns_are_named(tmp_path):
    cases = {"label": "'label'; did you mean lable", "level": "'level'"}
    for name, line in cases.items():
        other = {"lable" if column == name else column: cells for column, cells in TABLE.items()}
        with pytest.raises(InputError, match=f"table 1: there is no column {line}"):
            fb.clean([TABLE, other])
    with pytest.raises(InputError, match="table 1: the column 'ward' is not in table 0"):
        fb.clean([TABLE, {**TABLE, "ward": ["x"] * 12}])


def test_columns_are_given_by_name_in_python():
    table = {**TABLE, "level, now": LEVELS, "ward, old": ["x", "y", "z"] * 4}
    (all_columns,) = fb.clean([table], rounds=5)
    (named,) = fb.clean([table], features=["level", "level, now", "ward, old"], categories=["ward, old"], rounds=5)
    np.testing.assert_array_equal(all_columns["trust"], named["trust"])
    for wrong in ({"features": "level"}, {"categories": "level"}, {"features": 3}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} must be a list of names"):
            fb.clean([table], **wrong)


def test_a_class_without_checked_rows_is_warned_of():
    table = {**TABLE, "label": [*TABLE["label"][:10], "c", "c"]}
    with pytest.warns(UserWarning, match="no checked row has the label 'c', so rows that have it look wrong"):
        fb.clean([TABLE, table], rounds=2)


def test_a_site_that_sees_its_own_rows_alone_warns_of_them():
    settings = LabelErrors(features="level")
    there = {**TABLE, "label": [*TABLE["label"][:10], "c", "c"]}
    read = tables([TABLE, there], settings.columns)
    with pytest.warns(UserWarning, match="label 'c', so rows that have it look wrong, unless another site has checked some:"):
        settings.build(read._replace(names=[(), read.names[1]]))
    with warnings.catch_warnings(action="error"):
        settings.build(read._replace(names=[read.names[0], ()]))


def test_the_command_warns_in_one_line(run, tmp_path):
    (tmp_path / "site.csv").write_text("level,label,checked\n1,a,yes\n2,b,yes\n1,a,no\n2,b,no\n3,c,no\n")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = run("clean", ".", "--rounds", 2, "--out", "here")
    line = "no checked row has the label 'c', so rows that have it look wrong: check some of them"
    assert code == 0 and err == f"fedbilevel: warning: {line}\n"


def test_a_page_has_small_pictures_whole_numbers_and_the_readers_colours(opened, tmp_path):
    (tmp_path / "kind").mkdir()
    names = ["kind/tall.png", "kind/wide.png", f"kind/{'long' * 30}.png"]
    for name, size in zip(names, ((300, 10), (10, 300), (1, 1)), strict=True):
        Image.fromarray(np.zeros(size, np.uint8)).save(tmp_path / name)
    site, verdict = listed(names, [1, 1, 1], ["kind", "a-very-long-name-of-a-kind-" * 4], tmp_path)
    site.write(tmp_path, verdict)
    tab, complaints, _ = opened((tmp_path / "page.html").as_uri(), ready="table", viewport={"width": 400, "height": 800})
    for picture in tab.locator("img").all():
        box = picture.bounding_box()
        assert box["width"] <= 64 and box["height"] <= 64
    lines = "cells => cells.map((c) => (r = document.createRange(), r.selectNodeContents(c), r.getClientRects().length))"
    assert {*tab.locator("th:last-child, td.number").evaluate_all(lines)} == {1}
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400 and complaints == []
    colour = "getComputedStyle(document.body).color"
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate(colour) == "rgb(255, 255, 255)"
    tab.emulate_media(color_scheme="light")
    assert tab.evaluate(colour) == "rgb(0, 0, 0)"
