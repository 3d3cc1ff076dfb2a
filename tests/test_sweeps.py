"""Sweeps: many runs as one program, each as it is alone; results that survive an interruption."""

import csv
import re
import shlex

import jax
import numpy as np
import pytest

from fedbilevel.command import main
from fedbilevel.command.options import Settings
from fedbilevel.engines.engine import Stretch
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import Diverged, InputError
from fedbilevel.report.grid_picture import heat_map
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps import batched_runs, programs
from fedbilevel.runs.sweeps import folder as folder_module
from fedbilevel.runs.sweeps.batched_runs import DIVERGED, FINISHED, Outcome, run_together
from fedbilevel.runs.sweeps.cell import Cell
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep


def experiments(task, algorithm, cells, seeds, rounds=60, **knobs):
    return [
        Configuration.resolve(
            task, knobs, algorithm, cell, RunOptions(rounds=rounds, every=20, seed=seed, clients_per_round=3)
        ).experiment()
        for cell in cells
        for seed in seeds
    ]


def alone(experiment):
    try:
        return [moment.row() for moment in experiment.run() if moment.metrics is not None]
    except Diverged as error:
        return str(error)


@pytest.mark.parametrize(
    ("algorithm", "cells", "knobs"),
    [
        pytest.param(  # a random number of rounds in a step
            "fedmbo", [dict(alpha=0.05), dict(alpha=0.1), dict(beta=0.2)], {}, marks=pytest.mark.slow
        ),
        ("fedbio-local", [dict(eta=0.01), dict(eta=0.05)], dict(lower_level="local")),  # values kept at clients
        pytest.param("fedbioacc", [dict(eta=0.1), dict(gamma=0.7)], {}, marks=pytest.mark.slow),  # rounds to start with
    ],
)
def test_runs_together_are_as_they_are_alone(algorithm, cells, knobs):
    many = experiments("quadratic", algorithm, cells, (0, 1), noise=0.1, **knobs)
    for experiment, outcome in zip(many, run_together(many), strict=True):
        expected = alone(experiment)
        assert outcome.status == "finished" and len(outcome.rows) == len(expected)
        for ours, theirs in zip(outcome.rows, expected, strict=True):
            for name in theirs.keys() - {"seconds"}:
                np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, err_msg=name)


def test_one_that_diverges_is_marked_and_the_others_go_on():
    cells = [dict(gamma_y=0.5), dict(gamma_y=50.0, gamma_x=50.0), dict(gamma_y=0.1)]
    many = experiments("quadratic", "simfbo", cells, (0,), rounds=400)
    fine, bad, slow = run_together(many)
    assert (fine.status, bad.status, slow.status) == ("finished", "diverged", "finished")
    assert "SimFBO diverged at round" in bad.reason and "gamma_y = 50" in bad.reason
    assert fine.rows[-1]["rounds"] == slow.rows[-1]["rounds"] == 400 and bad.rows[-1]["rounds"] < 400
    np.testing.assert_allclose(fine.rows[-1]["x_error"], alone(many[0])[-1]["x_error"], rtol=1e-9)
    assert "diverged" in alone(many[1])


@pytest.mark.slow
def test_large_runs_on_a_cpu_are_made_one_after_another_with_the_same_numbers(tmp_path, monkeypatch):
    together = SweepFolder.create(tmp_path / "together", small())
    together.execute()
    made = []
    monkeypatch.setattr(programs, "LARGE", 0)
    monkeypatch.setattr(folder_module, "run_together", lambda e, observe: made.append(len(e)) or run_together(e, observe))
    alone = SweepFolder.create(tmp_path / "alone", small())
    alone.execute()
    assert made == [1] * 16
    for ours, theirs in zip(alone.cells(), together.cells(), strict=True):
        assert ours.values == theirs.values
        np.testing.assert_allclose(ours.last("x_error"), theirs.last("x_error"), rtol=1e-9)


def exhausted(size=1):
    return jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {size}GiB")


def test_what_does_not_fit_into_a_devices_memory_is_run_in_halves(monkeypatch):
    many = experiments("quadratic", "simfbo", [dict(gamma_x=0.01 * k) for k in range(1, 8)], (0,), rounds=20)
    together, made = run_together(many), []
    in_programs = batched_runs.in_programs

    def small(experiments, starts, observe):
        made.append(len(experiments))
        if len(experiments) > 2:
            raise exhausted(len(experiments))
        return in_programs(experiments, starts, observe)

    monkeypatch.setattr(batched_runs, "in_programs", small)
    told = []
    for ours, theirs in zip(run_together(many, told.append), together, strict=True):
        assert ours.status == "finished"
        np.testing.assert_allclose(ours.rows[-1]["x_error"], theirs.rows[-1]["x_error"], rtol=1e-9)
    assert made == [7, 3, 1, 2, 4, 2, 2] and told == sorted(told) and 0 < told[-1] <= 20


@pytest.mark.parametrize(("count", "where", "what"), [(1, SimulatedEngine, "advance"), (3, batched_runs, "in_programs")])
def test_errors_that_are_no_lack_of_memory_stay_as_they_are(count, where, what, monkeypatch):
    def broken(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(where, what, broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        run_together(experiments("quadratic", "simfbo", [dict(gamma_x=0.01 * k) for k in range(1, count + 1)], (0,)))


def test_a_run_that_does_not_fit_alone_says_what_to_do(monkeypatch):
    class Late:
        """What becomes known only when it is looked at."""

        def __int__(self):
            raise exhausted(7)

    monkeypatch.setattr(SimulatedEngine, "advance", lambda self, *arguments: Stretch(None, Late(), *[None] * 4))
    with pytest.raises(InputError, match=r"SimFBO needs more memory here than the device has: .*chunk_size.* 7GiB"):
        run_together(experiments("quadratic", "simfbo", [{}], (0,)))


def test_what_cannot_run_together_is_refused():
    a, b = (experiments("quadratic", "fedbio", [dict(local_steps=n)], (0,))[0] for n in (1, 2))
    with pytest.raises(InputError, match="may differ only in their algorithm's real numbers and their seeds"):
        run_together([a, b])


def small(**changes):
    given = dict(
        task="quadratic",
        knobs={"noise": 0.1, "clients": 4},
        algorithm="simfbo",
        hyperparameters={},
        grid={"gamma_x": [0.01, 0.03], "gamma_y": [0.1, 0.3], "local_steps": [1, 2]},
        seeds=2,
        options=RunOptions(rounds=40, every=20),
    )
    return Sweep(**{**given, **changes})


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    folder = SweepFolder.create(tmp_path / "a", small())
    ran = []

    def counted(experiments, observe):
        ran.append(len(experiments))
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run_together(experiments, observe)

    monkeypatch.setattr(folder_module, "run_together", counted)
    with pytest.raises(KeyboardInterrupt):
        folder.execute()
    assert ran == [8, 8] and len(folder.cells()) == 4  # a program for each number of local steps
    with (tmp_path / "a" / "results.jsonl").open("a") as file:
        file.write('{"cell": {"gamma_x": 0.0')  # a line that a kill cut off
    SweepFolder.create(tmp_path / "a", small()).execute()
    assert ran == [8, 8, 8] and len(folder.cells()) == 8

    whole = SweepFolder.create(tmp_path / "b", small())
    whole.execute()
    for ours, theirs in zip(folder.cells(), whole.cells(), strict=True):
        assert ours.values == theirs.values and ours.last("x_error") == theirs.last("x_error")
    with pytest.raises(InputError, match=r"holds another sweep: choose another folder$"):
        SweepFolder.create(tmp_path / "a", small(seeds=3))
    SweepFolder.create(tmp_path / "a", small(seeds=3), force=True)
    assert folder.results() == {}


@pytest.mark.parametrize(
    ("task", "metric", "best"),
    [
        ("data-cleaning", "test_accuracy", "high"),
        ("data-cleaning", "roc_auc", "high"),
        ("data-cleaning", "validation_error", "low"),
        ("data-cleaning", "upper_loss", "low"),
        ("regularisation", "test_loss", "low"),
        ("quadratic", "x_error", "low"),
        ("quadratic", "test_accuracy", "low"),  # quadratic says nothing of such a metric
    ],
)
def test_which_cell_is_best_is_for_the_task_to_say(task, metric, best):
    grid = {"gamma_x": [0.1], "gamma_y": [0.1], "local_steps": [1, 2, 3]}
    sweep = small(task=task, knobs={}, grid=grid)
    cells = [
        Cell(values, [Outcome([{metric: number}], status)])
        for values, (number, status) in zip(sweep.cells(), ((0.2, FINISHED), (0.9, DIVERGED), (0.7, FINISHED)), strict=True)
    ]
    order = [3, 1, 2] if best == "high" else [1, 3, 2]
    assert [cell.values["local_steps"] for cell in sweep.ranked(cells, metric)] == order
    assert heat_map(sweep, cells, metric).numbers == [[0.7 if best == "high" else 0.2]]


def test_the_best_cell_is_found_written_and_read_by_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["sweep", "quadratic", "simfbo", "--grid", "gamma_x=0.02,90,0.0001", "--seeds", "2", "--rounds", "100"]
    monkeypatch.setattr(
        "sys.argv", ["fedbilevel", *arguments, "--knob=clients=4", "--clients-per-round=4", "--out", "my sweep"]
    )
    main.main()
    out = capsys.readouterr().out
    assert "0 of 6 runs" in out and "6 of 6 runs" in out and re.search(r"90.0 +2 of 2", out)
    (line,) = [line for line in out.splitlines() if line.startswith("best: ")]
    assert (tmp_path / "my sweep" / "sweep.png").exists() and (tmp_path / "my sweep" / "sweep.svg").exists()
    with (tmp_path / "my sweep" / "cells.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert [float(cell["gamma_x"]) for cell in cells] == [0.02, 0.0001, 90] and cells[2]["diverged"] == "2"
    monkeypatch.setattr("sys.argv", [*shlex.split(line.removeprefix("best: ")), "--rounds", "100", "--out", "r"])
    main.main()
    (run,) = RunFolder.find(tmp_path / "r")
    assert run.configuration.hyperparameters["gamma_x"] == 0.02 and run.configuration.knobs["clients"] == 4
    assert run.configuration.options.clients_per_round == 4
    np.testing.assert_allclose(
        run.rows()[-1]["x_error"], float(cells[0]["x_error mean"]), rtol=1e-3
    )  # no noise: all seeds alike


def test_what_cells_are_ranked_by_is_checked_before_they_run_and_kept_for_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["fedbilevel", "sweep", "quadratic", "simfbo", "--grid", "gamma_x=0.02,0.0001", "--rounds", "20", "--out", "s"]
    monkeypatch.setattr("sys.argv", [*arguments, "--by", "uper_loss"])
    with pytest.raises(SystemExit):
        main.main()
    assert "no metric 'uper_loss' to rank by; did you mean upper_loss" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr("sys.argv", [*arguments, "--by", "upper_loss"])
    main.main()
    monkeypatch.setattr("sys.argv", ["fedbilevel", "resume", "s"])
    main.main()
    shown = capsys.readouterr().out
    assert shown.count("gamma_x  upper loss") == 2 and "x error" not in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(grid={"gama_x": [1]}), "simfbo has no hyperparameter 'gama_x'; did you mean gamma_x"),
        (dict(grid={"gamma_x": ["1", "x"]}), "gamma_x must be a number above 0; given: x"),
        (dict(grid={"gamma_x": [1, 1.0]}), "the grid must name each value of gamma_x once; given: 1.0, 1.0"),
        (dict(seeds=0), "seeds must be a whole number of at least 1"),
        (dict(algorithm="simfb"), "there is no algorithm 'simfb'"),
    ],
)
def test_a_wrong_sweep_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        small(**changes)


def test_a_settings_file_is_checked(tmp_path):
    file = tmp_path / "s.toml"
    for content, message in (
        ("task =", "not a TOML file"),
        ("what = 1", "unknown entry 'what'"),
        (None, "there is no file"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        with pytest.raises(InputError, match=message):
            Settings.read(file)
    file.write_text('task = "valley"\n')
    with pytest.raises(InputError, match="is for valley, not for quadratic"):
        Settings.read(file, "quadratic")
