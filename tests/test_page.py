"""What the report page tells its reader: where numbers come from, how runs ended, and how a run in progress stands."""

import json
import shlex
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from test_report import executed, going_on

from fedbilevel.command import main
from fedbilevel.errors import Diverged
from fedbilevel.report.command_line import run_commands, sweep_command
from fedbilevel.report.curve_picture import draw
from fedbilevel.report.curves import Curve, curves
from fedbilevel.report.inside import look_inside
from fedbilevel.report.page import page
from fedbilevel.report.page_data import contents
from fedbilevel.report.watch import BackgroundLook, PageServer
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.stopping import stop_request
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep

QUADRATIC = dict(clients=3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that finishes, and one that diverges between its first two rows."""
    root = tmp_path_factory.mktemp("runs")
    executed(root / "fedbio", "quadratic", QUADRATIC, "fedbio", rounds=40, every=10)
    steep = Configuration.resolve("quadratic", QUADRATIC, "simfbo", {"gamma_y": 5.0}, RunOptions(rounds=40, every=10))
    (folder,) = RunFolder.create({root / "simfbo": steep})
    with pytest.raises(Diverged), stop_request() as stop:
        folder.execute(stop, lambda moment: None)
    return RunFolder.find(root)


@pytest.fixture(scope="module")
def tab(runs, browser, tmp_path_factory):
    """Their page, opened once for all tests that do not change it."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page(contents(runs)))
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.goto(file.as_uri())
    tab.wait_for_selector("#chart-x_error .main-svg")
    yield tab
    tab.close()


def test_the_header_has_the_task_the_date_and_the_command(tab, runs):
    assert tab.text_content("h1") == "quadratic" and tab.title() == "quadratic · fedbilevel"
    year, month = runs[0].started[:4], runs[0].started[5:7]
    assert year in tab.text_content("#about") and month.isdigit() and tab.text_content("#about").endswith("UTC")
    (command,) = tab.locator("#commands code").all_text_contents()
    assert command.split("fedbilevel ", 1)[1] == (
        "run quadratic fedbio simfbo --rounds 40 --knob clients=3 --set simfbo.gamma_y=5.0"
    )


def test_results_come_before_warnings(tab):
    assert tab.evaluate("[...document.querySelectorAll('main > section')].filter((s) => s.offsetHeight).map((s) => s.id)") == [
        "table",
        "curves",
        "notes",
        "configuration",
    ]
    assert "SimFBO diverged at round 10" in tab.text_content("#notes")


def test_a_diverged_run_shows_its_finite_part_and_its_end(tab, runs):
    assert [tab.text_content(f"tr[data-line='{k}'] .status") for k in (0, 1)] == ["finished", "diverged after round 0"]
    first = runs[1].rows()[0]
    drawn = tab.evaluate("document.getElementById('chart-x_error').data.map((d) => [d.name, d.mode, [...d.x], [...d.y]])")
    of_run = [trace for trace in drawn if trace[0].startswith("simfbo")]
    assert of_run == [[name, "markers", [0], [first["x_error"]]] for name in ("simfbo", "simfbo, then diverged")]
    plot = tab.locator("#chart-x_error .nsewdrag").bounding_box()
    for point in tab.locator("#chart-x_error .scatterlayer .points path").all():
        box = point.bounding_box()
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        assert plot["x"] - 1 <= middle[0] <= plot["x"] + plot["width"] and plot["y"] <= middle[1] <= plot["y"] + plot["height"]


def test_hovering_shows_all_runs_at_a_round_with_rounded_values(tab, runs):
    plot = tab.locator("#chart-x_error .nsewdrag").bounding_box()
    at = tab.evaluate("document.getElementById('chart-x_error')._fullLayout.xaxis.d2p(20)")
    tab.mouse.move(plot["x"] + at, plot["y"] + plot["height"] / 2)
    tab.wait_for_selector("#chart-x_error .hoverlayer text")
    title, *values = tab.locator("#chart-x_error .hoverlayer text").all_text_contents()
    value = next(row["x_error"] for row in runs[0].rows() if row["rounds"] == 20)
    assert title == "20" and values[0] == f"fedbio : {value:.4g}" and len(str(value)) > 8
    assert [text.split(" : ")[0] for text in values] == ["fedbio", "simfbo", "simfbo, then diverged"]
    tab.mouse.move(0, 0)


def test_no_toolbar_lies_over_a_chart(tab):
    assert tab.locator(".chart").count() >= 4 and tab.locator(".modebar-btn").count() == 0


def test_a_logarithmic_axis_draws_nothing_before_the_first_measurement(tab):
    path = "document.querySelector('#chart-x_error .scatterlayer path.js-line').getAttribute('d')"
    assert tab.evaluate(path).startswith("M0,")  # round 0
    tab.select_option("#scale-x", "log")
    start = float(tab.evaluate(path)[1:].split(",")[0])
    first = tab.evaluate("document.getElementById('chart-x_error')._fullLayout.xaxis.d2p(10)")
    assert abs(start - first) < 0.5
    assert "log scale, without 0" in tab.text_content("#chart-x_error .xtitle")
    tab.select_option("#scale-x", "linear")


def test_an_axis_that_is_not_linear_says_so(tab):
    assert tab.locator("#chart-y_error .ytitle").count() == 0
    tab.select_option("#scale-y", "log")
    assert tab.text_content("#chart-y_error .ytitle") == "log scale"
    tab.select_option("#scale-y", "")


def test_dark_mode_has_colours_of_its_own(tab):
    colour = "document.querySelector('#chart-x_error .scatterlayer path.js-line').style.stroke"
    light = tab.evaluate(colour)
    tab.click("#theme")
    dark = tab.evaluate(colour)
    tab.click("#theme")
    assert light == "rgb(0, 114, 178)" and dark == "rgb(77, 168, 232)" and tab.evaluate(colour) == light


def test_a_picture_says_that_its_scale_is_logarithmic_and_where_a_run_diverged(runs, tmp_path):
    rows = [dict(rounds=k, bytes_up=1, bytes_down=1, upper_loss=10.0**-k) for k in range(4)]
    draw([Curve("a", rows, "finished", "upper_loss")], tmp_path / "falls.png")
    assert "upper loss (log scale)</text>" in (tmp_path / "falls.svg").read_text()
    draw(curves(runs), tmp_path / "diverged.png")
    svg = (tmp_path / "diverged.svg").read_text()
    assert "simfbo (diverged)</text>" in svg and "log scale" not in svg


CASES = [
    "quadratic fedbio",
    "quadratic simfbo --knob clients=3 --knob noise=0.5 --set spread=2",
    "quadratic simfbo fedbio --set gamma=0.1 --seed 7 --every 5",
    "regularisation --steps 3 --clients-per-round 2 --dropout 0.1 --weights rows",
    "quadratic fedbio --aggregate trimmed-mean --set-aggregate byzantine=2 --attack sign-flip:1",
    "data-cleaning shrofbo --knob rho=0.2 --keep-best",
    "regularisation simfbo --epsilon 8 --delta 1e-6 --set-privacy metric_noise=300",
    "quadratic fedbio --aggregate buffered --set-aggregate first=2 --arrivals lognormal:0.5",
]


@pytest.mark.parametrize("arguments", CASES)
def test_a_command_leads_to_the_configurations_that_it_was_found_from(arguments, monkeypatch):
    started = []

    def start(configurations, *rest):
        started.append(configurations)

    monkeypatch.setattr("fedbilevel.command.run.start", start)

    def run(words):
        monkeypatch.setattr(sys, "argv", words)
        main.main()
        return started.pop()

    long = [] if "--steps" in arguments else ["--rounds", "30"]
    first = run(["fedbilevel", "run", *arguments.split(), *long])
    (command,) = run_commands(first)
    assert command.startswith("JAX_ENABLE_X64=1 ")  # as the tests are
    assert run(shlex.split(command)[1:]) == first


def test_runs_made_in_python_have_no_command():
    options = RunOptions(rounds=3)
    assert run_commands([Configuration("<solve>", {}, "fedbio", {}, options)]) == []


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    grid = {"gamma_x": ["0.02", "0.05"], "gamma_y": ["0.1", "0.5", "1e9"]}
    sweep = Sweep("quadratic", QUADRATIC, "simfbo", {}, grid, 2, RunOptions(rounds=20, every=20))
    folder = SweepFolder.create(tmp_path_factory.mktemp("swept") / "sweep", sweep)
    folder.execute()
    return folder


def test_a_sweeps_page_has_its_cells_and_their_commands(swept, opened, tmp_path):
    (tmp_path / "sweep.html").write_text(page(contents([], [swept])))
    tab, complaints, _ = opened((tmp_path / "sweep.html").as_uri(), ready="#sweeps .main-svg")
    ranked = swept.sweep.ranked(swept.cells(), "x_error")
    rows = [row.split("\t") for row in tab.locator("#sweeps tbody tr").all_inner_texts()]
    assert [row[:2] for row in rows] == [[str(v) for v in cell.values.values()] for cell in ranked]
    assert float(rows[0][2]) == pytest.approx(ranked[0].mean("x_error"), rel=1e-3) and rows[-1][-1] == "2 of 2"
    assert tab.text_content("#commands code") == sweep_command(swept.sweep, swept.metric)
    for k in (0, 2):
        tab.click(f"#sweeps tr[data-cell='{k}']")
        (expected,) = run_commands([swept.sweep.configuration(ranked[k].values, 0)])
        assert tab.text_content("#sweeps .command code") == expected
        assert any(f"--set {name}={value}" in expected for name, value in ranked[k].values.items())
    (frame,) = tab.evaluate("document.querySelector('#sweeps .chart').layout.shapes")
    r, c = frame["y0"] + 0.5, frame["x0"] + 0.5
    assert swept.sweep.grid["gamma_x"][int(r)] == ranked[0].values["gamma_x"]
    assert swept.sweep.grid["gamma_y"][int(c)] == ranked[0].values["gamma_y"] and complaints == []


def test_a_sweeps_command_makes_the_same_sweep(swept, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr("fedbilevel.runs.sweeps.folder.SweepFolder.create", lambda path, sweep, *rest: made.append(sweep))
    monkeypatch.setattr("fedbilevel.command.sweep._execute", lambda *given: None)
    monkeypatch.setattr(sys, "argv", shlex.split(sweep_command(swept.sweep, swept.metric)))
    main.main()
    assert {**made[0].plain(), "knobs": 0} == {**swept.sweep.plain(), "knobs": 0} and made[0].knobs == {"clients": "3"}


@pytest.fixture
def going(runs, tmp_path):
    """A run whose first rows have come."""
    return tmp_path / "run", going_on(runs[0], tmp_path / "run", 3)


def test_a_run_in_progress_says_at_which_round_it_is(going, opened):
    folder, rows = going
    look = BackgroundLook()
    with PageServer(lambda: contents(RunFolder.find(folder), look=look)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            tab, complaints, _ = opened(server.url, ready="#chart-x_error .main-svg")
            assert tab.text_content("td.status") == "round 20 of 40" and "fedbio at round 20 of 40" in tab.text_content(
                "#about"
            )
            (folder / "metrics.jsonl").write_text("".join(rows[:4]))
            tab.locator("td.status", has_text="round 30 of 40").wait_for()
            assert complaints == []
        finally:
            server.shutdown()
            thread.join()


def test_a_watched_page_does_not_wait_for_what_takes_seconds(going, monkeypatch):
    may_end = threading.Event()

    def slow(folder):
        may_end.wait(60)
        return look_inside(folder)

    monkeypatch.setattr("fedbilevel.report.watch.look_inside", slow)
    folder, _ = going
    look = BackgroundLook()
    shown = contents(RunFolder.find(folder), look=look)
    assert shown["runs"][0]["columns"]["rounds"] == [0, 10, 20] and "gradients" not in shown["runs"][0]["columns"]
    may_end.set()
    deadline = time.monotonic() + 60
    while look(RunFolder(folder)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert contents(RunFolder.find(folder), look=look)["runs"][0]["columns"]["gradients"][0] == 0


@pytest.fixture
def served(going):
    """A run whose first rows have come, and the address of its page."""
    folder, rows = going
    with PageServer(lambda: contents(RunFolder.find(folder), look=lambda run: None)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield folder / "metrics.jsonl", rows, server.url
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_page_asks_for_news_at_least_every_two_seconds(served, browser):
    """By the page's own clock, so that the verdict does not depend on how busy the machine is."""
    metrics, rows, address = served
    with browser.new_page() as tab:
        tab.clock.install()
        tab.goto(address)
        tab.locator("td.status", has_text="round 20 of 40").wait_for()
        tab.clock.pause_at(time.time() + 3600)
        metrics.write_text("".join(rows[:4]))
        tab.clock.run_for(1000)
        tab.locator("td.status", has_text="round 30 of 40").wait_for()


def test_a_page_waits_for_an_answer_before_it_asks_again(served, browser):
    _, _, address = served
    with browser.new_page() as tab:
        held = []
        tab.clock.install()
        tab.route("**/data.json", lambda asked: held.append(asked))
        tab.goto(address)
        until(lambda: tab.clock.run_for(1000) or held)
        tab.clock.run_for(5000)
        assert len(held) == 1
        held[0].continue_()
        until(lambda: tab.clock.run_for(1000) or len(held) > 1)
        tab.clock.run_for(5000)
        assert len(held) == 2
        tab.unroute_all(behavior="ignoreErrors")


@pytest.mark.slow
def test_watch_has_every_row_that_was_written_before_it_was_asked(tmp_path):
    """Beside a run that keeps all cores busy: so a page that asks every second is behind by that and by the answer's time."""
    command = [sys.executable, "-m", "fedbilevel"]
    task = ["data-cleaning", "simfbo", "--rounds", "100000", "--every", "10"]
    with subprocess.Popen([*command, "run", *task, "--out", tmp_path / "run"], stdout=subprocess.DEVNULL) as run:
        try:
            metrics = tmp_path / "run" / "simfbo" / "metrics.jsonl"
            until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2)
            with subprocess.Popen([*command, "watch", tmp_path / "run"], stdout=subprocess.PIPE, text=True) as watch:
                try:
                    address = watch.stdout.readline().split()[1]
                    for _ in range(10):
                        written = metrics.read_bytes().count(b"\n")
                        with urllib.request.urlopen(f"{address}data.json", timeout=300) as answer:
                            (shown,) = json.load(answer)["runs"]
                        assert len(shown["columns"]["rounds"]) >= written
                        assert (shown["done"], shown["of"]) == (shown["columns"]["rounds"][-1], 100_000)
                        until(lambda written=written: metrics.read_bytes().count(b"\n") > written)
                finally:
                    watch.terminate()
        finally:
            run.kill()


def until(true):
    """Wait for something that another process does."""
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
