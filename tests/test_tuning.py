"""Tuning: rungs as one program, survivors bit for bit as they are without the others, boxes that grow, kills and workers."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path

import echoing
import jax
import numpy as np
import pytest
from killing import kill_after_rows

import fedbilevel as fb
from fedbilevel.errors import FolderTaken, InputError
from fedbilevel.library.tune import create
from fedbilevel.runs import workers as workers_module
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps.batched_runs import DIVERGED, FINISHED, Outcome, continue_together
from fedbilevel.runs.tuning import boxes as boxes_module
from fedbilevel.runs.tuning import folder as tuning_folder
from fedbilevel.runs.tuning.boxes import around, at_edges, drawn
from fedbilevel.runs.tuning.folder import TuningFolder
from fedbilevel.runs.tuning.found import Found, Pass, Result, Run
from fedbilevel.runs.tuning.tuning import BOUNDS, Tuning
from fedbilevel.runs.workers import Processes, RayCluster
from fedbilevel.runs.workers import workers as workers_of

KNOBS = {"clients": 3, "x_dimension": 2, "y_dimension": 2, "noise": 0.1}
KNOB_WORDS = [word for name, value in KNOBS.items() for word in ("--knob", f"{name}={value}")]
BUDGET_WORDS = ["--rounds", "64", "--candidates", "8", "--rungs", "2", "--seeds", "2"]
OPTIONS = RunOptions(rounds=32, every=32)
MARK = f"{os.getpid()}-{time.time()}"  # in the environment of a cluster's workers


def prepared(algorithm="simfbo", boxes=(), options=OPTIONS, hyperparameters=(), fixed=(), **changes):
    budget = dict(candidates=8, rungs=2, keep=4, passes=1, seeds=2) | changes
    given = dict(hyperparameters)
    return Tuning.prepared("quadratic", KNOBS, algorithm, given, dict(boxes), options, fixed=fixed, **budget)[0]


def stored(folder):
    return [json.loads(line) for line in (Path(folder) / "results.jsonl").read_text().splitlines()]


def without_time(results):
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in line["rows"]] for line in results]
    return [{**line, "rows": kept, "seconds": 0} for line, kept in zip(results, rows, strict=True)]


def experiments(algorithm, seeds, rounds, **knobs):
    options = RunOptions(rounds=rounds, every=20)
    resolved = [
        Configuration.resolve("quadratic", {**KNOBS, **knobs}, algorithm, {}, dataclasses.replace(options, seed=s))
        for s in seeds
    ]
    return [configuration.experiment() for configuration in resolved]


@pytest.mark.parametrize("algorithm", ["simfbo", pytest.param("fedmbo", marks=pytest.mark.slow)])  # with rounds by chance
def test_survivors_in_a_smaller_batch_are_bit_for_bit_as_without_the_others(algorithm):
    kept = [1, 5, 6]
    below = continue_together(experiments(algorithm, range(12), 40), [None] * 12)
    starts = [*(below[k].at for k in kept), None]  # and one that begins with them
    ours = continue_together(experiments(algorithm, [*kept, 20], 100), starts)
    theirs = continue_together(experiments(algorithm, [*kept, 20], 100), [None] * 4)
    for one, other in zip(ours, theirs, strict=True):
        assert one.at.totals == other.at.totals and one.at.step == other.at.step > 0
        for a, b in zip(*(jax.tree.leaves(ended.at.state) for ended in (one, other)), strict=True):
            np.testing.assert_array_equal(a, b)
        last, expected = ({k: v for k, v in e.outcome.rows[-1].items() if k != "seconds"} for e in (one, other))
        assert last == expected
    assert [e.outcome.rows[0]["step"] > 0 for e in ours] == [True, True, True, False]


def test_candidates_fill_the_boxes_evenly_in_logarithms():
    boxes = {"a": [1e-3, 10.0], "b": [2.0, 5.0]}
    for seed in range(5):
        for name, (low, high) in boxes.items():
            places = [np.log(c[name] / low) / np.log(high / low) for c in drawn(boxes, 16, seed)]
            assert sorted(np.clip(np.floor(np.asarray(places) * 16), 0, 15)) == list(range(16))


def test_boxes_come_from_the_fields_and_are_overridden_by_name():
    steps = {"gamma_x+eta_x": 0.02, "gamma_y+eta_y": 0.5, "gamma_u+eta_u": 0.5}
    assert prepared().boxes == {name: pytest.approx([step / 100, step * 100]) for name, step in steps.items()}
    given = prepared(boxes={"gamma_x": ["0.1", "0.3"]}, hyperparameters={"gamma_y": 1, "eta_u": 2}, fixed=["gamma_y"]).boxes
    assert given == {"gamma_x+eta_x": [0.1, 0.3], "gamma_u+eta_u": pytest.approx([5e-3, 50])}
    assert [*prepared("fedmbo", options=RunOptions(rounds=200)).boxes] == ["alpha", "beta", "smoothness"]
    measured = prepared("fedpace")
    assert measured.boxes == {} and (measured.candidates, measured.passes) == (1, 1)


def test_a_box_reaches_no_value_that_its_field_refuses(monkeypatch):
    rho = fb.real(0.5, "ρ", above=0, most=1, decades=4).metadata["setting"]
    low, high = (boxes_module.reach(rho, 0.5, sign * 2) for sign in (-1, 1))
    assert low == pytest.approx(0.005) and 0.6 < high <= 1
    monkeypatch.setattr(boxes_module, "settings", lambda cls: {"rho": rho})
    assert around({"rho": [0.01, 1.0]}, {"rho": 0.9}, "fedmsa")["rho"] == pytest.approx([0.9 / 100**0.25, 1.0])


def test_boxes_grow_beyond_an_end_that_the_best_is_near():
    old = {"gamma_x": [1e-3, 10.0]}
    inside, outside = (around(old, {"gamma_x": center}, "simfbo")["gamma_x"] for center in (0.1, 9.0))
    assert inside == pytest.approx([0.01, 1.0]) and outside == pytest.approx([0.9, 90.0])
    assert at_edges([old], {"gamma_x": 9.0}) == ["gamma_x"]
    assert at_edges([old, {"gamma_x": outside}], {"gamma_x": 9.0}) == at_edges([old], {"gamma_x": 0.1}) == []


@pytest.mark.parametrize("center", [1.0, 1e-3])
def test_boxes_never_lose_their_width(center):
    boxes = {"rho": [1e-3, 1.0]}
    for _ in range(200):
        boxes = around(boxes, {"rho": center}, "fedmsa")
        assert 0 < boxes["rho"][0] < boxes["rho"][1] <= 1


def test_who_goes_on_is_the_best_that_have_not_diverged():
    tuning = prepared(candidates=8, rungs=3, keep=2)
    numbers = [3.0, 1.0, None, 2.0, 9.0, 0.5, 0.1, 7.0]

    def result(number):
        return Result(Outcome([{"upper_loss": number}], DIVERGED if number == 0.1 else FINISHED), 1.0)

    results = {Run(0, 0, k, 0): result(number) for k, number in enumerate(numbers)}
    found = Found(tuning, [Pass(tuning.boxes, drawn(tuning.boxes, 8, 0))], results)
    assert found.survivors(0, 0, range(8)) == [0, 1, 3, 5]
    assert found.survivors(0, 0, [2, 6, 4]) == [4] and found.best() is None


def test_a_tuning_climbs_rungs_with_the_runs_that_each_candidate_has_alone(tmp_path):
    tuning = prepared(passes=2)
    folder = TuningFolder.create(tmp_path / "t", tuning)
    seen = []
    folder.execute(observe=lambda done, of, word: seen.append((done, of)))
    found = folder.conclude()
    assert [len(one.candidates) for one in found.passes] == [8, 8]
    assert found.passes[0].candidates[0] == {"gamma_x+eta_x": 0.02, "gamma_y+eta_y": 0.5, "gamma_u+eta_u": 0.5}
    for search in range(2):
        first = [found.cells(search, k)[0].mean("upper_loss") for k in range(8)]
        climbed = [k for k in range(8) if len(found.cells(search, k)) == 2]
        assert climbed == sorted(np.argsort(first)[:2])  # NaN comes last
        for k in climbed:
            for seed, outcome in enumerate(found.cells(search, k)[1].outcomes):
                alone = tuning.configuration(found.passes[search].candidates[k], seed, 1).experiment()
                *_, last = (moment.row() for moment in alone.run())
                np.testing.assert_allclose(outcome.rows[-1]["x_error"], last["x_error"], rtol=1e-9)
    best = found.best()
    assert best.mean("upper_loss") == min(cell.mean("upper_loss") for cell in found.finalists())
    total = 2 * tuning.pass_rounds()
    dones = [done for done, _ in seen]
    assert dones == sorted(dones) and seen[-1] == (total, total) and tuning.pass_rounds() == 8 * 8 + 2 * 24 + 2 * 32
    lengths = {Run(r["search"], r["rung"], r["candidate"], r["seed"]): r["rows"][-1]["rounds"] for r in stored(folder.path)}
    if not any(cell.diverged for c in found.climbed() for cell in c.rungs):
        climbs = [(run, n - (0 if run.seed else lengths.get(run._replace(rung=run.rung - 1), 0))) for run, n in lengths.items()]
        assert sum(n for _, n in climbs) == total
    assert not (folder.path / "states").exists() and len((folder.path / "candidates.csv").read_text().splitlines()) == 17


@pytest.mark.slow
def test_the_search_leaves_a_box_that_lies_beside_the_good_values(tmp_path):
    steps = dict(gamma_y=0.5, gamma_u=0.5)
    tuning = prepared(boxes={"gamma_x": (1e-4, 1e-3)}, hyperparameters=steps, fixed=steps, passes=4)
    folder = TuningFolder.create(tmp_path / "t", tuning)
    folder.execute()
    found = folder.found()
    first = dataclasses.replace(found, passes=found.passes[:1])
    assert 1e-4 <= first.chosen()["gamma_x"] <= 1e-3 < found.passes[1].boxes["gamma_x+eta_x"][1]
    assert found.chosen()["gamma_x"] > 1e-3 and found.best().mean("upper_loss") < first.best().mean("upper_loss")


def test_further_passes_are_made_only_while_the_best_is_at_an_end(tmp_path, monkeypatch):
    tuning = prepared(passes=1, more=3, rungs=1, seeds=1, candidates=4)
    asked = []

    def edges(found):
        asked.append(len(found.passes))
        return ["gamma_x+eta_x"] if len(found.passes) < 3 else []

    monkeypatch.setattr(Found, "edges", edges)
    folder = TuningFolder.create(tmp_path / "t", tuning)
    folder.execute()
    assert asked == [1, 2, 3] and len(folder.passes()) == 3
    monkeypatch.setattr(Found, "edges", lambda found: ["gamma_x+eta_x"])
    folder = TuningFolder.create(tmp_path / "u", dataclasses.replace(tuning, passes=2))
    folder.execute()
    widths = [np.log10(high / low) for low, high in (one.boxes["gamma_x+eta_x"] for one in folder.passes())]
    assert widths == pytest.approx([4, 2, 2, 2, 2])


def test_only_the_states_of_those_that_may_go_on_are_written(tmp_path, monkeypatch):
    folder, written = TuningFolder.create(tmp_path / "t", prepared()), []
    real = tuning_folder.write_atomically
    monkeypatch.setattr(tuning_folder, "write_atomically", lambda path, data: (written.append(path), real(path, data)))
    folder.execute()
    states = [path for path in written if path.parent.name == "states"]
    assert len(states) == 2 and all(_climbs(folder, state) for state in states)


def test_where_all_diverge_the_next_pass_takes_smaller_steps(tmp_path):
    tuning = prepared(boxes={"gamma_y": (1e8, 1e9)}, passes=2, rungs=1, seeds=1)
    folder = TuningFolder.create(tmp_path / "t", tuning)
    folder.execute()
    found = folder.conclude()
    assert found.best() is None and "all of 16 candidates diverged" in found.summary() and found.chosen() == {}
    assert found.passes[1].boxes["gamma_y+eta_y"][0] < 1e8 and not (tmp_path / "t/best.toml").exists()
    assert [len(one.candidates) for one in found.passes] == [8, 8]


def test_a_state_that_is_damaged_is_removed_and_its_run_made_from_the_start(tmp_path):
    folder, whole = (TuningFolder.create(tmp_path / name, prepared()) for name in ("t", "whole"))

    def stop(done, of, word):
        if "rung 2" in word:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.execute(observe=stop)
    state = next(path for path in sorted((folder.path / "states").iterdir()) if _climbs(folder, path))
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(InputError, match="is truncated or damaged: remove it to start this run over") as refused:
        folder.execute()
    assert str(refused.value).count(str(state)) == 1
    state.unlink()
    folder.execute()
    whole.execute()
    ours, theirs = (folder.found().best() for folder in (folder, whole))
    assert ours.values == theirs.values and ours.mean("upper_loss") == pytest.approx(theirs.mean("upper_loss"), rel=1e-9)


def _climbs(folder, state):
    search, rung, candidate = map(int, state.name.split("-"))
    return candidate in folder.found().survivors(search, rung, range(8))


@pytest.mark.parametrize("ends", [[1.0], [2.0, 1.0], [0.0, 1.0], [1.0, 1.0], [1.0, 2.0, 3.0]])
def test_a_box_in_a_touched_file_has_two_ends(ends, tmp_path):
    folder = TuningFolder.create(tmp_path, prepared("fedavg"))
    (tmp_path / "passes.jsonl").write_text(json.dumps({"boxes": {"gamma": ends}, "candidates": [{"gamma": 1.0}]}) + "\n")
    said = r"the box of gamma must be two finite numbers, 0 < low < high; given: \["
    with pytest.raises(InputError, match=f"passes.jsonl, line 1: {said}"):
        folder.found()
    touched = json.loads((tmp_path / "tuning.json").read_text())
    (tmp_path / "tuning.json").write_text(json.dumps({**touched, "boxes": {"gamma": ends}}))
    with pytest.raises(InputError, match=f"tuning.json: {said}"):
        folder.found()


def test_a_candidate_in_a_touched_file_is_above_0(tmp_path):
    folder = TuningFolder.create(tmp_path, prepared("fedavg"))
    (tmp_path / "passes.jsonl").write_text('{"boxes": {"gamma": [0.1, 1]}, "candidates": [{"gamma": 0}]}\n')
    with pytest.raises(InputError, match="line 1: a candidate's gamma must be a finite number above 0; given: 0"):
        folder.found()


def test_a_folder_holds_tunings_on_one_problem(tmp_path):
    first, other = prepared(), prepared("fedavg")
    create(tmp_path, [first])
    for changed in ({"task": "valley"}, {"knobs": {**KNOBS, "clients": 4}}, {"data": "elsewhere"}):
        with pytest.raises(FolderTaken, match="simfbo holds a tuning of another task or other knobs: choose another folder"):
            create(tmp_path, [dataclasses.replace(other, **changed)], force=True)
    assert not (tmp_path / "fedavg").exists()
    create(tmp_path, [other])
    assert [folder.path.name for folder in TuningFolder.find(tmp_path)] == ["fedavg", "simfbo"]
    with pytest.raises(FolderTaken, match="already holds something else"):
        create(tmp_path / "simfbo", [other])
    (tmp_path / "runs" / "fedpace").mkdir(parents=True)
    (tmp_path / "runs" / "fedpace" / "config.json").write_text("{}")
    with pytest.raises(FolderTaken, match=r"fedpace already holds something else \(config.json\)"):
        create(tmp_path / "runs", [other])


def test_runs_and_tunings_do_not_share_a_folder(run, tmp_path):
    create(tmp_path / "tuned", [prepared()])
    code, _, err = run("run", "quadratic", "fedavg", *KNOB_WORDS, "--rounds", 5, "--out", "tuned")
    assert code == 2 and "tuned/simfbo already holds something else (tuning.json): choose another folder" in err


def test_the_best_of_a_tuning_goes_when_it_is_replaced(tmp_path):
    for folder in (tmp_path, tmp_path / "fedavg"):
        folder.mkdir(exist_ok=True)
        (folder / "best.toml").write_text("task = 'quadratic'\n")
    create(tmp_path, [prepared("fedavg")])
    assert not list(tmp_path.rglob("best.toml"))


def test_a_second_tuning_in_a_folder_keeps_the_best_of_the_first(tmp_path):
    how = dict(knobs=KNOBS, rounds=4, candidates=2, rungs=1, passes=1, seeds=1, out=tmp_path)
    best = {**fb.tune("quadratic", "fedavg", **how).best, **fb.tune("quadratic", "fedbio", **how).best}
    create(tmp_path, [prepared("simfbo")])  # which has found nothing yet
    fb.tune("quadratic", "fedbio", **how)
    written = tomllib.loads((tmp_path / "best.toml").read_text())
    assert {*best} == {"fedavg", "fedbio"} and written["hyperparameters"] == best


@pytest.mark.slow
def test_where_all_diverge_no_best_is_named(run, tmp_path):
    (tmp_path / "best.toml").write_text("task = 'quadratic'\n")
    code, out, _ = run(
        *["tune", "quadratic", "fedavg", *KNOB_WORDS, "--box", "gamma=1e8:1e9", *BUDGET_WORDS, "--out", tmp_path]
    )
    assert code == 0 and "all of 16 candidates diverged" in out and "best:" not in out
    assert not list(tmp_path.rglob("best.toml"))


def test_an_algorithm_is_tuned_once():
    with pytest.raises(InputError, match="an algorithm is named twice in simfbo simfbo: name each once"):
        fb.tune("quadratic", [fb.SimFBO(gamma_x=0.1), fb.SimFBO(gamma_x=0.2)])


def test_a_budget_in_seconds_ends_with_the_last_pass_that_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(Found, "seconds", lambda self, passes: 10.0 * passes)
    folder = TuningFolder.create(tmp_path / "t", prepared(seconds=35.0, candidates=1, rungs=1, seeds=1))
    folder.execute()
    assert len(folder.passes()) == 3


@pytest.mark.parametrize("candidates", [1, 8])  # a run alone, and a program
def test_runs_that_diverge_take_their_share_of_the_seconds(candidates, tmp_path):
    tuning = prepared(boxes={"gamma_y": (1e8, 1e9)}, candidates=candidates, rungs=1, seeds=1)
    folder = TuningFolder.create(tmp_path / "t", tuning)
    folder.execute()
    assert {line["status"] for line in stored(folder.path)} == {DIVERGED}
    seconds = [line["seconds"] for line in stored(folder.path)]
    assert min(seconds) > 0 and folder.found().seconds(1) == sum(seconds) and folder.found().seconds(0) == 0


def test_a_budget_in_seconds_ends_where_no_candidate_takes_a_step(tmp_path):
    options = dataclasses.replace(OPTIONS, loss_bound=1e-9)  # which the first loss exceeds
    folder = TuningFolder.create(tmp_path / "t", prepared(seconds=1e6, rungs=1, options=options))
    folder.execute()
    assert len(folder.passes()) == 1 and folder.found().seconds(1) == 0


def test_a_budget_in_seconds_ends_with_the_most_passes(tmp_path, monkeypatch):
    monkeypatch.setitem(BOUNDS, "passes", (1, 2))
    folder = TuningFolder.create(tmp_path / "t", prepared(seconds=1e6, candidates=1, rungs=1, seeds=1))
    folder.execute()
    assert len(folder.passes()) == 2


@pytest.mark.slow
def test_several_algorithms_leave_one_file_of_settings_that_run_reads(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["tune", "quadratic", "simfbo", "fedavg", *KNOB_WORDS, *BUDGET_WORDS, "--passes", 1, "--out", "t"]
    code, out, _ = run(*words, "--box", "simfbo.gamma_x=0.01:0.1")
    assert code == 0 and "note: ranked by upper_loss, since x_error is not a mean over rows" in out
    (line,) = [line for line in out.splitlines() if line.startswith("best: fedbilevel ")]
    assert run(*shlex.split(line.removeprefix("best: fedbilevel ")), "--rounds", 5, "--out", "r")[0] == 0
    best = fb.resume("t").best  # which repeats nothing
    for name in ("simfbo", "fedavg"):
        used = json.loads(Path(f"r/{name}/config.json").read_text())["configuration"]["hyperparameters"]
        assert best[name].items() <= used.items()
    assert 0.01 <= best["simfbo"]["gamma_x"] <= 0.1
    assert Path("t/simfbo/tuning.png").exists() and fb.write_report("t").exists()
    again = run(*words)
    assert again[0] == 2 and "holds another tuning" in again[2]


@pytest.mark.slow
def test_a_result_is_shown_and_tabulated(tmp_path):
    result = fb.tune("quadratic", ["fedavg"], knobs=KNOBS, rounds=8, candidates=4, rungs=2, passes=1, seeds=1)
    assert re.fullmatch(r"<TuneResult: fedavg on quadratic: the best of 4 candidates has upper_loss .*>", repr(result))
    assert [row["rounds"] for row in result.table].count(8) == 1 and {row["algorithm"] for row in result.table} == {"fedavg"}
    assert result._repr_html_().count("<img") == 1 and len(result.plot().axes) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(boxes={"gama_x": (1, 2)}), "simfbo has no hyperparameter 'gama_x'; did you mean gamma_x"),
        (dict(boxes={"local_steps": (1, 2)}), "local_steps cannot have a box, since it is not a real number: sweep it instead"),
        (dict(boxes={"gamma_x": (2, 1)}), "the box of gamma_x must be LOW:HIGH with 0 < LOW < HIGH; given: 2:1"),
        (dict(boxes={"gamma_x": (1,)}), "the box of gamma_x must be LOW:HIGH"),
        (dict(boxes={"gamma_x": (1, 2)}, fixed=["gamma_x"]), "gamma_x has a box and a value: leave one out"),
        (dict(keep=1), "keep must be a whole number from 2"),
        (dict(seconds=-1.0), "seconds must be a number above 0"),
        (dict(rungs=3, keep=4, options=RunOptions(rounds=15)), "15 rounds are too few for 3 rungs"),
        (dict(seconds=float("inf")), "seconds must be a number above 0"),
        (dict(options=RunOptions(steps=9)), "the budget of a tuning is in rounds"),
        (dict(algorithm="fedmbo", rungs=3, options=RunOptions(rounds=20)), "rounds are too few for FedMBO"),
        (dict(by="test_los"), "there is no metric 'test_los' to rank by"),
        (dict(options=RunOptions(rounds=32, privacy="rows(epsilon=8)")), "epsilon is that of one run"),
        (
            dict(options=RunOptions(rounds=32, aggregate="buffered(first=2)")),
            "buffered: late answers are simulated for one run",
        ),
        (dict(options=RunOptions(rounds=32, aggregate="private-mean(epsilon=8)")), "epsilon is that of one run"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(changes, said):
    with pytest.raises(InputError, match=said):
        prepared(**changes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(algorithms=None), "algorithms must be a name, an algorithm, or a list of these; given: None"),
        (dict(algorithms=[]), "algorithms must be at least one algorithm"),
        (dict(boxes={"gamma_x": "12"}), "the box of gamma_x must be LOW:HIGH with 0 < LOW < HIGH; given: '12'"),
        (dict(boxes={"gamma_x": 0.1}), "the box of gamma_x must be LOW:HIGH with 0 < LOW < HIGH; given: 0.1"),
        (dict(boxes=[("gamma_x", (1, 2))]), "boxes must be a dictionary"),
        (dict(candidates="8"), "candidates must be a whole number from 1"),
        (dict(seeds=True), "seeds must be a whole number from 1"),
        (dict(seconds="5"), "seconds must be a number above 0; given: '5'"),
        (dict(processes=2.5), "processes must be a whole number from 1"),
        (dict(processes=0), "processes must be a whole number from 1"),
    ],
)
def test_what_cannot_be_given_in_python_is_refused_in_one_line_and_leaves_no_folder(tmp_path, given, said):
    how = dict(algorithms="simfbo", knobs=KNOBS, rounds=4, candidates=1, rungs=1, passes=1, seeds=1) | given
    with pytest.raises(InputError, match=said):
        fb.tune("quadratic", **how, out=tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


def test_numbers_of_numpy_are_numbers():
    budget = dict(rounds=4, candidates=1, rungs=1, keep=4, passes=1, seeds=1, processes=1)
    given = {name: np.int64(value) for name, value in budget.items()}
    result = fb.tune(
        "quadratic", ["fedavg"], knobs={**KNOBS, "clients": np.int64(3)}, boxes={"gamma": np.array([0.1, 1])}, **given
    )
    assert result.tuned[0].tuning.plain()["knobs"]["clients"] == 3 and result.best["fedavg"]


def test_a_problem_that_no_file_describes_is_tuned_here_alone(tmp_path):
    task = fb.Task.of(
        lambda x, y, rows: ((y - rows) ** 2).mean() + (x**2).sum(),
        lambda x, y, rows: ((y - x - rows) ** 2).mean(),
        np.ones(1),
        np.zeros(1),
        lower=[np.arange(9.0)[:, None], np.ones((12, 1))],
    )
    given = dict(rounds=8, candidates=4, rungs=2, passes=1, seeds=1, out=tmp_path / "t")
    result = fb.tune(task, fb.SimFBO(gamma_x=0.1), **given)
    assert result.best["simfbo"] and "0.1" in (tmp_path / "t/simfbo/passes.jsonl").read_text()
    with pytest.raises(InputError, match="no file describes what this one runs: choose another folder"):
        fb.tune(task, "simfbo", **given)
    with pytest.raises(InputError, match="so other processes cannot run it: declare it in a file"):
        fb.tune(task, "simfbo", **given, processes=2)


@pytest.mark.slow
def test_a_killed_tuning_is_resumed_with_the_same_numbers(tmp_path):
    words = [sys.executable, "-m", "fedbilevel"]
    command = [*words, "tune", "quadratic", "simfbo", *KNOB_WORDS, *BUDGET_WORDS, "--out"]
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    kill_after_rows([*command, tmp_path / "killed"], tmp_path / "killed/simfbo/results.jsonl", env=environment)
    before = stored(tmp_path / "killed/simfbo")
    assert {line["search"] for line in before} == {0}
    fb.resume(tmp_path / "killed")
    whole = TuningFolder.create(tmp_path / "whole", TuningFolder(tmp_path / "killed/simfbo").described)
    whole.execute()
    ours, theirs = (without_time(stored(path)) for path in (tmp_path / "killed/simfbo", whole.path))
    assert ours == theirs and ours[: len(before)] == without_time(before)


def spread(tmp_path, workers, kill):
    """A tuning whose batches others make, of whom one is killed meanwhile; and the same one here."""
    tuning = prepared(candidates=12, passes=1, rungs=2, options=RunOptions(rounds=4000, every=4000))
    folder, here = (TuningFolder.create(tmp_path / name, tuning) for name in ("spread", "here"))
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        folder.execute(workers)
    finally:
        killer.join()
        workers.close()
    here.execute()
    key = lambda line: [line[name] for name in ("search", "rung", "candidate", "seed")]  # noqa: E731
    ours, theirs = (sorted(without_time(stored(f.path)), key=key) for f in (folder, here))
    assert [key(line) for line in ours] == [key(line) for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one["status"] == other["status"]
        if one["status"] == FINISHED:
            np.testing.assert_allclose(one["rows"][-1]["upper_loss"], other["rows"][-1]["upper_loss"], rtol=1e-9)


@pytest.mark.parametrize("noticed", [True, False])  # that it is dead, before a batch is sent to it
def test_a_process_that_dies_while_it_is_idle_is_replaced(noticed, monkeypatch):
    monkeypatch.setattr(workers_module, "serve", echoing.serve)
    workers = Processes(1)
    try:
        assert list(workers.do(["a"], lambda number, rounds: None)) == [(0, ["a"])]
        dead = workers.started[0].process
        os.kill(dead.pid, signal.SIGKILL)
        dead.join()
        if not noticed:
            monkeypatch.setattr(dead, "is_alive", lambda: True)
        assert list(workers.do(["b", "c"], lambda number, rounds: None)) == [(0, ["b"]), (1, ["c"])]
        assert workers.started[0].process is not dead
    finally:
        workers.close()


@pytest.mark.slow
def test_processes_that_die_have_their_batch_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    workers, killed = Processes(2), []

    def kill():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not killed:
            for started in list(workers.started.values())[:1]:
                time.sleep(4)  # it has begun with its batch
                killed.append(started.process.pid)
                os.kill(started.process.pid, signal.SIGKILL)
            time.sleep(0.05)

    spread(tmp_path, workers, kill)
    assert len(killed) == 1


@pytest.fixture
def cluster(monkeypatch):
    """The address of a Ray cluster of two workers on this machine."""
    pytest.importorskip("ray")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("OF_THIS_TEST", MARK)
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="ray-") as place:  # sockets' paths must be short
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        here = ["--node-ip-address=127.0.0.1", f"--port={address.split(':')[1]}", f"--temp-dir={place}"]
        quiet = ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", "--block"]
        command = [Path(sys.executable).parent / "ray", "start", "--head", *here, *quiet]
        head = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield address
        head.send_signal(signal.SIGTERM)
        head.wait(60)


def connected(address):
    for _ in range(20):
        with contextlib.suppress(InputError):
            return RayCluster(address)
        time.sleep(1)
    raise AssertionError("the cluster has not come up")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")  # Ray's own
def test_a_ray_cluster_makes_the_batch_of_a_dead_worker_again(tmp_path, cluster):
    workers, killed = connected(cluster), []
    assert workers.count == 2

    def kill():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not killed:
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    ours = f"OF_THIS_TEST={MARK}".encode() in (process / "environ").read_bytes()
                    if ours and (process / "cmdline").read_bytes().startswith(b"ray::do_at_worker"):
                        time.sleep(4)  # it has begun with its batch
                        killed.append(int(process.name))
                        os.kill(killed[0], signal.SIGKILL)
                        return
            time.sleep(0.1)

    spread(tmp_path, workers, kill)
    assert len(killed) == 1


def test_an_address_without_a_ray_cluster_is_one_line(monkeypatch):
    with pytest.raises(InputError, match="either processes on this machine or the address of a Ray cluster, not both"):  # noqa: SIM117
        with workers_of(processes=2, ray="127.0.0.1:1"):
            pass
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"--ray needs Ray, which is not installed: pip install 'fedbilevel\[ray\]'"):
        RayCluster("127.0.0.1:1")
