"""Leagues: ranks over panels, Friedman's and Nemenyi's tests, and one command that goes on after a kill."""

import csv
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from bare_plans import bare_plan
from scipy.stats import friedmanchisquare

from fedbilevel.command import main
from fedbilevel.report import difference_picture, league_page
from fedbilevel.runs.reproductions.league import alike, friedman, ranks, standings
from fedbilevel.runs.reproductions.results import Row, Run
from fedbilevel.runs.reproductions.table_numbers import Number
from fedbilevel.runs.sweeps.batched_runs import DIVERGED, FINISHED

DEMSAR = """\
0.763 0.768 0.771 0.798
0.599 0.591 0.590 0.569
0.954 0.971 0.968 0.967
0.628 0.661 0.654 0.657
0.882 0.888 0.886 0.898
0.936 0.931 0.916 0.931
0.661 0.668 0.609 0.685
0.583 0.583 0.563 0.625
0.775 0.838 0.866 0.875
1.000 1.000 1.000 1.000
0.940 0.962 0.965 0.962
0.619 0.666 0.614 0.669
0.972 0.981 0.9751 0.975
0.957 0.978 0.946 0.970"""  # Table 6: AUC on 14 data sets; where it prints 0.975 twice, ranks 2 and 3


def once(value):
    return None if value is None else Number(value, 0.0, 1, 1)


def test_ranks_and_tests_are_those_of_demsars_worked_example():
    """Section 3.2.2: the ranks of table 6, χ² = 9.28, F = 3.69, and critical differences 1.25 and 1.12 at 5 and 10 %."""
    auc = np.array([line.split() for line in DEMSAR.splitlines()], float)
    found = ranks([[once(v) for v in line] for line in auc], higher=True)
    assert found.mean(0) == pytest.approx([3.143, 2.000, 2.893, 1.964], abs=5e-4)
    tested = friedman(found)
    assert (tested.chi_square, tested.f) == pytest.approx((9.28, 3.69), abs=5e-3)
    assert tested.critical_difference == pytest.approx(2.569 * math.sqrt(4 * 5 / (6 * 14)), abs=1e-3)
    assert friedman(found, level=0.1).critical_difference == pytest.approx(1.12, abs=5e-3)
    assert tested.p < 0.05


def test_friedmans_statistic_without_ties_is_scipys():
    values = np.random.default_rng(0).permutation(50).reshape(10, 5) / 50
    found = ranks([[once(v) for v in line] for line in values], higher=False)
    assert friedman(found).chi_square == pytest.approx(friedmanchisquare(*values.T).statistic)


def test_whoever_diverged_is_last_and_equal_methods_share_their_rank():
    found = ranks([[once(2.0), None, once(1.0), once(2.0), None]], higher=False)
    assert found.tolist() == [[2.5, 4.5, 1.0, 2.5, 4.5]]


def test_one_order_everywhere_is_certain():
    tested = friedman(np.tile([1.0, 2.0, 3.0], (5, 1)))
    assert tested.chi_square == pytest.approx(10) and tested.f == math.inf and tested.p == 0


def test_bars_join_what_the_test_does_not_tell_apart():
    assert alike([1.0, 1.5, 2.4, 4.0], 1.0) == [(1.0, 1.5), (1.5, 2.4)]
    assert alike([1.0, 3.0], 1.0) == []


def line(*values, megabytes=1.0, derivatives=1, seconds=1.0, status=FINISHED):
    rows = [Row(10 * k, megabytes * k, derivatives * k, 0, v, seconds * k) for k, v in enumerate(values)]
    return [Run(seed, status, rows) for seed in (1, 2)]


PLAN = bare_plan("pq", {"A": {}, "B": {}, "C": {}}, ranked=True)


def test_every_cost_has_its_own_budget_and_its_own_order(tmp_path):
    """A is best after equal rounds; it sends twice as much as B, and takes four times as long; C diverges."""
    results = {}
    for panel in "pq":
        results[panel, "A"] = line(9, 5, 1, megabytes=2.0, seconds=4.0)
        results[panel, "B"] = line(9, 4, 3)
        results[panel, "C"] = line(9, 5, status=DIVERGED)
    by_cost = {standing.cost: standing for standing in standings(PLAN, results)}
    assert by_cost["rounds"].mean_ranks.tolist() == [1, 2, 3]
    assert by_cost["megabytes"].mean_ranks.tolist() == [2, 1, 3]  # at 2 MB A has 5, and B 3
    assert by_cost["derivatives"].mean_ranks.tolist() == [1, 2, 3]
    assert by_cost["seconds"].values[0] == [None, Number(3, 0, 2, 2), None]  # at 2 s A has no metric after its start
    text = league_page.text(PLAN, list(by_cost.values()))
    assert "**At equal seconds.**" in text and "| B | 1.00 ± 0.00 | 3 ± 0.00 | 3 ± 0.00 |" in text
    lines = list(csv.DictReader(league_page.to_csv(PLAN, list(by_cost.values())).splitlines()))
    assert {row["rank"] for row in lines if row["method"] == "B" and row["cost"] == "megabytes"} == {"1"}
    difference_picture.draw(list(by_cost.values()), [tmp_path / "a.svg"])
    svg = (tmp_path / "a.svg").read_text()
    assert "critical difference" in svg and all(f"mean ranks at equal {cost}" in svg for cost in by_cost)


TINY = """
title = "A tiny league"
paper = "nobody's"
task = "quadratic"
metric = "x_error"
scale = "plain"
rounds = 16
every = 4
seeds = 2
ranked = true
search = { candidates = 3, rungs = 1, passes = 1, more = 0, seeds = 1, reported = 2 }
knobs = { clients = 3, noise = 0.1 }

[[panels]]
name = "p"

[[panels]]
name = "q"
knobs = { noise = 0.3 }

[[methods]]
name = "SimFBO"
algorithm = "simfbo"

[[methods]]
name = "FedAvg"
algorithm = "fedavg"
"""


def numbers(folder):
    """All stored numbers but the seconds."""
    return [line.rsplit(",", 1)[0] for line in (folder / "results.csv").read_text().splitlines()]


@pytest.mark.slow
def test_a_league_that_was_killed_goes_on_to_the_same_numbers(tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tiny.toml").write_text(TINY)
    words = ["reproduce", "tiny", "--tune", "--plans"]
    main.app([*words, str(tmp_path / "whole"), "--out", str(tmp_path / "a")], standalone_mode=False)
    assert {"ranks.csv", "ranks.md", "ranks.png", "ranks.svg"} <= {p.name for p in (tmp_path / "a").iterdir()}

    process = subprocess.Popen(
        [sys.executable, "-m", "fedbilevel", *words, str(tmp_path / "killed"), "--out", str(tmp_path / "b")],
        stdout=subprocess.DEVNULL,
    )
    first, second = (tmp_path / "b" / "search" / panel / "SimFBO" for panel in "pq")
    until = time.monotonic() + 240
    while process.poll() is None and not second.exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "b" / "results.csv").exists()
    kept = (first / "results.jsonl").read_text()
    main.app([*words, str(tmp_path / "killed"), "--out", str(tmp_path / "b")], standalone_mode=False)
    assert kept.count("\n") == 3 and (first / "results.jsonl").read_text() == kept  # its seconds too: none was made again
    assert numbers(tmp_path / "b") == numbers(tmp_path / "a")
