"""Every page can be read: nothing overlaps, is cut off, empty or faint, on a desk or a phone, in light or dark.

The geometry is the browser's own, from the DOM. What is shown is made by hand, so that no run is needed.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedbilevel.report.inside import Inside, learned_parts
from fedbilevel.report.page import page
from fedbilevel.report.page_data import contents
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.derivative_counts import Work
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep
from fedbilevel.tasks.base import Holdings
from fedbilevel.tasks.shown import Bars, Gallery, Histogram, Picture, Shown

READ = ("index", "tutorial", "fedpace", "report", "results", "api", "tasks", "algorithms/index", "algorithms/fedbioacc")
ROOT = Path(__file__).parent.parent
GEOMETRY = (Path(__file__).parent / "geometry.js").read_text()
SIZES = {"desk": {"width": 1400, "height": 900}, "phone": {"width": 400, "height": 800}}
WARNING = "x hardly moved: its largest step was 2e-09 of its length. Try a step of x ten times as long, such as gamma_x=0.2."


def made(path, algorithm, values=(), ended=None, rows=6, **options):
    """The folder of a run that was never made."""
    configuration = Configuration.resolve("quadratic", {}, algorithm, dict(values), RunOptions(rounds=1000, **options))
    (folder,) = RunFolder.create({path: configuration})
    numbers = [
        dict(step=k, rounds=10 * k, floats_up=10 * k, floats_down=10 * k, seconds=0.123456 * k)
        | dict(x_error=4.0 * 0.4**k, y_error=1.0 + k % 2, upper_loss=13.0 - k, lower_loss=-k / 7, u_norm=7.0 + k)
        for k in range(rows)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbers))
    if ended:
        (path / "result.json").write_text(json.dumps({"step": rows - 1, **ended}))
    return folder


def seen(folder):
    """What could be inside a run: all that a page can show."""
    rng = np.random.default_rng(0)
    counts = {"training": rng.integers(0, 2000, (10, 10)), "clean": 20 * np.eye(10, dtype=int)}
    pictures = [
        Picture(np.full((8, 8), 9 * k, np.uint8), f"{k} (3)" if k % 2 else str(k), "a digit", bool(k % 2)) for k in range(20)
    ]
    shown = [
        Shown("Which samples are trusted", "The learned weight of every training sample, and what it is of.", (
            Histogram("learned weight", "samples", {"right label": rng.random(90), "corrupted label": rng.random(40)}),
            Gallery("most trusted", pictures),
        )),
        Shown("What x is", "Entry by entry.", (Bars("weight ω", "class", "0123456789", rng.random(10)),)),
    ]  # fmt: skip
    return Inside([Work(9 * k, 6 * k) for k in range(6)], Holdings(tuple("0123456789"), counts), learned_parts(shown))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each kind, by name."""
    root = tmp_path_factory.mktemp("pages")
    finished = dict(
        status="finished", caveats=["SimFBO assumes a lower level that is strongly convex in y, and this one is not."]
    )
    reason = "FedBiO diverged at round 52 (step 52): upper_loss is 6.63e+06, above the bound of 1e+06. Try smaller steps."
    runs = [
        made(root / "a", "simfbo", ended={**finished, "warnings": [WARNING]}),
        made(root / "b", "simfbo", ended=finished, seed=1),
        made(root / "c", "fedbio", {"gamma": 3.0}),
    ]
    diverged = [
        made(root / "d", "fedbio", ended=dict(status="diverged", reason=reason), rows=1),
        made(root / "e", "fedbio", {"eta": 0.5}, ended=dict(status="diverged", reason=reason), rows=5),
        made(root / "f", "fednest", {"neumann_terms": 17}, ended=finished),
    ]
    for folder in diverged[:2]:
        (folder.path / "result.json").write_text(json.dumps(dict(status="diverged", reason=reason)))
    deployed = made(root / "g", "fedpace", ended=finished)
    config = json.loads((deployed.path / "config.json").read_text())
    config["configuration"]["federation"] = "/srv/federations/study-of-several-hospitals"
    (deployed.path / "config.json").write_text(json.dumps(config))
    (deployed.path / "sites.json").write_text(json.dumps({"hospital-1": {"simulated": False}}))

    grid = {"gamma_x": [0.01, 0.02, 0.05, 0.1, 0.2], "gamma_y": [0.1, 0.5, 1.0]}
    swept = SweepFolder.create(root / "sweep", Sweep("quadratic", {}, "simfbo", {}, grid, 1, RunOptions(rounds=20)))
    numbers = json.loads((root / "a" / "metrics.jsonl").read_text().splitlines()[1])
    with (root / "sweep" / "results.jsonl").open("w") as file:
        for k, cell in enumerate(swept.sweep.cells()):
            status = "diverged" if k % 7 == 6 else "finished"
            row = {**numbers, "step": 20, "x_error": 0.1 + k / 3}
            file.write(json.dumps({"cell": cell, "seed": 0, "rows": [row], "status": status, "reason": ""}) + "\n")

    shown = {
        "runs": contents(runs, look=seen),
        "diverged": contents(diverged, look=lambda folder: None),
        "federation": contents([deployed], look=lambda folder: Inside([Work(9 * k, 6 * k) for k in range(6)])),
        "sweep": contents([], [swept]),
    }
    for name, values in shown.items():
        (root / f"{name}.html").write_text(page(values))
    return {name: root / f"{name}.html" for name in shown}


@pytest.fixture(scope="module")
def tab(browser):
    """One tab for all pages."""
    tab = browser.new_page()
    yield tab
    tab.close()


def complaints(tab, file, ready="body"):
    """What cannot be read on a page, with where; it is loaded once for each of its reader's colours."""
    found = []
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        tab.goto(file.as_uri())
        tab.wait_for_selector(ready)
        tab.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
        for size, viewport in SIZES.items():
            tab.set_viewport_size(viewport)
            found += [f"{line} ({size}, {scheme})" for line in tab.evaluate(GEOMETRY)]
    return found


@pytest.mark.parametrize(
    "name", ["runs", "sweep", *(pytest.param(name, marks=pytest.mark.slow) for name in ("diverged", "federation"))]
)
def test_a_report_page_can_be_read(pages, tab, name):
    assert complaints(tab, pages[name], ".chart .main-svg") == []


BROKEN = {
    "page scrolls sideways": '<div style="width: 3000px">wide</div>',
    "overlap": '<p>one text</p><p style="margin-top: -2.2em">another text</p>',
    "cut text": '<div style="width: 60px; overflow: hidden; white-space: nowrap">a sentence that is longer</div>',
    "faint text": '<p style="color: #aaa">hardly there</p>',
    "empty chart": '<div class="js-plotly-plot"><svg class="main-svg" width="100%"><rect class="nsewdrag"/></svg></div>',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_page_is_found_out(tab, tmp_path, kind):
    (tmp_path / "broken.html").write_text(f"<!doctype html><meta charset=utf-8><p>All is well.</p>{BROKEN[kind]}")
    assert {line.split(":")[0] for line in complaints(tab, tmp_path / "broken.html")} == {kind}


@pytest.mark.slow
def test_a_heat_map_that_is_illegible_in_dark_mode_is_found_out(pages, tab, tmp_path):
    broken = pages["sweep"].read_text().replace('"#000000" : "#ffffff"', '"#ffffff" : "#000000"')
    (tmp_path / "broken.html").write_text(broken)
    found = complaints(tab, tmp_path / "broken.html", "#sweeps .main-svg")
    assert any("dark" in line for line in found) and all(line.startswith("faint text") for line in found)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation, built."""
    place = tmp_path_factory.mktemp("docs") / "site"
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", place], cwd=ROOT, check=True)
    return place


@pytest.mark.slow
def test_the_documentation_can_be_read(site, tab):
    assert {page: lines for page in READ if (lines := complaints(tab, site / f"{page}.html"))} == {}


@pytest.mark.slow
def test_searching_the_documentation_works_from_files(site, opened):
    tab, complaints, requests = opened((site / "index.html").as_uri(), ready=".md-search__input")
    tab.fill(".md-search__input", "trimmed")
    tab.wait_for_selector(".md-search-result__item a[href*='aggregation']")
    assert complaints == [] and all(request.startswith(("file:", "data:", "blob:")) for request in requests)
