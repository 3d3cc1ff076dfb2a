"""A site runs own code only if its bytes have the SHA-256 that the site has pinned, and the run has the same."""

import hashlib
import importlib
import os
import sys
import tomllib

import pytest

from fedbilevel.errors import InputError
from fedbilevel.federation import pinned_code
from fedbilevel.federation.pinned_code import OwnFile, pin, read, trusted
from fedbilevel.registry import Entry

CODE = """import fedbilevel as fb
with open({ran!r}, "a") as ran:
    ran.write("{word}")
@fb.task
def mine(size: int = 3) -> fb.Task:
    return None
@fb.algorithm
class Method(fb.Algorithm):
    pass
"""


@pytest.fixture
def file(tmp_path):
    """A file with a task, which writes down that it is executed."""
    path = tmp_path / "mine.py"
    path.write_text(CODE.format(ran=str(tmp_path / "ran"), word="first"))
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_pinned_file_gives_its_classes(file, tmp_path):
    pins = {"mine.py": sha256(file)}
    assert trusted(pins, tmp_path, "task", "mine", sha256(file)).__name__ == "mine"
    assert trusted(pins, tmp_path, "algorithm", "Method", sha256(file)).__name__ == "Method"
    assert (tmp_path / "ran").read_text() == "first"  # once, although it was asked for twice
    with pytest.raises(InputError, match="fails at this site; its log says why"):
        trusted(pins, tmp_path, "task", "other", sha256(file))


@pytest.mark.parametrize("trick", ["unpinned", "changed", "missing", "other", "link", "folder", "pipe"])
def test_whatever_else_is_refused_and_not_executed(file, tmp_path, trick):
    wanted, pins = sha256(file), {str(file): sha256(file)}
    message = "has changed at this site since it was pinned"
    match trick:
        case "unpinned":
            pins, message = {}, "has pinned no code with the SHA-256 of the run's task mine"
        case "other":
            wanted, message = "0" * 64, "has pinned no code with the SHA-256 of the run's task mine"
        case "changed":
            file.write_text(file.read_text() + "\n")
        case _:
            file.unlink()
            message = "is pinned at this site, but cannot be read there"
    match trick:
        case "link":  # to another file of that name
            (tmp_path / "else").mkdir()
            (tmp_path / "else" / "mine.py").write_text(CODE.format(ran=str(tmp_path / "ran"), word="else"))
            file.symlink_to(tmp_path / "else" / "mine.py")
            message = "has changed at this site since it was pinned"
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
    with pytest.raises(InputError, match=message) as caught:
        trusted(pins, tmp_path, "task", "mine", wanted)
    assert not (tmp_path / "ran").exists() and "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)


def test_what_is_executed_is_what_was_hashed(file, tmp_path, monkeypatch):
    """The file is replaced right after it was read."""
    before, honest = sha256(file), pinned_code.read_bytes

    def raced(path):
        content = honest(path)
        file.write_text(CODE.format(ran=str(tmp_path / "ran"), word="second"))
        return content

    monkeypatch.setattr(pinned_code, "read_bytes", raced)
    trusted({str(file): before}, tmp_path, "task", "mine", before)
    assert (tmp_path / "ran").read_text() == "first"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a task that needs another of its modules, as `read` finds it."""
    folder = tmp_path / "installed" / "own_plugin"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "numbers.py").write_text("SIZE = 3\n")
    (folder / "tasks.py").write_text(
        "import fedbilevel as fb\nfrom own_plugin.numbers import SIZE\n\n\n"
        "@fb.task\ndef mine(size: int = SIZE) -> fb.Task:\n    return None\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    entry = Entry("own_plugin.tasks", "mine", "", "", package="own-plugin", kind="task")
    monkeypatch.setitem(pinned_code.TABLES, "task", {"mine": entry})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_plugin"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_a_package_is_pinned_with_all_of_its_files(package, tmp_path):
    before = read("own-plugin").sha256
    assert read("mine").sha256 == before and "own_plugin" not in sys.modules
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "numbers.cpython-311.pyc").write_bytes(b"not hashed, and never imported")
    assert read("own-plugin").sha256 == before
    for change in ("numbers.py", "table.csv", "deep/more.py"):
        (package / change).parent.mkdir(exist_ok=True)
        old = (package / change).read_text() if (package / change).exists() else None
        (package / change).write_text("SIZE = 4\n")
        with pytest.raises(InputError, match="has changed at this site since it was pinned"):
            trusted({"own-plugin": before}, tmp_path, "task", "mine", before)
        (package / change).write_text(old) if old else (package / change).unlink()
    assert "own_plugin" not in sys.modules


def test_a_package_is_imported_from_the_bytes_that_were_hashed(package, tmp_path):
    code = read("own-plugin")
    (package / "numbers.py").write_text("SIZE = 4\n")
    (package / "late.py").write_text("raise SystemExit\n")
    assert code.load("task", "mine")().size == 3
    assert sys.modules["own_plugin.numbers"].__file__ == str(package / "numbers.py")
    with pytest.raises(ModuleNotFoundError, match=r"own_plugin\.late is not among the files of own-plugin"):
        importlib.import_module("own_plugin.late")
    with pytest.raises(InputError, match="was imported here before it was checked: start the site again"):
        read("own-plugin").load("task", "mine")


def test_the_command_pins_in_site_toml_and_leaves_the_rest(run, file, tmp_path):
    toml = tmp_path / "local" / "site.toml"
    toml.parent.mkdir()
    toml.write_text('task = "mine"  # ours\nloader = "task"\n\n[knobs]\nsize = 3\n')
    for word in ("first", "second"):
        file.write_text(CODE.format(ran=str(tmp_path / "ran"), word=word))
        code, out, _ = run("federation", "trust", tmp_path, file)
        assert code == 0 and sha256(file) in out
        assert tomllib.loads(toml.read_text()) == {
            "task": "mine",
            "loader": "task",
            "knobs": {"size": 3},
            "trusted": {str(file): sha256(file)},
        }
    assert toml.read_text().startswith('task = "mine"  # ours\n') and not (tmp_path / "ran").exists()
    before = toml.read_text()
    assert run("federation", "trust", tmp_path, file, "--print")[1] == f"{file} {sha256(file)}\n" and toml.read_text() == before


@pytest.mark.parametrize("content", ['trusted = "all"\n', "not toml", 'trusted = {"a.py" = "0"}\n'])
def test_a_site_toml_that_cannot_be_edited_stays_as_it_is(tmp_path, file, content):
    (tmp_path / "site.toml").write_text(content)
    with pytest.raises(InputError, match=r"cannot be edited here: write .* into its table \[trusted\] yourself"):
        pin(tmp_path / "site.toml", OwnFile(file, file.read_bytes()))
    assert (tmp_path / "site.toml").read_text() == content


def test_what_is_not_there_cannot_be_pinned(run, tmp_path):
    for name, message in (("no.py", "there is no file"), ("no-package", "no installed package 'no-package' with tasks")):
        code, _, err = run("federation", "trust", tmp_path, name)
        assert code == 2 and message in err and err.count("\n") == 1
