"""The campaign (`make campaign`) itself: a few of its cases, and that it finds what is wrong."""

import shutil

import pytest

from campaign import command_lines, damaged_files
from campaign.commands import problem
from campaign.folders import made
from fedbilevel.command import report


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
