"""The papers' tables and figures: plans that can be run, runs that go on, and tables that say what the runs said."""

import dataclasses
import json
import math
import re
import shutil
import tomllib

import numpy as np
import pytest
from bare_plans import bare_plan

from fedbilevel.command import main
from fedbilevel.errors import InputError
from fedbilevel.report import panel_picture, reproduction_page
from fedbilevel.report.reproduction_text import written
from fedbilevel.report.styles import SCREEN
from fedbilevel.runs import configuration
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.reproductions import plan, results, tuned
from fedbilevel.runs.reproductions.paper_order import Pair, doubts
from fedbilevel.runs.reproductions.plan import Column, Panel, read
from fedbilevel.runs.reproductions.results import Row, Run
from fedbilevel.runs.reproductions.study import Study
from fedbilevel.runs.reproductions.table_numbers import Budget, Number, number, spent
from fedbilevel.runs.stopping import StopRequest
from fedbilevel.runs.sweeps import folder as folder_module
from fedbilevel.runs.sweeps.batched_runs import DIVERGED, FINISHED
from fedbilevel.runs.tuning.boxes import boxes_of

SMALL = """
title = "Two methods on quadratics"
paper = "nobody's"
task = "quadratic"
metric = "x_error"
scale = "plain"
rounds = 40
every = 10
seeds = 2
claimed = [["SimFBO"], ["FedAvg"]]
knobs = { clients = 4, noise = 0.1 }

[[panels]]
name = "few clients"
run = { clients_per_round = 2 }

[[panels]]
name = "all clients"
tuned_as = "few clients"

[[methods]]
name = "SimFBO"
algorithm = "simfbo"
hyperparameters = { local_steps = 2 }
paper = { "eta_x+gamma_x" = 0.03, gamma_y = 0.3 }
grid = { "eta_x+gamma_x" = [0.01, 0.03], gamma_y = [0.3, 100.0] }

[[methods]]
name = "FedAvg"
algorithm = "fedavg"
grid = { gamma = [0.01, 0.03, 0.1, 0.3] }
"""

TUNED = "".join(
    f'[[chosen]]\npanel = "few clients"\nmethod = "{method}"\ncells = 4\ndiverged = 0\nvalues = {{ {value} }}\n'
    for method, value in {"SimFBO": "gamma_y = 0.3", "FedAvg": "gamma = 0.1"}.items()
)


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    (folder / "small.toml").write_text(SMALL)
    return folder


@pytest.fixture(scope="module")
def finished(plans, tmp_path_factory):
    """A study that was tuned and run by the command."""
    out = tmp_path_factory.mktemp("study")
    command("small", "--tune", "--publish", "--plans", plans, "--out", out)
    return Study(read("small", plans), out, plans=plans)


def command(*arguments):
    main.app(["reproduce", *map(str, arguments)], standalone_mode=False)


@pytest.mark.parametrize("name", plan.names())
def test_every_line_of_every_plan_is_a_run_that_the_program_knows(name, monkeypatch):
    monkeypatch.setattr(configuration, "folder_of", lambda dataset, given: given)  # the data need not be here
    reproduction = read(name)
    for panel, method in reproduction.lines():
        reproduction.reported(panel, method, {}).configuration({}, 1)
    for panel, method in reproduction.tuned_lines():
        sweep = reproduction.tuning(panel, method)
        for cell in sweep.cells():
            sweep.configuration(cell, 100)
    after = reproduction.after_search()
    for panel, method in after.lines():
        configured = after.reported(panel, method, {}).configuration({}, 1000)
        boxes = boxes_of(configured, plan.fixed(panel, method).keys() - method.box.keys(), method.box)
        assert not method.searched or boxes or method.algorithm in ("fedpace", "s-tfbo", "d-tfbo") or not after.search
    known = {m.name for m in reproduction.methods}
    assert {name for group in reproduction.claimed for name in group} <= known
    assert reproduction.published.keys() <= {p.name for p in reproduction.panels}
    for by_method in reproduction.published.values():
        assert by_method.keys() <= known
        assert all(len(numbers) == len(reproduction.columns) for numbers in by_method.values())


@pytest.mark.parametrize("name", plan.names())
def test_reduced_sizes_need_no_data_that_is_not_bundled(name):
    small = read(name).small()
    assert small.lines()
    for panel, method in small.lines():
        sweep = small.reported(panel, method, {})
        assert sweep.configuration({}, 1).data == ""


@pytest.mark.parametrize("name", plan.names())
def test_chosen_values_are_cells_of_the_grid(name):
    reproduction = read(name)
    lines = {(p.name, m.name): (p, m) for p, m in reproduction.tuned_lines()}
    for entry in [] if reproduction.searched else tuned.Tuned.read(tuned.tuned_file(name)).chosen:
        panel, method = lines[entry["panel"], entry["method"]]
        assert entry["values"] in reproduction.tuning(panel, method).cells()
        assert set(reproduction.tuning(panel, method).seed_numbers()).isdisjoint(
            reproduction.reported(panel, method, {}).seed_numbers()
        )


SEARCHED_ONES = [name for name in plan.names() if tuned.Tuned.read(tuned.tuned_file(name)).searched]


@pytest.mark.parametrize("name", SEARCHED_ONES)
def test_values_of_a_search_are_of_three_seeds_that_are_not_reported(name):
    reproduction = read(name)
    entries = tomllib.loads(tuned.tuned_file(name).read_text())["chosen"]
    assert {(e["panel"], e["method"]) for e in entries} == {(p.name, m.name) for p, m in reproduction.searched_lines()}
    assert reproduction.search.reported == reproduction.seeds >= 5
    assert all(len(e["seeds"]) >= 3 and max(e["seeds"]) < reproduction.first_seed for e in entries)


@pytest.mark.parametrize("name", [name for name in plan.names() if (tuned.FOLDER / f"results/{name}.csv").exists()])
def test_stored_numbers_are_those_of_the_plan_with_its_chosen_values(name):
    assert Study(read(name), tuned.FOLDER).made(tuned.FOLDER / f"results/{name}.json")
    stored = results.from_csv(tuned.FOLDER / f"results/{name}.csv")
    assert set(stored) == {(p.name, m.name) for p, m in read(name).lines()}


def test_the_page_of_results_is_what_the_stored_numbers_say():
    assert (tuned.FOLDER / "RESULTS.md").read_text() == reproduction_page.results_page(tuned.FOLDER)


def test_tuning_chooses_the_best_cell_and_marks_what_diverged(finished, plans):
    entry = finished.choice(*finished.reproduction.lines()[0])
    chosen = tuned.Tuned.read(tuned.tuned_file("small", plans))
    assert chosen.values("few clients", "SimFBO") == entry["values"]
    assert entry["values"]["gamma_y"] == 0.3 and entry["diverged"] == 2 and entry["cells"] == 4 and entry["seeds"] == [100]
    cells = folder_module.SweepFolder(finished.path / "tuning/few_clients/SimFBO").cells()
    assert entry["x_error"] == pytest.approx(min(c.mean("x_error") for c in cells if not c.diverged), rel=1e-3)
    assert isinstance(entry["with_paper_values"], float)
    assert not chosen.values("all clients", "SimFBO")


def test_lines_run_with_the_chosen_values_of_the_panel_that_they_name(finished, plans):
    reproduction = finished.reproduction
    chosen = tuned.Tuned.read(tuned.tuned_file("small", plans)).values("few clients", "SimFBO")
    folder = folder_module.SweepFolder(finished.path / "lines/all_clients/SimFBO")
    configuration = folder.sweep.configuration({}, 1)
    assert configuration.hyperparameters["eta_x"] == configuration.hyperparameters["gamma_x"] == chosen["eta_x+gamma_x"]
    assert configuration.hyperparameters["local_steps"] == 2 and configuration.options.clients_per_round is None
    assert list(folder.sweep.seed_numbers()) == [1, 2]
    assert len(reproduction.lines()) == 4


def test_results_hold_every_moment_with_what_it_cost(finished):
    found = results.collect(finished)
    runs = found["few clients", "SimFBO"]
    outcome = finished.outcome(*finished.reproduction.lines()[0]).outcomes[0]
    assert [row.rounds for row in runs[0].rows] == [0, 10, 20, 30, 40]
    assert runs[0].rows[-1].value == outcome.rows[-1]["x_error"]
    assert runs[0].rows[-1].megabytes == pytest.approx((outcome.rows[-1]["bytes_up"] + outcome.rows[-1]["bytes_down"]) * 1e-6)
    # 40 rounds, 2 clients, 2 local steps of 3 gradients (f in x and y, g in y) and 2 second-order products
    assert runs[0].rows[-1].gradients == 40 * 2 * 2 * 3 and runs[0].rows[-1].second_order == 40 * 2 * 2 * 2


def test_stored_numbers_are_read_back(finished, tmp_path):
    found = results.collect(finished)
    (tmp_path / "a.csv").write_text(results.to_csv(found))
    again = results.from_csv(tmp_path / "a.csv")
    assert again.keys() == found.keys()
    for line, runs in found.items():
        for ours, theirs in zip(again[line], runs, strict=True):
            assert (ours.seed, ours.status) == (theirs.seed, theirs.status)
            for a, b in zip(ours.rows, theirs.rows, strict=True):
                assert a == pytest.approx(b, rel=1e-4, nan_ok=True)  # seconds are stored of leagues alone
    (tmp_path / "b.csv").write_text("something else\n")
    with pytest.raises(InputError, match="holds no results of a reproduction"):
        results.from_csv(tmp_path / "b.csv")


def test_what_is_finished_is_not_run_again(finished, plans, tmp_path, monkeypatch, capsys):
    copy = tmp_path / "study"
    shutil.copytree(finished.path, copy)
    shutil.rmtree(copy / "lines/all_clients/FedAvg")
    (copy / "lines/few_clients/SimFBO/work.json").unlink()
    ran = []

    def counted(experiments, observe):
        ran.append(type(experiments[0].algorithm).__name__)
        return run_together(experiments, observe)

    run_together = folder_module.run_together
    monkeypatch.setattr(folder_module, "run_together", counted)
    command("small", "--plans", plans, "--out", copy)
    assert ran == ["FedAvg"]
    told = [line for line in capsys.readouterr().out.splitlines() if " of 4 lines" in line]
    assert told == [f"small: {done} of 4 lines" for done in range(5)]
    assert (copy / "results.csv").read_text() == (finished.path / "results.csv").read_text()


def test_methods_that_are_not_run_again_keep_their_stored_numbers(finished, plans, tmp_path):
    folder = shutil.copytree(plans, tmp_path / "plans")
    given = ["small", "--plans", folder, "--publish", "--out", tmp_path / "out", "--methods"]
    with pytest.raises(InputError, match="small has no method 'FedAvf'"):
        command(*given, "FedAvf")
    shutil.copytree(finished.path / "lines/few_clients/FedAvg", tmp_path / "out/lines/few_clients/FedAvg")
    command(*given, "FedAvg")
    assert not list(tmp_path.glob("out/lines/*/SimFBO"))
    assert (folder / "results/small.csv").read_text() == (plans / "results/small.csv").read_text()
    (folder / "small.toml").write_text(SMALL.replace("local_steps = 2", "local_steps = 3"))
    with pytest.raises(InputError, match="no numbers of few clients, SimFBO as the plan has it now: run SimFBO too"):
        command(*given, "FedAvg")


def test_only_lines_that_the_plan_has_changed_are_run_and_without_any_all_is_drawn_again(finished, plans, tmp_path):
    folder = shutil.copytree(plans, tmp_path / "plans")
    given = ["small", "--plans", folder, "--publish", "--changed", "--out"]
    command(*given, tmp_path / "none")
    assert not (tmp_path / "none/lines").exists() and (folder / "results/small.png").stat().st_size > 10_000
    assert (folder / "results/small.csv").read_text() == (plans / "results/small.csv").read_text()
    (folder / "small.toml").write_text(SMALL.replace("local_steps = 2", "local_steps = 3"))
    command(*given, tmp_path / "some")
    assert {path.name for path in tmp_path.glob("some/lines/*/*")} == {"SimFBO"}
    assert (folder / "results/small.csv").read_text() != (plans / "results/small.csv").read_text()
    assert not Study(read("small", folder), tmp_path, plans=folder, changed=True).lines()
    file, other = folder / "results/small.json", {"few clients": "all clients", "all clients": "few clients"}
    file.write_text(re.sub("|".join(other), lambda name: other[name[0]], file.read_text()))
    assert len(Study(read("small", folder), tmp_path, plans=folder, changed=True).lines()) == 4
    with pytest.raises(InputError, match=r"--changed takes the other numbers from those stored .*: leave out --quick"):
        command(*given, tmp_path / "tuned", "--tune")


def test_lines_that_are_not_tuned_yet_are_not_run(plans, tmp_path):
    shutil.copy(plans / "small.toml", tmp_path)
    study = Study(read("small", tmp_path), tmp_path / "out", plans=tmp_path)
    with pytest.raises(InputError, match=r"has no values for few clients, SimFBO: choose them with .*--tune"):
        study.run()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("searched", [False, True])
def test_several_processes_find_what_one_finds(searched, tmp_path):
    search = "search = { candidates = 4, rungs = 2, keep = 2, passes = 1, seeds = 1, reported = 2 }\n"
    found = []
    for count in (1, 2):
        folder = tmp_path / f"plans-{count}"
        folder.mkdir()
        (folder / "small.toml").write_text((search if searched else "") + SMALL)
        command("small", "--tune", "--plans", folder, "--out", tmp_path / f"out-{count}", "--processes", count)
        text = tuned.tuned_file("small", folder).read_text()
        found.append((text, results.from_csv(tmp_path / f"out-{count}/results.csv")))
    (alone, numbers), (shared, others) = found
    assert alone == shared and numbers.keys() == others.keys()
    for line, runs in numbers.items():
        for run, other in zip(runs, others[line], strict=True):
            assert [row.value for row in run.rows] == pytest.approx([row.value for row in other.rows], rel=1e-5)


@pytest.mark.slow
def test_a_line_whose_values_have_changed_is_run_again_and_no_other(finished, plans, tmp_path, monkeypatch):
    shutil.copytree(finished.path, tmp_path / "out")
    (tmp_path / "better.toml").write_text("[hyperparameters.simfbo]\ngamma_y = 0.1\n")
    command("small", "--plans", plans, "--out", tmp_path / "out", "--settings", tmp_path / "better.toml")
    before, after = (results.from_csv(p / "results.csv") for p in (finished.path, tmp_path / "out"))
    assert before["few clients", "FedAvg"] == after["few clients", "FedAvg"]
    assert before["few clients", "SimFBO"] != after["few clients", "SimFBO"]
    used = folder_module.SweepFolder(tmp_path / "out/lines/few_clients/SimFBO").sweep.configuration({}, 1).hyperparameters
    chosen = tuned.Tuned.read(tuned.tuned_file("small", plans)).values("few clients", "SimFBO")
    assert used["gamma_y"] == 0.1 and used["gamma_x"] == chosen["eta_x+gamma_x"]


def test_numbers_of_a_plan_that_has_changed_are_not_shown_with_it(finished, plans, tmp_path):
    shutil.copytree(plans, tmp_path, dirs_exist_ok=True)
    (tmp_path / "small.toml").write_text(SMALL.replace("rounds = 40", "rounds = 50"))
    assert "Its plan has changed since it was run: publish it again." in reproduction_page.results_page(tmp_path)
    (tmp_path / "results/small.csv").unlink()
    assert "Not run at full size yet." in reproduction_page.results_page(tmp_path)


def test_the_command_leaves_a_table_a_picture_and_the_page(finished, plans):
    assert {"results.csv", "results.md", "results.png", "results.svg"} <= {p.name for p in finished.path.iterdir()}
    page = (plans / "RESULTS.md").read_text()
    assert page == reproduction_page.results_page(plans)
    last = number(results.collect(finished)["few clients", "SimFBO"], Column(at=40))
    assert f"{last.mean:.4g} ± {last.deviation:.2g}" in page
    assert "eta_x = gamma_x 0.01, 0.03; gamma_y 0.3, 100" in page


def run_of(*values, status=FINISHED, every=10, seed=1):
    return Run(seed, status, [Row(k * every, k * 2.0, k * 5, k * 3, v) for k, v in enumerate(values)])


def test_numbers_of_a_run():
    fine, gone = run_of(0.1, 0.5, 0.92), run_of(0.1, 0.95, status=DIVERGED)
    assert fine.after(10) == 0.5 and fine.after(19) == 0.5 and fine.after(100) == 0.92
    assert gone.after(10) == 0.95 and gone.after(20) is None
    assert fine.until(0.9) == 20 and fine.until(0.99) is None
    assert Number.over([1.0, 3.0, None]) == Number(2.0, math.sqrt(2), 2, 3)
    assert Number.over([None, None]) is None


def table_plan(**changes):
    made = read("mefbo-table2")
    return dataclasses.replace(
        made,
        panels=[Panel(name="i.i.d.")],
        methods=[m for m in made.methods if m.name in ("SimFBO", "MeFBO")],
        columns=[Column(at=20), Column(reach=0.9)],
        published={"i.i.d.": {"SimFBO": [91.0, 20], "MeFBO": [92.0, 10]}},
        quick=None,
        **changes,
    )


def test_the_order_of_methods_is_compared_column_by_column():
    made = table_plan()
    better, worse = [run_of(0.1, 0.95, 0.95)], [run_of(0.1, 0.5, 0.92)]
    agree = {("i.i.d.", "SimFBO"): worse, ("i.i.d.", "MeFBO"): better}
    assert doubts(made, made.panels[0], agree) == ([], [])
    swapped = {("i.i.d.", "SimFBO"): better, ("i.i.d.", "MeFBO"): worse}
    assert doubts(made, made.panels[0], swapped) == ([Pair("MeFBO", "SimFBO", column) for column in made.columns], [])
    phrases = "SimFBO is not behind MeFBO (after 20 rounds); SimFBO is not behind MeFBO (rounds to 90 %)"
    assert f"- i.i.d.: not the paper's order: {phrases}.\n" in reproduction_page.comparison(made, swapped)
    never = {("i.i.d.", "SimFBO"): worse, ("i.i.d.", "MeFBO"): [run_of(0.1, status=DIVERGED)]}
    assert len(doubts(made, made.panels[0], never).wrong) == 2
    both_never = {("i.i.d.", "SimFBO"): [run_of(0.1, status=DIVERGED)], ("i.i.d.", "MeFBO"): [run_of(0.1, status=DIVERGED)]}
    assert doubts(made, made.panels[0], both_never) == ([], [])


def test_a_method_of_which_fewer_runs_came_so_far_is_behind():
    made = table_plan()
    some = [run_of(0.1, 0.99, 0.99), run_of(0.1, 0.5, status=DIVERGED, seed=2)]
    all_of_them = [run_of(0.1, 0.95, 0.95), run_of(0.1, 0.95, 0.95, seed=2)]
    found = {("i.i.d.", "SimFBO"): some, ("i.i.d.", "MeFBO"): all_of_them}
    assert doubts(made, made.panels[0], found) == ([], [Pair("MeFBO", "SimFBO", column) for column in made.columns])
    told = "the paper's order; SimFBO is behind MeFBO only because of its diverged runs (after 20 rounds); "
    assert told in reproduction_page.comparison(made, found)
    assert doubts(made, made.panels[0], {("i.i.d.", "SimFBO"): all_of_them, ("i.i.d.", "MeFBO"): some}).wrong


def test_claims_without_numbers_are_compared_at_the_end():
    made = dataclasses.replace(table_plan(), published={}, columns=(), claimed=[["MeFBO"], ["SimFBO"]], rounds=20)
    found = {("i.i.d.", "SimFBO"): [run_of(0.1, 0.5, 0.97)], ("i.i.d.", "MeFBO"): [run_of(0.1, 0.95, 0.96)]}
    assert doubts(made, made.panels[0], found) == ([Pair("MeFBO", "SimFBO", Column(at=20))], [])
    assert "not the paper's order: SimFBO is not behind MeFBO." in reproduction_page.comparison(made, found)


def test_the_order_is_by_the_tasks_own_idea_of_better():
    made = dataclasses.replace(table_plan(), published={}, columns=(), claimed=[["MeFBO"], ["SimFBO"]], rounds=20)
    found = {("i.i.d.", "SimFBO"): [run_of(0.1, 0.5, 0.97)], ("i.i.d.", "MeFBO"): [run_of(0.1, 0.95, 0.96)]}
    errors = dataclasses.replace(made, task="quadratic", metric="x_error", scale="plain")
    assert doubts(errors, errors.panels[0], found) == ([], [])
    published = dataclasses.replace(
        errors, published={"i.i.d.": {"SimFBO": [0.5], "MeFBO": [0.4]}}, columns=[Column(at=10)], claimed=()
    )
    assert doubts(published, published.panels[0], found).wrong == [Pair("MeFBO", "SimFBO", Column(at=10))]


def test_equal_budgets_are_what_the_thriftiest_method_spent():
    made = dataclasses.replace(table_plan(), published={}, columns=())
    found = {("i.i.d.", "SimFBO"): [run_of(0.1, 0.5)], ("i.i.d.", "MeFBO"): [run_of(0.2, 0.6, 0.9)]}
    budget = Budget.common(list(found.values()))
    assert budget == (2.0, 8)
    assert budget.reached(found["i.i.d.", "MeFBO"][0]) == (0.6, 0.6)
    assert budget.reached(run_of(0.2, 0.7, 0.8, status=DIVERGED)) == (0.7, 0.7)  # it diverged later
    assert Budget(3.0, 9).reached(run_of(0.2, 0.7, status=DIVERGED)) == (None, None)
    assert Budget(1.0, 7).reached(found["i.i.d.", "MeFBO"][0]) == (None, None)  # it had no metrics yet
    assert "| MeFBO | 90.00 ± 0.00 | 60.00 | 60.00 |" in reproduction_page.table(made, found)


def test_runs_that_diverge_before_their_first_row_have_spent_nothing(tmp_path):
    made = dataclasses.replace(table_plan(), published={}, columns=(), rounds=20)
    at_once = [Run(seed, DIVERGED, []) for seed in (1, 2)]
    found = {("i.i.d.", "SimFBO"): at_once, ("i.i.d.", "MeFBO"): [run_of(0.1, 0.5, 0.9)]}
    assert spent(at_once) == [0, 0, 0]
    assert spent([*at_once, *found["i.i.d.", "MeFBO"]]) == spent(found["i.i.d.", "MeFBO"])
    assert "| SimFBO | diverged | – | – | 0 | 0 | 0 |" in reproduction_page.table(made, found)
    (tmp_path / "results.csv").write_text(results.to_csv(found))
    assert results.from_csv(tmp_path / "results.csv") == found
    panel_picture.draw(made, found, [tmp_path / "results.svg"], SCREEN)


@pytest.mark.parametrize(
    ("scale", "label"), {"percent": ">stretched towards 100<", "error": ">log scale<", "plain": "accuracy<"}.items()
)
def test_a_picture_says_that_its_scale_is_not_linear(tmp_path, scale, label):
    made = dataclasses.replace(table_plan(), published={}, columns=(), rounds=20, scale=scale)
    panel_picture.draw(made, {("i.i.d.", "MeFBO"): [run_of(0.1, 0.5, 0.9)]}, [tmp_path / "results.svg"], SCREEN)
    assert label in (tmp_path / "results.svg").read_text()


def test_entries_of_a_table_say_how_many_runs_they_are_of():
    made = table_plan()
    assert written(made, Column(at=20), Number(0.5, 0.01, 2, 3)) == "50.00 ± 1.00 (2 of 3 runs)"
    assert written(made, Column(at=20), None) == "diverged"
    assert written(made, Column(reach=0.9), None) == "not reached"
    errors = dataclasses.replace(made, scale="error")
    assert written(errors, Column(at=20), Number(0.9, 0.01, 3, 3)) == "10.00 ± 1.00"


@pytest.mark.slow
def test_the_documented_plan_runs(tmp_path):
    (toml,) = re.findall(r"```toml\n(.*?)```", (tuned.FOLDER.parent / "docs" / "reproductions.md").read_text(), re.S)
    (tmp_path / "mine.toml").write_text(toml)
    command("mine", "--plans", tmp_path, "--tune", "--out", tmp_path / "out")
    assert "two clients in a round: the paper's order." in (tmp_path / "out/results.md").read_text()


def test_unequal_grids_are_refused(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL.replace("gamma = [0.01, 0.03, 0.1, 0.3]", "gamma = [0.01]"))
    with pytest.raises(InputError, match=r"grids have \[1, 4\] cells: give each the same number"):
        read("small", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds = 2", "sseeds = 2"), "unknown entry 'sseeds'; did you mean seeds"),
        (('algorithm = "fedavg"', 'algorithm = "fedavgg"'), "there is no algorithm 'fedavgg'; did you mean fedavg"),
        (('title = "Two methods on quadratics"', ""), "missing required field `title`"),
        (("rounds = 40", "rounds = "), "is not a TOML file"),
        (('scale = "plain"', 'scale = "bar"'), "scale must be one of percent, error, plain"),
        (('[["SimFBO"]', '[["SimFBOO"]'), "there is no method 'SimFBOO'; did you mean SimFBO"),
        (
            ('tuned_as = "few clients"', "grids = { FedAvgg = {} }"),
            "there is no method in all clients 'FedAvgg'; did you mean FedAvg",
        ),
        (("knobs =", "published = { all = {} }\nknobs ="), "there is no panel 'all'"),
        (('tuned_as = "few clients"', 'tuned_as = "few"'), "there is no panel 'few'; choose from: few clients"),
        (
            ('name = "FedAvg"', 'name = "SimFBO+"'),
            r"the methods 'SimFBO' and 'SimFBO\+' would be one folder, SimFBO: rename one",
        ),
        (('name = "FedAvg"', 'name = "simfbo"'), "the methods 'SimFBO' and 'simfbo' would be one folder"),
        (('name = "FedAvg"', 'name = "SimFBO"'), "the methods 'SimFBO' and 'SimFBO' would be one folder"),
        (('name = "all clients"', 'name = "few_clients"'), "the panels 'few clients' and 'few_clients' would be one folder"),
        (('name = "all clients"', 'name = ".."'), r"a panel cannot be called '\.\.': use letters and digits"),
        (('name = "all clients"', 'name = "+"'), r"a panel cannot be called '\+': use letters and digits"),
        (("seeds = 2", 'seeds = "2"'), "small.toml: seeds: Expected `int`, got `str`"),
        (('name = "all clients"', "name = 1"), r"small.toml: panels\[1\].name: Expected `str`, got `int`"),
        (("rounds = 40", "rounds = 0"), "few clients, SimFBO: run: rounds must be a whole number of at least 1"),
        (("gamma = [0.01, 0.03, 0.1, 0.3]", "gamma = [0.01, 0.03, 0.1, -1]"), "gamma must be a number above 0; given: -1"),
        (("clients = 4", "client = 4"), "quadratic has no setting 'client'; did you mean clients"),
        (("knobs =", "columns = [{ at = 50 }]\nknobs ="), "`at` must be from 0 to the plan's rounds, 40; given: 50"),
        (("knobs =", "columns = [{}]\nknobs ="), r"columns\[0\]: give either rounds as `at`, or a finite number as `reach`"),
        (
            ("knobs =", 'columns = [{ at = 20 }, { at = 40 }]\npublished = { "all clients" = { SimFBO = [1.0] } }\nknobs ='),
            "all clients, SimFBO must have a finite number for each of the 2 columns; given: 1.0",
        ),
        (("knobs =", 'quick = { task = "quadratic" }\nknobs ='), "quick: Object missing required field `rounds`"),
        (("knobs =", 'quick = { task = "quadratik", rounds = 5 }\nknobs ='), "there is no task 'quadratik'"),
    ],
)
def test_errors_in_a_plan_are_named(tmp_path, change, message):
    (tmp_path / "small.toml").write_text(SMALL.replace(*change))
    with pytest.raises(InputError, match=message) as caught:
        read("small", tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'small.toml'}") and "\n" not in str(caught.value)


def test_a_metric_that_the_task_does_not_have_is_found_before_the_runs(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL.replace('metric = "x_error"', 'metric = "x_eror"'))
    for arguments in ([], ["--tune"]):
        (tmp_path / "small.tuned.toml").write_text(TUNED)
        with pytest.raises(InputError, match=r"small\.toml: quadratic has no metric 'x_eror'; did you mean x_error"):
            command("small", "--plans", tmp_path, "--out", tmp_path / "out", *arguments)
        assert not (tmp_path / "out").exists()


def test_wrong_commands_are_refused(plans, tmp_path):
    with pytest.raises(InputError, match="there is no table or figure 'mefbo-tabel2'; did you mean mefbo-table2"):
        command("mefbo-tabel2")
    with pytest.raises(InputError, match="leave out --tune and --publish"):
        command("mefbo-table2", "--quick", "--tune")
    with pytest.raises(InputError, match="--settings is for trying values out"):
        command("mefbo-table2", "--settings", plans / "small.toml", "--publish")
    with pytest.raises(InputError, match="small has no reduced size"):
        command("small", "--quick", "--plans", plans)
    with pytest.raises(InputError, match=r"there is no folder .* of plans"):
        command("small", "--plans", tmp_path / "nowhere")
    with pytest.raises(InputError, match="ours has nothing to tune: its values are those of the plan"):
        Study(read("ours"), tmp_path).tune()


def test_the_list_names_all(capsys):
    command("--list")
    shown = capsys.readouterr().out
    assert all(name in shown for name in plan.names())


@pytest.mark.slow
def test_of_a_grid_that_diverges_as_a_whole_the_cell_that_lasts_longest_is_taken(tmp_path):
    (tmp_path / "small.toml").write_text(
        SMALL.replace("gamma_y = [0.3, 100.0]", "gamma_y = [3.0, 1e9]").replace("every = 10", "every = 1")
    )
    study = Study(read("small", tmp_path), tmp_path / "out", plans=tmp_path)
    study.tune()
    entry = study.choice(*study.reproduction.lines()[0])
    assert entry["x_error"] == "diverged" and entry["diverged"] == 4 and entry["values"]["gamma_y"] == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("name", plan.names())
def test_every_reduced_size_runs(name, tmp_path):
    command(name, "--quick", "--out", tmp_path)
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_where_the_paper_counts_communications_its_order_is_looked_for_there():
    """B makes two round trips where A makes one: step for step B is ahead, and in the same round trips A."""
    made = bare_plan("p", {"A": {}, "B": {"trips": 2}}, rounds=40, communications=20, claimed=[["B"], ["A"]])
    found = {("p", "A"): [run_of(9, 8, 7, 6, 4)], ("p", "B"): [run_of(9, 8, 7, 6, 5)]}
    assert doubts(made, made.panels[0], found).wrong == [Pair("B", "A", Column(at=40))]
    assert not doubts(made, made.panels[0], results.as_the_paper_counts(made, found), at=20).wrong
    assert "| A | 4 ± 0 | 7 ± 0 |" in (table := reproduction_page.table(made, found)) and "| B | 5 ± 0 | 5 ± 0 |" in table
    said = reproduction_page.comparison(made, found)
    assert "by the paper's count the paper's order. By round trips not the paper's order: A is not behind B." in said
    for wrong in (dict(communications=None), dict(communications=21), dict(communications=0)):
        with pytest.raises(InputError, match="communications"):
            dataclasses.replace(made, **wrong)


SEARCHED = """
title = "A search"
paper = "nobody's"
task = "quadratic"
metric = "x_error"
scale = "plain"
rounds = 16
every = 8
seeds = 2
knobs = { clients = 3, noise = 0.1 }
search = { candidates = 3, rungs = 1, passes = 1, seeds = 2, reported = 3 }

[[panels]]
name = "p"

[[panels]]
name = "q"
knobs = { noise = 0.2 }
tuned_as = "p"

[[methods]]
name = "FedAvg"
algorithm = "fedavg"
paper = { gamma = 0.2 }
grid = { gamma = [0.01, 0.1] }
box = { gamma = [0.01, 1.0] }

[[methods]]
name = "FedPace"
algorithm = "fedpace"
panels = ["p"]
"""


@pytest.mark.slow
def test_a_search_replaces_the_grids_with_more_seeds_and_the_papers_own_values(tmp_path):
    (tmp_path / "new.toml").write_text(SEARCHED)
    (tmp_path / "new.tuned.toml").write_text(
        '[[chosen]]\npanel = "p"\nmethod = "FedAvg"\ncells = 2\ndiverged = 0\nvalues = { gamma = 0.1 }\n'
    )
    before = read("new", tmp_path)
    assert not before.searched and [m.name for _, m in before.lines()] == ["FedAvg", "FedPace", "FedAvg"]
    command("new", "--tune", "--publish", "--plans", tmp_path, "--out", tmp_path / "out")
    after = read("new", tmp_path)
    found = results.from_csv(tmp_path / "results/new.csv")
    assert {method for _, method in found} == {"FedAvg", "FedPace", "FedAvg, the paper's values"}
    assert all(len(runs) == 3 and min(run.seed for run in runs) >= 2 for runs in found.values())
    chosen = tuned.Tuned.read(tuned.tuned_file("new", tmp_path))
    assert chosen.searched and {(c["panel"], c["method"]) for c in chosen.chosen} == {
        ("p", "FedAvg"),
        ("p", "FedPace"),
        ("q", "FedAvg"),
    }
    assert tuned.tuned_file("new", tmp_path).read_text().count("seeds = [0, 1]\n") == 3
    used = {m.name: Study(after, tmp_path / "out", plans=tmp_path).line(p, m).hyperparameters for p, m in after.lines()}
    assert used["FedAvg, the paper's values"] == {"gamma": 0.2} and used["FedPace"] == {}
    assert "**Of the older tuning**" not in (tmp_path / "RESULTS.md").read_text()


PHOTOGRAPHS = """
title = "A search on data that is not bundled"
paper = "nobody's"
task = "data-cleaning-cifar-10"
metric = "test_accuracy"
rounds = 4
every = 2
seeds = 2
knobs = { clients = 2, train_per_client = 12, validation_per_client = 6, batch_size = 4, model = "mlp", hidden = 3 }
search = { candidates = 3, rungs = 1, passes = 1, seeds = 2, reported = 3 }
panels = [{ name = "p" }]
methods = [{ name = "FedAvg", algorithm = "fedavg" }]
"""


@pytest.mark.slow
def test_a_search_and_its_lines_go_on_where_the_data_is_now(tmp_path):
    (tmp_path / "new.toml").write_text(PHOTOGRAPHS)
    made = read("new", tmp_path)
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    images = np.random.default_rng(0).integers(256, size=(60, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(60) % 10
    arrays = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    np.savez(there / "cifar10-subset.npz", **arrays)
    begun = Study(made, tmp_path / "out", str(there), tmp_path)
    begun.tune()
    begun.run()
    done = {file: file.read_text() for file in (tmp_path / "out").rglob("results.jsonl")}
    assert len(done) == 2
    for file, text in done.items():
        file.write_text("".join(text.splitlines(keepends=True)[:-1]))
    there.rename(here)
    again = Study(made, tmp_path / "out", str(here), tmp_path)
    again.tune()
    again.run()
    assert {file: len(file.read_text().splitlines()) for file in done} == {f: len(t.splitlines()) for f, t in done.items()}


def test_numbers_of_an_older_tuning_are_marked_as_such():
    before = bare_plan("p", {"A": {}}, search=plan.Search())
    found = {("p", "A"): [run_of(9, 8, 7)]}
    assert "`fedbilevel reproduce bare --tune --publish`" in reproduction_page.section(before, found, tuned.FOLDER)
    assert "older tuning" not in reproduction_page.section(before.after_search(), found, tuned.FOLDER)


BEST_ROUND = """
title = "FedBiO on the digits, until its best round"
paper = "nobody's"
task = "data-cleaning"
metric = "test_accuracy"
rounds = 40
every = 5
seeds = 2
knobs = { clients = 4 }

[[panels]]
name = "digits"

[[methods]]
name = "FedBiO"
algorithm = "fedbio"
run = { validation = true }
hyperparameters = { eta = 30.0, gamma = 1.0 }

[[methods]]
name = "FedBiO, best round"
algorithm = "fedbio"
best_round = true
hyperparameters = { eta = 30.0, gamma = 1.0 }
"""


def test_a_line_can_show_the_round_that_a_run_would_end_with(tmp_path):
    (tmp_path / "best.toml").write_text(BEST_ROUND)
    study = Study(read("best", tmp_path), tmp_path / "out", plans=tmp_path)
    study.run()
    found = results.collect(study)
    every, best = (
        [[row.value for row in run.rows] for run in found["digits", name]] for name in ("FedBiO", "FedBiO, best round")
    )
    assert every != best
    for seed, (values, shown) in enumerate(zip(every, best, strict=True), plan.FIRST_SEED):
        options = RunOptions(rounds=40, every=5, seed=seed, keep_best=True)
        described = Configuration.resolve("data-cleaning", {"clients": 4}, "fedbio", {"eta": 30.0, "gamma": 1.0}, options)
        (folder,) = RunFolder.create({tmp_path / f"run-{seed}": described})
        folder.execute(StopRequest(), lambda moment: None)
        result = json.loads((folder.path / "result.json").read_text())
        ended = result["best_round"] // 5
        assert shown[-1] == pytest.approx(result["test_accuracy"]) == values[ended]
        assert set(shown[: ended + 1]) <= set(values[: ended + 1]) and len(set(shown[ended:])) == 1
