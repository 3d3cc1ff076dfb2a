"""Runs under attack on the report page: their names, and curves of the headline metric against the number of liars."""

import numpy as np
import pytest
from test_report import executed

from fedbilevel.errors import Diverged
from fedbilevel.report.breakdown import breakdowns
from fedbilevel.report.confidence import interval
from fedbilevel.report.curves import Curve, curves
from fedbilevel.report.page import page
from fedbilevel.report.page_data import contents
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions

CLIENTS = dict(clients=7)
ATTACKS = ["", "sign-flip:1", "sign-flip:2:4", "sign-flip:1:4"]
TRIMMED = "trimmed-mean(byzantine=2, before=nnm)"


def found(*runs, task="quadratic"):
    """The breakdowns of runs, each given as its end, and the options, the algorithm and the status that are not as usual."""
    shown, configurations = [], []
    for end, given in runs:
        options = {name: value for name, value in given.items() if name not in ("algorithm", "status")}
        row = dict(rounds=9, x_error=end)
        shown.append(Curve("", [row], given.get("status", "finished"), "x_error", better={"x_error": "lower"}))
        algorithm = given.get("algorithm", "fedbio")
        configurations.append(Configuration.resolve(task, CLIENTS, algorithm, {}, RunOptions(rounds=9, **options)))
    return breakdowns(shown, configurations)


def drawn(breakdown):
    """The means of a breakdown: attack -> rule -> liars -> number."""
    return {
        panel.attack: {curve.rule: {point.liars: point.mean for point in curve.points} for curve in panel.curves}
        for panel in breakdown.panels
    }


def test_a_panel_for_each_kind_of_attack_has_a_curve_for_each_rule():
    runs = [
        (0.1, {}),
        (0.2, dict(aggregate="median")),
        (0.3, dict(attack="ipm:1")),
        (0.4, dict(attack="ipm:3", aggregate="median")),
        (0.5, dict(attack="ipm:3:0.1")),
        (0.6, dict(attack="alie:2", aggregate="median")),
    ]
    (breakdown,) = found(*runs)
    assert (breakdown.name, breakdown.metric, breakdown.better) == ("fedbio", "x_error", "lower")
    assert breakdown.rules == ["mean", "median"] and drawn(breakdown) == {
        "ipm": {"mean": {0: 0.1, 1: 0.3}, "median": {0: 0.2, 3: 0.4}},
        "ipm, strength 0.1": {"mean": {0: 0.1, 3: 0.5}, "median": {0: 0.2}},
        "alie": {"mean": {0: 0.1}, "median": {0: 0.2, 2: 0.6}},
    }


def test_seeds_are_a_mean_and_divergence_is_told():
    runs = [
        (0.1, {}),
        (0.3, dict(seed=1)),
        (5.0, dict(attack="noise:2")),
        (7.0, dict(attack="noise:2", seed=1, status="diverged")),
    ]
    (breakdown,) = found(*runs)
    honest, lied = breakdown.panels[0].curves[0].points
    assert (honest.mean, honest.half) == interval([0.1, 0.3]) and not honest.diverged
    assert (lied.mean, lied.half) == interval([5.0, 7.0]) and lied.diverged


def test_without_two_numbers_of_liars_among_runs_that_ended_there_is_none():
    assert found((0.1, {}), (0.2, dict(aggregate="median"))) == []
    assert found((0.1, dict(attack="ipm:2")), (0.2, dict(attack="ipm:2", aggregate="median"))) == []
    assert found((0.1, {}), (0.2, dict(attack="ipm:2", status="unfinished"))) == []
    assert found((0.1, {}), (0.2, dict(attack="ipm:2", algorithm="simfbo"))) == []


def test_runs_that_differ_otherwise_have_breakdowns_of_their_own():
    runs = [(0.1, dict(algorithm=a, every=e, attack=t)) for a, e in (("fedbio", 1), ("fedbio", 3)) for t in ("", "ipm:1")]
    assert [one.name for one in found(*runs)] == ["fedbio, every 1", "fedbio, every 3"]


def test_a_rule_that_knows_the_number_of_liars_is_one_curve():
    def rules(*byzantine, before="none"):
        return [
            (0.1, dict(aggregate=f"krum(byzantine={f}, before={before})", attack=f"ipm:{k}" if k else "")) for k, f in byzantine
        ]

    assert [*drawn(found(*rules((0, 0), (1, 1), (2, 2)))[0])["ipm"]] == ["krum"]
    mixed = rules((0, 0), (1, 1)) + rules((0, 0), (1, 1), before="nnm")
    assert [*drawn(found(*mixed)[0])["ipm"]] == ["krum, before none", "krum, before nnm"]
    assert [*drawn(found(*rules((0, 0), (0, 1), (1, 1)))[0])["ipm"]] == ["krum, byzantine 0", "krum, byzantine 1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A mean and a trimmed mean with 0, 1 and 2 liars, of which the mean diverges with two."""
    root, made = tmp_path_factory.mktemp("runs"), []
    for rule in ("mean", TRIMMED):
        for attack in ATTACKS:
            path = root / f"run-{len(made)}"
            try:
                executed(path, "quadratic", CLIENTS, "simfbo", rounds=150, every=50, aggregate=rule, attack=attack)
            except Diverged:
                assert (rule, attack) == ("mean", "sign-flip:2:4")
            made.append(RunFolder(path))
    return made


def test_the_page_shows_how_many_liars_each_rule_bears(folders, opened, tmp_path):
    (tmp_path / "report.html").write_text(page(contents(folders)))
    tab, complaints, _ = opened((tmp_path / "report.html").as_uri(), ready="#breakdowns .main-svg")
    assert tab.locator("#breakdowns h3").all_inner_texts() == ["sign-flip", "sign-flip, strength 4"]
    assert tab.locator("#breakdowns .entry").all_inner_texts() == ["mean", "trimmed-mean"]
    usual, strong = tab.evaluate(
        "[...document.querySelectorAll('#breakdowns .chart')].map((c) => c.data.map((d) => [d.name, [...d.x], [...d.y]]))"
    )
    ends = np.array([folder.rows()[-1]["x_error"] for folder in folders]).reshape(2, 4)  # rules and attacks
    assert usual == [["mean", [0, 1], ends[0, :2].tolist()], ["trimmed-mean", [0, 1], ends[1, :2].tolist()]]
    assert strong == [
        ["mean", [0, 1, 2], [ends[0, 0], ends[0, 3], None]],
        ["mean, then diverged", [2], [ends[0, 2]]],
        ["trimmed-mean", [0, 1, 2], ends[1, [0, 3, 2]].tolist()],
    ]
    assert "x error at the end of runs, where lower is better" in tab.text_content("#breakdowns p") and complaints == []
    told = tab.locator("#runs td[data-column='run']").all_inner_texts()
    assert told[:3] == [
        f"simfbo, aggregate mean, {said}" for said in ("no attack", "attack sign-flip:1", "attack sign-flip:2:4")
    ]
    ranges = tab.evaluate("[...document.querySelectorAll('#breakdowns .chart')].map((c) => [...c.layout.yaxis.range])")
    assert ranges[0] == ranges[1]


def test_the_name_of_a_run_under_attack_has_the_attack_and_the_rule(folders):
    assert [curve.label for curve in curves([folders[k] for k in (0, 1, 5)])] == [
        "simfbo, aggregate mean, no attack",
        "simfbo, aggregate mean, attack sign-flip:1",
        "simfbo, aggregate trimmed-mean(byzantine=2, before=nnm), attack sign-flip:1",
    ]
    assert [curve.label for curve in curves(folders[1:2])] == ["simfbo, aggregate mean, attack sign-flip:1"]
    assert [curve.label for curve in curves(folders[:1])] == ["simfbo"]


def test_a_page_without_attacks_has_no_breakdown(folders):
    assert contents(folders[:1])["breakdowns"] == []
