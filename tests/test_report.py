"""The report page as a reader meets it, in a browser; pictures; and the page of a run that is going on."""

import base64
import http.client
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import t
from test_recorded import imported

import fedbilevel as fb
from fedbilevel.registry import chosen
from fedbilevel.report.confidence import band, series
from fedbilevel.report.curve_picture import draw
from fedbilevel.report.curves import Curve, curves, labels
from fedbilevel.report.latex import latex_table, write_latex
from fedbilevel.report.page import page
from fedbilevel.report.page_data import contents
from fedbilevel.report.styles import PAPER
from fedbilevel.report.table import table
from fedbilevel.report.watch import PageServer
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.stopping import stop_request
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep
from fedbilevel.runs.tuning.folder import TuningFolder
from fedbilevel.runs.tuning.tuning import Tuning
from fedbilevel.tasks import TASKS

ROOT = Path(__file__).parent.parent
SMALL = dict(clients=3, train_per_client=30, validation_per_client=5, hidden=4, batch_size=8)


def executed(path, task, knobs, algorithm, **rest):
    (folder,) = RunFolder.create({path: Configuration.resolve(task, knobs, algorithm, {}, RunOptions(**rest))})
    with stop_request() as stop:
        folder.execute(stop, lambda moment: None)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two seeds of one method and one of another, on a small cleaning task."""
    root = tmp_path_factory.mktemp("runs")
    return [
        executed(root / name, "data-cleaning", SMALL, algorithm, rounds=30, every=10, seed=seed)
        for name, algorithm, seed in (("a", "simfbo", 0), ("b", "simfbo", 1), ("c", "fedavg", 0))
    ]


@pytest.fixture(scope="module")
def shown(folders):
    return contents(folders)


def lines(folder):
    return [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


def decoded(address):
    """The pixels of an image within the page."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.removeprefix("data:image/png;base64,")))))


def drawn(tab, metric):
    """The curves of a chart: name -> (positions, values)."""
    traces = tab.evaluate(f"document.getElementById('chart-{metric}').data.map((d) => [d.name ?? '', [...d.x], [...d.y]])")
    return {name: (at, values) for name, at, values in traces if name}


def test_the_contents_are_the_runs_own_numbers(folders, shown):
    for folder, run in zip(folders, shown["runs"], strict=True):
        for k, row in enumerate(lines(folder)):
            assert {name: run["columns"][name][k] for name in row} == row
    assert [run["label"] for run in shown["runs"]] == ["simfbo, seed 0", "simfbo, seed 1", "fedavg"]
    assert [s["label"] for s in shown["series"]] == ["simfbo, 2 seeds", "fedavg"]
    simfbo, _, fedavg = shown["runs"]
    assert simfbo["columns"]["gradients"] == [0, 90, 180, 270] and simfbo["columns"]["second_order"] == [0, 60, 120, 180]
    assert fedavg["columns"]["gradients"][-1] == 30 * 3 * 5 and fedavg["columns"]["second_order"][-1] == 0
    assert "gamma_x" in shown["differences"] and "hidden" not in shown["differences"]


def test_trusted_samples_are_told_with_their_labels(folders, shown):
    (section,) = shown["runs"][0]["learned"]
    histogram, most, least = section["parts"]
    right, corrupted = (sum(counts) for counts in histogram["groups"].values())
    assert right + corrupted == 90 and "learned" not in shown["runs"][2]  # whose x has not moved
    assert 0.2 < corrupted / 90 < 0.55  # 40 % of the labels were replaced, a tenth of those by the right ones
    weights = np.sort(1 / (1 + np.exp(-np.load(folders[0].path / "x.npy"))))
    np.testing.assert_allclose([histogram["edges"][0], histogram["edges"][-1]], weights[[0, -1]])
    for gallery, expected in ((most, weights[::-1][:20]), (least, weights[:20])):
        told = [
            re.fullmatch(r"labelled (\d), truly (\d), weight (\S+)", picture["description"]) for picture in gallery["pictures"]
        ]
        np.testing.assert_allclose([float(words[3]) for words in told], expected, rtol=6e-3)
        for words, picture in zip(told, gallery["pictures"], strict=True):
            assert picture["marked"] == (words[1] != words[2])
            assert picture["caption"] == (f"{words[1]} ({words[2]})" if picture["marked"] else words[1])
            assert decoded(picture["image"]).shape == (8, 8)
    assert any(picture["marked"] for picture in (*most["pictures"], *least["pictures"]))
    assert np.sum(shown["holdings"][0]["counts"]["training"]) == 90 and len(shown["holdings"]) == 1


def test_a_learned_loss_is_told_by_class(opened, tmp_path):
    folder = executed(tmp_path / "run", "loss-tuning", {}, "simfbo", rounds=5, every=5)
    shown = contents([folder])
    omega, delta, tau = np.load(folder.path / "x.npy").reshape(3, 10)
    (section,) = shown["runs"][0]["learned"]
    assert "class 0 is the most frequent" in section["text"]
    for bars, title, part in zip(section["parts"], ("weight ω", "scale δ", "shift τ"), (omega, delta, tau), strict=True):
        assert (bars["kind"], bars["title"], bars["names"]) == ("bars", title, tuple("0123456789"))
        np.testing.assert_allclose(bars["numbers"], part)
    assert not np.allclose(omega, 1)  # it has moved
    (tmp_path / "report.html").write_text(page(shown))
    tab, complaints, _ = opened((tmp_path / "report.html").as_uri())
    bars = tab.evaluate("[...document.querySelectorAll('#learned .js-plotly-plot')].map((p) => Array.from(p.data[0].y))")
    np.testing.assert_allclose(bars, [omega, delta, tau], rtol=1e-6)
    assert complaints == []


OWN_TASK = '''
import dataclasses

import numpy as np

import fedbilevel as fb
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.shown import Bars, Gallery, Histogram, Picture, Shown


@fb.task
class Own(Quadratic):
    """A task that the report knows nothing of, which shows its x in every way there is."""

    def build(self, data=""):
        def shown(x):
            image = np.full((3, 5, 3), 7, np.uint8)
            picture = Picture(image, "<i>red</i>", f"x has {len(x)} entries", marked=True)
            spread = Histogram("size", "entries", {"all": np.abs(x), "none": np.zeros(0), "first": np.abs(x[:1])})
            return (
                Shown("How large x is", "Size, not sign.", (spread,)),
                Shown("What x is", "Entry by entry.", (Bars("x", "entry", "abcde", x), Gallery("seen", [picture] * 2))),
            )

        return dataclasses.replace(super().build(data), shown=shown)
'''


def test_a_task_of_ones_own_shows_its_x_in_the_same_ways(opened, tmp_path):
    (tmp_path / "own.py").write_text(OWN_TASK)
    own = chosen(TASKS, str(tmp_path / "own.py"))
    folders = [executed(tmp_path / name, own, {"clients": 3}, name, rounds=10, every=10) for name in ("simfbo", "fedbio")]
    shown = contents(folders)
    (tmp_path / "report.html").write_text(page(shown))
    tab, complaints, _ = opened((tmp_path / "report.html").as_uri(), ready="#learned .main-svg")
    texts = lambda selector: tab.locator(f"#learned {selector}").all_inner_texts()  # noqa: E731
    assert texts("h2") == ["How large x is", "What x is"] and texts("p") == ["Size, not sign.", "Entry by entry."]
    assert texts("h3") == ["simfbo", "fedbio", "simfbo: seen", "fedbio: seen", "x"]
    assert texts("figure.marked") == ["<i>red</i>"] * 4
    assert tab.locator("#learned img").first.get_attribute("title") == "x has 5 entries"
    *histograms, bars = tab.evaluate(
        "[...document.querySelectorAll('#learned .js-plotly-plot')].map((p) => p.data.map((d) => [d.name, [...d.x], [...d.y]]))"
    )
    found = [np.load(folder.path / "x.npy") for folder in folders]
    for drawn_groups, x in zip(histograms, found, strict=True):
        assert [(name, sum(y)) for name, _, y in drawn_groups] == [("all", 5), ("none", 0), ("first", 1)]
        middle, counts = np.asarray(drawn_groups[0][1]), np.asarray(drawn_groups[0][2])
        np.testing.assert_allclose(np.sort(np.abs(x)), np.repeat(middle, counts.astype(int)), atol=np.ptp(np.abs(x)) / 80)
    for (name, at, numbers), label, x in zip(bars, ("simfbo", "fedbio"), found, strict=True):
        assert name == label and at == list("abcde")
        np.testing.assert_allclose(numbers, x, rtol=1e-6)
    assert complaints == []


@pytest.fixture(scope="module")
def clinics(tmp_path_factory):
    """A run and a sweep on an own task of four tables, by an own algorithm."""
    place = tmp_path_factory.mktemp("clinics")
    skeleton = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/new-algorithm.md").read_text(), re.S | re.M)[0]
    (place / "mymethod.py").write_text(skeleton)
    with imported(ROOT / "examples/clinic_tables.py") as example, imported(place / "mymethod.py") as method:
        example.make_tables(place / "tables")
        task, algorithm = example.cleaning().build(str(place / "tables")), method.MyMethod(eta=30)
        solution = fb.solve(task, algorithm=algorithm, rounds=20, out=place / "run")
        result = fb.sweep(task, algorithm, {"eta": [3, 30]}, seeds=1, rounds=6, out=place / "sweep")
    return place, task, solution, result


def test_an_own_task_on_tables_by_an_own_algorithm_shows(clinics, opened):
    place, task, solution, result = clinics
    address = fb.write_report(place / "run", place / "sweep", out=place / "page.html").as_uri()
    tab, complaints, requests = opened(address, ready="#chart-accuracy .main-svg")
    history = [row["accuracy"] for row in solution.history]
    assert drawn(tab, "accuracy") == {"MyMethod": ([row["rounds"] for row in solution.history], history)}
    assert float(tab.locator("tr[data-line='0'] td[data-column='accuracy']").get_attribute("data-value")) == history[-1]
    tab.wait_for_selector("#sweeps .main-svg")
    means = {cell.values["eta"]: cell.mean(result.metric) for cell in result.cells}
    assert tab.evaluate("[...document.querySelector('#sweeps .chart').data[0].z].flat()") == [means[3], means[30]]
    held = tab.evaluate("JSON.parse(document.getElementById('data').textContent).holdings[0].counts.lower.flat()")
    assert held == list(task.preprocessing.training) and len(set(held)) == 4
    assert tab.is_visible("#holdings") and complaints == [] and requests == [address]


def test_the_page_opens_without_complaint_or_network_and_its_numbers_are_the_runs(folders, shown, opened, tmp_path):
    (tmp_path / "report.html").write_text(page(shown))
    address = (tmp_path / "report.html").as_uri()
    tab, complaints, requests = opened(address)
    for k, seeds in enumerate((folders[:2], folders[2:])):
        row, ends = tab.locator(f"tr[data-line='{k}']"), [lines(folder)[-1] for folder in seeds]

        def cell(column, row=row):
            return float(row.locator(f"td[data-column='{column}']").get_attribute("data-value"))

        for column, name in {"test accuracy": "test_accuracy", "roc auc": "roc_auc", "rounds": "rounds"}.items():
            assert np.isclose(cell(column), np.mean([end[name] for end in ends]), rtol=1e-12)
        assert np.isclose(cell("MB up") * 1e6, ends[0]["floats_up"] * seeds[0].bytes_per_float)
    own = lines(folders[2])
    assert drawn(tab, "test_accuracy")["fedavg"] == ([r["rounds"] for r in own], [r["test_accuracy"] for r in own])

    tab.click("button[data-axis=gradients]")
    assert drawn(tab, "upper_loss")["fedavg"][0] == [0, 150, 300, 450]
    tab.click("#legend button:has-text('fedavg')")
    assert list(drawn(tab, "upper_loss")) == ["simfbo, 2 seeds"]
    tab.click("#legend button:has-text('fedavg')")
    assert "fedavg" in drawn(tab, "upper_loss")
    tab.select_option("#scale-y", "log")
    assert tab.evaluate("document.getElementById('chart-upper_loss').layout.yaxis.type") == "log"

    order = "[...document.querySelectorAll('#runs tbody tr')].map((r) => Number(r.dataset.line))"
    tab.click("#runs th button:has-text('gradients')")
    assert tab.evaluate(order) == [1, 0]
    tab.click("#runs th button:has-text('gradients')")
    assert tab.evaluate(order) == [0, 1]
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert complaints == [] and requests == [address]


def test_the_page_fits_a_phone_and_follows_the_readers_colours(shown, opened, tmp_path):
    (tmp_path / "report.html").write_text(page(shown))
    tab, complaints, _ = opened(
        (tmp_path / "report.html").as_uri(), viewport={"width": 390, "height": 844}, color_scheme="dark"
    )
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.evaluate("document.documentElement.classList.contains('dark')") and complaints == []


def test_nothing_in_a_run_can_break_out_of_the_page(shown):
    html = page({**shown, "notes": ["</script><script>alert(1)</script>"]})
    assert "<script>alert(1)" not in html and html.count("</script>") == page(shown).count("</script>")


def test_old_runs_open_without_what_they_did_not_store(folders, tmp_path):
    shutil.copytree(folders[0].path, tmp_path / "old")
    (tmp_path / "old" / "x.npy").unlink()
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    config["configuration"]["knobs"]["dataset"] = "mnist"  # and its data is not here any more
    config["configuration"]["data"] = str(tmp_path)
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    shown = contents([RunFolder(tmp_path / "old")])
    assert "learned" not in shown["runs"][0] and "gradients" not in shown["runs"][0]["columns"]
    assert "shown without the details of its task" in shown["notes"][0] and "mnist was not found" in shown["notes"][0]
    assert shown["runs"][0]["columns"]["rounds"] == [0, 10, 20, 30]


def test_a_run_that_has_not_begun_is_named(folders, tmp_path):
    (waiting,) = RunFolder.create({tmp_path / "waiting": folders[0].configuration})
    shown = contents([waiting])
    assert shown["notes"] == [f"{waiting.path} has no metrics yet."] and shown["runs"] == [] and page(shown)


@pytest.fixture
def swept(tmp_path):
    grid = {"gamma_x": ["0.02", "0.05"], "gamma_y": ["0.1", "0.5", "1e9"]}
    sweep = Sweep("quadratic", {"clients": 3}, "simfbo", {}, grid, 2, RunOptions(rounds=20, every=20))
    folder = SweepFolder.create(tmp_path / "sweep", sweep)
    folder.execute()
    return folder


def test_a_sweep_is_a_heat_map(swept, opened, tmp_path):
    shown = contents([], [swept])
    (drawn_map,) = shown["sweeps"]
    assert (drawn_map["down"], drawn_map["across"]) == ("gamma_x", "gamma_y") and drawn_map["columns"] == [
        "0.1",
        "0.5",
        "1e+09",
    ]
    means = {tuple(cell.values.values()): cell.mean("x_error") for cell in swept.cells()}
    assert drawn_map["numbers"][1][0] == means[0.05, 0.1] and drawn_map["numbers"][0][2] is None
    (tmp_path / "sweep.html").write_text(page(shown))
    tab, complaints, _ = opened((tmp_path / "sweep.html").as_uri(), ready="#sweeps .main-svg")
    assert tab.evaluate("document.querySelector('#sweeps .chart').data[0].z[1][0]") == means[0.05, 0.1]
    assert tab.is_hidden("#curves") and complaints == []


def test_a_tuning_is_its_rungs_and_its_candidates(opened, tmp_path):
    options = RunOptions(rounds=8, every=8)
    budget = dict(candidates=4, rungs=2, passes=1, seeds=1)
    tuning, _ = Tuning.prepared("quadratic", {"clients": 3}, "fedavg", {}, {"gamma": (0.01, 1e9)}, options, **budget)
    folder = TuningFolder.create(tmp_path / "tuned", tuning)
    folder.execute()
    shown = contents([], [], [folder])
    (tuned,) = shown["tunings"]
    assert tuned["names"] == ["gamma"] and [line["rounds"] for line in tuned["lines"]] == [[2]] * 3 + [[2, 8]]
    assert tuned["lines"][-1]["best"] and any(line["numbers"] == [None] for line in tuned["lines"])
    fb.write_report(tmp_path / "tuned", out=tmp_path / "tuned.html")
    tab, complaints, _ = opened((tmp_path / "tuned.html").as_uri(), ready="#tunings .main-svg")
    drawn_numbers = tab.evaluate("[...document.querySelectorAll('#tunings .chart')].map((c) => [...c.data.at(-1).y])")
    assert drawn_numbers == [tuned["lines"][-1]["numbers"], tuned["lines"][-1]["values"]] and complaints == []
    best = f"run quadratic fedavg --rounds 8 --every 8 --knob clients=3 --set gamma={folder.found().chosen()['gamma']}"
    assert tab.text_content("#tunings .command code").endswith(best)


def going_on(finished, path, count):
    """Copy a run as it was when only the first rows had come; returns all of its rows."""
    shutil.copytree(finished.path, path)
    (path / "result.json").unlink()
    rows = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(rows[:count]))
    return rows


@pytest.fixture
def served(folders, tmp_path):
    """A run of which only the first two rows have come so far, and the server of its page."""
    rows = going_on(folders[2], tmp_path / "run", 2)
    with PageServer(lambda: contents(RunFolder.find(tmp_path / "run"))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, tmp_path / "run" / "metrics.jsonl", rows
        server.shutdown()
        thread.join()


def asked(server, path, host):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_a_watched_page_is_for_this_machine_alone(served):
    server, *_ = served
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost"):
        status, body = asked(server, "/data.json", host)
        assert status == 200 and json.loads(body)["runs"][0]["columns"]["rounds"] == [0, 10]
    for host in ("example.org", f"example.org:{port}", "localhost.example.org", "", "127.0.0.1.example.org"):
        assert asked(server, "/data.json", host)[0] == 403 and asked(server, "/", host)[0] == 403
    assert asked(server, "/etc/passwd", "localhost")[0] == 404


def test_a_watched_page_outlives_its_runs_and_its_readers(served):
    server, metrics, _ = served
    for host in ("[", "]", "[::1"):
        assert asked(server, "/", host)[0] == 403
    metrics.parent.rename(metrics.parent.with_name("away"))
    for path in ("/", "/data.json"):
        status, body = asked(server, path, "localhost")
        assert status == 503 and b"holds no run" in body and b"\n" not in body
    metrics.parent.with_name("away").rename(metrics.parent)
    assert asked(server, "/", "localhost")[0] == 200


def test_a_reader_who_closes_the_page_does_not_end_the_watch(folders):
    command = [sys.executable, "-m", "fedbilevel", "watch", folders[2].path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        port = int(re.search(r":(\d+)/", process.stdout.readline())[1])
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as reader:
                reader.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data.json") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "" and process.returncode == 0


def test_a_watched_page_updates_itself(served, opened):
    server, metrics, rows = served
    tab, complaints, _ = opened(server.url)
    assert drawn(tab, "test_accuracy")["fedavg"][0] == [0, 10]
    metrics.write_text("".join(rows))
    deadline = time.monotonic() + 30
    while len(drawn(tab, "test_accuracy")["fedavg"][0]) < 4 and time.monotonic() < deadline:
        tab.wait_for_timeout(200)
    assert drawn(tab, "test_accuracy")["fedavg"][0] == [0, 10, 20, 30] and complaints == []


def test_pictures_come_as_png_and_svg_with_text_that_stays_text(folders, tmp_path):
    written = draw(curves(folders), tmp_path / "figure.pdf", PAPER)
    assert [p.name for p in written] == ["figure.png", "figure.svg", "figure.pdf"]
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "figure.svg").read_text()
    assert "communication rounds</text>" in svg and "simfbo, 2 seeds</text>" in svg and 'width="396pt"' in svg


def test_a_table_leaves_out_the_two_losses_and_not_what_runs_are_compared_by():
    row = dict(
        step=1,
        rounds=2,
        floats_up=1,
        floats_down=1,
        bytes_up=4,
        bytes_down=4,
        seconds=0.1,
        upper_loss=3.0,
        lower_loss=4.0,
        test_loss=5.0,
    )
    made = table([Curve("a run", [row], "finished", "test_loss")])
    assert [column.header for column in made.columns] == ["run", "test loss", "rounds", "MB up", "MB down", "seconds"]


def test_a_table_has_means_over_seeds_and_marks_the_best():
    numbers = dict(step=1, rounds=2, bytes_up=4e6, bytes_down=4, seconds=0.1, upper_loss=3.0, lower_loss=4.0)

    def run(series, seed, accuracy, status="finished"):
        row = {**numbers, "accuracy": accuracy}
        return Curve(f"{series}, seed {seed}", [row], status, "upper_loss", series=series, better={"accuracy": "higher"})

    runs = [run("a", 1, 0.5), run("b", 1, 0.6), run("a", 2, 0.9), run("c", 1, 1.0, "diverged"), run("b", 2, 0.6)]
    made = table(runs)
    names, losses, accuracies, *_ = ([*column.cells] for column in made.columns)
    assert [column.header for column in made.columns][:3] == ["run", "upper loss", "accuracy"]
    assert names == ["a, 2 seeds", "b, 2 seeds", "c, seed 1 (diverged)"]
    half = t.ppf(0.975, 1) * 0.2
    assert [str(cell) for cell in accuracies] == [f"0.7 ± {half:.2g}", "0.6 ± 0", "1"]
    assert [cell.style for cell in accuracies] == ["bold", "", ""] and str(losses[0]) == "3 ± 0"


def test_runs_become_a_latex_table_and_figures(folders, tmp_path):
    numbers = dict(step=1, rounds=2, bytes_up=4e6, bytes_down=4, seconds=0.1, upper_loss=3.0, lower_loss=4.0)
    runs = [Curve(label, [{**numbers, "x_error": e}], "finished", "x_error") for label, e in (("a_b, c 1%", 2e-9), ("d", 3.0))]
    assert latex_table(runs) == (
        "\\begin{tabular}{lrrrrr}\n\\toprule\nrun & x error & rounds & MB up & MB down & seconds \\\\\n\\midrule\n"
        "a\\_b, c 1\\% & \\textbf{2$\\cdot 10^{-9}$} & 2 & 4.00 & 0.00 & 0.1 \\\\\n"
        "d & 3 & 2 & 4.00 & 0.00 & 0.1 \\\\\n\\bottomrule\n\\end{tabular}\n"
    )
    written = write_latex(curves(folders), tmp_path / "paper")
    assert [file.name for file in written] == ["table.tex", "rounds.pdf", "megabytes.pdf"]
    assert all(file.read_bytes().startswith(b"%PDF") for file in written[1:])


def test_a_band_is_students_confidence_interval_and_interpolates():
    found = band([[0, 1, 2], [0, 2], [0.5, 2]], [[0, 1, 2], [2, 4], [1, 4]])
    assert found.at == [1, 2]
    values = np.array([[1, 3, 2], [2, 4, 4]])
    half = t.ppf(0.975, 2) * values.std(1, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(found.mean, values.mean(1))
    np.testing.assert_allclose(found.high, values.mean(1) + half)
    assert band([[0, 1], [2, 3]], [[0, 0], [0, 0]]) is None


def test_runs_belong_together_if_the_seed_alone_differs():
    runs = [dict(task="t", algorithm="a", seed=seed, eta=eta) for seed, eta in ((0, 1), (1, 1), (0, 2))]
    assert series(runs) == [[0, 1], [2]]
    assert labels(runs) == ["a, seed 0, eta 1", "a, seed 1, eta 1", "a, seed 0, eta 2"]
    assert labels([runs[0], dict(task="s", algorithm="a", seed=0, eta=3)]) == ["a on t", "a on s"]
