"""The campaign (`make campaign`) itself: a few of its cases, and that it finds what is wrong."""

import datetime
import shutil

import pytest

from campaign import command_lines, damaged_files
from campaign.commands import ended, problem
from campaign.folders import made
from campaign.outcome import numbers
from fedbilevel.command import report
from fedbilevel.runs import folder as run_folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    made(folder)
    return folder


def test_a_few_of_its_inputs_end_well_or_in_one_line(files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cases = [*command_lines.cases(0, 0)[::16], *damaged_files.cases(files, 0, 8)]
    assert len(cases) > 10
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        shutil.copytree(files, folder)
        assert not case.act(folder), case.name


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (ord, "TypeError"),  # raised in a line of the package: one from a file of the user's would be a message
        (lambda *given: exit(3), "code 3"),
        (lambda *given: exit(2), "not in one line"),
    ],
)
def test_it_says_what_is_wrong_with_a_command(files, monkeypatch, ends, said):
    monkeypatch.setattr(report, "find_style", ends)
    assert said in problem(["compare", "run"], files)


def test_it_sees_what_a_refused_command_leaves_behind(files, monkeypatch):
    def leave(style):
        (files / "left").write_text("")
        raise report.InputError("no")

    monkeypatch.setattr(report, "find_style", leave)
    assert "leaves left behind" in problem(["compare", "run"], files)


def test_a_command_leaves_the_same_numbers_on_another_day(tmp_path, monkeypatch):
    found = []
    for day in (1, 2):

        class Clock(datetime.datetime):
            @classmethod
            def now(cls, zone, day=day):
                return datetime.datetime(2026, 1, day, tzinfo=zone)

        monkeypatch.setattr(run_folder, "datetime", Clock)
        (tmp_path / str(day)).mkdir()
        assert (
            ended(["run", "quadratic", "simfbo", "--knob", "clients=2", "--steps", "2", "--out", "out"], tmp_path / str(day))[0]
            == 0
        )
        found.append(numbers(tmp_path / str(day)))
    assert found[0] == found[1]
    assert {"out/simfbo/config.json", "out/simfbo/metrics.jsonl", "out/simfbo/solution.npz"} <= found[0].keys()
