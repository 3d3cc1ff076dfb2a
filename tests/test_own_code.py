"""A user's own task and algorithm, each in one file: every command takes them, and nothing executes them unasked."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from killing import kill_after_rows
from made_files import OWN_TASK as SMALL

import fedbilevel as fb
from fedbilevel import own_code
from fedbilevel.registry import chosen, find
from fedbilevel.tasks import TASKS

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "fedbilevel"]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.S | re.M)


MAKE_ROWS, TASK, _ = blocks("new-task.md")
METHOD = blocks("new-algorithm.md")[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with four unequal tables, and the two files of the documentation."""
    folder = tmp_path_factory.mktemp("own")
    script = f"import os; os.chdir({str(folder)!r})\n{MAKE_ROWS}"
    subprocess.run([sys.executable, "-c", script], check=True)
    (folder / "mine.py").write_text(TASK)
    (folder / "mymethod.py").write_text(METHOD)
    return folder


def timeless(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def rows(folder):
    return timeless(json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())


def test_a_tabular_task_takes_at_most_thirty_lines(place):
    assert len([line for line in TASK.splitlines() if line.strip()]) <= 30
    sizes = [len((place / "clinics" / f"{m}.csv").read_text().splitlines()) - 1 for m in range(4)]
    assert sizes == [45, 124, 131, 269]


def test_an_own_task_and_algorithm_run_in_the_command_as_in_solve(run, place):
    arguments = [
        "--rounds",
        60,
        "--knob",
        "lam=0.003",
        "--set",
        "MyMethod.eta=30",
        "--data",
        place / "clinics",
        "--out",
        "here",
    ]
    code, out, err = run("run", place / "mine.py", "simfbo", f"{place / 'mymethod.py'}:MyMethod", *arguments)
    assert (code, err) == (0, "") and "MyMethod: round 60 of 60, accuracy 0.9" in out
    task = find(TASKS, "task", chosen(TASKS, str(place / "mine.py"))).configure("cleaning", {"lam": 0.003})
    solution = fb.solve(task.build(str(place / "clinics")), algorithm=fb.SimFBO(eta_x=30, gamma_x=30), rounds=60)
    assert rows(Path("here/simfbo")) == timeless(solution.history)
    stored = json.loads(Path("here/MyMethod/config.json").read_text())
    assert stored["configuration"]["task"] == f"{place / 'mine.py'}:cleaning"
    assert stored["code"] == own_code.hashes([f"{place / name}.py" for name in ("mine", "mymethod")])

    code, out, err = run("compare", "here", "--out", "c.png")
    assert (code, err) == (0, "") and re.search(r"^MyMethod +0\.9", out, re.M)
    code, _, err = run("report", "here")
    assert (code, err) == (0, "")
    (page,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', Path("report.html").read_text(), re.S)
    shown = json.loads(page)
    assert [r["label"] for r in shown["runs"]] == ["MyMethod", "simfbo"] and shown["notes"] == []
    assert shown["holdings"][0]["counts"]["lower"] == [[30], [82], [87], [179]] and "gradients" in shown["runs"][0]["columns"]


def test_a_sweep_over_a_knob_and_a_hyperparameter_has_the_numbers_of_single_runs(run, place):
    data = ["--rounds", 40, "--data", place / "clinics"]
    grid = ["--grid", "eta=1,10", "--grid", "lam=0.003,0.03", "--seeds", 1, "--by", "accuracy"]
    code, out, err = run("sweep", place / "mine.py", place / "mymethod.py", *grid, *data, "--out", "swept")
    assert (code, err) == (0, "") and "4 of 4 runs" in out
    cells = [json.loads(line) for line in Path("swept/results.jsonl").read_text().splitlines()]
    assert {(c["cell"]["eta"], c["cell"]["lam"]) for c in cells} == {(e, k) for e in (1.0, 10.0) for k in (0.003, 0.03)}
    run("run", place / "mine.py", place / "mymethod.py", "--settings", "swept/best.toml", *data, "--out", "best")
    best = max(cells, key=lambda cell: cell["rows"][-1]["accuracy"])
    np.testing.assert_allclose(rows(Path("best/MyMethod"))[-1]["upper_loss"], best["rows"][-1]["upper_loss"], rtol=1e-6)
    assert run("report", "swept") == (0, "page: report.html\n", "")
    assert run("resume", "swept")[0] == 0


LONG = ["run", "mine.py", "simfbo", "mymethod.py", "--rounds", "20000", "--every", "500", "--data", "clinics"]


@pytest.mark.slow
def test_a_killed_run_goes_on_from_another_folder_to_the_same_end(place, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    whole = subprocess.run([*COMMAND, *LONG, "--out", tmp_path / "whole"], cwd=place, env=environment, capture_output=True)
    assert whole.returncode == 0, whole.stderr
    here = tmp_path / "here"
    kill_after_rows([*COMMAND, *LONG, "--out", here], here / "simfbo/metrics.jsonl", cwd=place, env=environment)
    resumed = subprocess.run([*COMMAND, "resume", "here"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    for name in ("simfbo", "MyMethod"):
        assert rows(tmp_path / "here" / name) == rows(tmp_path / "whole" / name)


def test_show_and_data_show_take_a_file(run, place):
    code, out, _ = run("show", place / "mine.py")
    assert (
        code == 0 and "Weigh the training rows of clinics" in out and re.search(r"lam +0.01 +weight decay +a number of at", out)
    )
    code, out, _ = run("show", place / "mymethod.py:MyMethod")
    assert code == 0 and "local_steps" in out and "the paper's section 5" in out
    code, out, _ = run("data", "show", place / "mine.py", "--data", place / "clinics")
    assert code == 0 and "lower: 4 clients with 30 to 179 samples" in out and Path("cleaning-holdings.png").exists()


def test_solve_takes_a_name_and_knobs_take_their_types(tmp_path):
    (tmp_path / "own.py").write_text(SMALL)
    small = find(TASKS, "task", chosen(TASKS, str(tmp_path / "own.py")))
    built = small.configure("small", {"weight": "2", "clients": "3", "on": "false"}).build()
    assert built.population.size == 3
    named, given = (fb.solve(built, algorithm=a, steps=3) for a in ("simfbo", fb.SimFBO()))
    assert timeless(named.history) == timeless(given.history)
    for wrong, message in (
        ({"weight": "x"}, "small: weight must be a number; given: x"),
        ({"weight": "inf"}, "small: weight must be a number; given: inf"),
        ({"clients": "0"}, "small: clients must be a whole number of at least 1"),
        ({"on": "yes"}, "small: on must be true or false; given: yes"),
        ({"weigt": 1}, "small has no setting 'weigt'; did you mean weight"),
    ):
        with pytest.raises(fb.InputError, match=re.escape(message)):
            small.configure("small", wrong)
    with pytest.raises(fb.InputError, match="a Task has its own batch_size: leave it out"):
        fb.solve(built, algorithm="simfbo", steps=3, batch_size=2)


BEFORE, BODY = SMALL.split("    def f", 1)
WRONG = {
    "no file": (None, "there is no file "),
    "not Python": ("x = = 1\n", "own.py:1: SyntaxError: invalid syntax"),
    "null bytes": ("\0", "own.py: SyntaxError: source code string cannot contain null bytes"),
    "fails on import": ("\n\n1 / 0\n", "own.py:3: ZeroDivisionError: division by zero"),
    "imports what is not there": ("import numpy\nimport nowhere\n", "own.py:2: ModuleNotFoundError: No module named 'nowhere'"),
    "exits": ("import sys\nsys.exit(3)\n", "own.py:2: SystemExit: 3"),
    "no task": ("x = 1\n", "own.py has no task: decorate a function or a class with @fedbilevel.task"),
    "several": (SMALL + SMALL.replace("def small", "def other"), "has several tasks: choose from own.py:small, own.py:other"),
    "a name of ours": (
        SMALL.replace("def small", "def quadratic"),
        "has a task 'quadratic', and so has fedbilevel: rename yours",
    ),
    "fails in build": (f"{BEFORE}    [][0]\n    def f{BODY}", "own.py:8: IndexError: list index out of range"),
    "refused in build": (SMALL.replace("fb.Task.of(f, g, 1.0", 'fb.Task.of(f, g, "a"'), "own.py:14: x0 "),
    "no rows": (SMALL.replace("3 + m", "0"), "own.py:14: lower: client 0 has no rows"),
    "a sum": (SMALL.replace("weight * jnp.mean", "weight * jnp.sum"), "g must be a mean over its rows"),
    "a loss that fails": (
        SMALL.replace("y - x - rows", "y - x - rows @ rows[:2]"),
        "own.py:12: g(x, y, batch) cannot be computed",
    ),
    "returns nothing": (SMALL.replace("return fb.Task.of", "fb.Task.of"), "what small returns must be a Task"),
    "no default": (SMALL.replace("weight: float = 1.0", "weight: float"), "own.py:5: small: weight must have a default value"),
    "no type": (SMALL.replace("weight: float = 1.0", "weight=1.0"), "own.py:5: small: weight must have the type int, float"),
    "a wrong type": (SMALL.replace("weight: float = 1.0", "weight: list = ()"), "small: weight must have the type int, float"),
    "an unknown type": (SMALL.replace("weight: float = 1.0", "weight: 'Flaot' = 1.0"), "its types cannot be read: NameError"),
    "a wrong default": (
        SMALL.replace("float = 1.0", "float = 'a'"),
        "small: the default of weight must be a number; given: 'a'",
    ),
    "arguments at will": (SMALL.replace("on: bool = True", "**on"), "small: **on must be a knob of its own"),
    "a knob named build": (SMALL.replace("on: bool", "build: bool"), "small: build cannot be the name of a knob"),
    "no such headline": (
        SMALL.replace("@fb.task", "@fb.task(headline='acc')"),
        "small: headline must be one of its metrics lower_loss, upper_loss",
    ),
    "better at will": (SMALL.replace("@fb.task", "@fb.task(better={'a': 'up'})"), "small: better must be a dictionary"),
    "not a function": ("import fedbilevel as fb\nfb.task(3)\n", "own.py:2: @task must be on a function or a class; given: 3"),
    "a class without build": (
        "import fedbilevel as fb\n@fb.task\nclass Own: pass\n",
        "Own must be a class with a method build",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_file_is_one_line_that_names_its_place(run, tmp_path, case):
    content, message = WRONG[case]
    if content is not None:
        (tmp_path / "own.py").write_text(content)
    code, out, err = run("run", "own.py", "simfbo", "--rounds", 4)
    assert code == 2 and message in err, err
    assert err.startswith("fedbilevel: ") and err.count("\n") == 1 and "Traceback" not in out + err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "own.py:smal", "simfbo"], "own.py has no task 'smal'; did you mean small?"),
        (["run", "own.py:", "simfbo"], "'own.py:' must be of the form FILE.py or FILE.py:NAME"),
        (["run", "quadratic", "own.py"], "own.py has no algorithm: decorate a class with @fedbilevel.algorithm"),
        (["run", "own.py", "simfbo", "--knob", "weigt=1"], "small has no setting 'weigt'; did you mean weight"),
        (["run", "own.py", "simfbo", "--federation", "."], ". holds no federation"),
        (["run", "own.py", "simfbo", "--weights", "half"], "weights must be equal, rows (as many as a client has), or numbers"),
        (["run", "own.py", "simfbo", "--weights", "1,2,3,4,5,6,7"], "numbers above 0, one per client; given: [1.0, 2.0, 3.0, "),
        (["run", "quadratic", "method.py", "method.py:MyMethod"], "an algorithm is named twice in MyMethod MyMethod"),
        (["sweep", "own.py", "simfbo", "--grid", "wight=1,2"], "simfbo has no hyperparameter 'wight'; did you mean weight"),
        (
            ["sweep", "own.py", "simfbo", "--grid", "weight=1,2", "--knob", "weight=1"],
            "weight is in the grid and among",
        ),
        (["sweep", "own.py", "simfbo", "--grid", "weight=1,x"], "small: weight must be a number; given: x"),
        (["sweep", "own.py", "simfbo", "--grid", "weight=1,1.0"], "the grid must name each value of weight once"),
        (
            ["run", "own.py", "simfbo", "--knob", "clients=100", "--set", "local_steps=2000000000"],
            "or more here, during which it can be neither stopped nor saved: lower local_steps, which is 2000000000",
        ),
        (["run", "\udcff.py", "simfbo"], "cannot be the path of a file"),
        (["show", "own.py:other"], "own.py has no task 'other'"),
        (["data", "show", "nothing.py"], "there is no file "),
        (
            ["new", "task", "My_Task"],
            "the name must consist of lower-case letters, digits and dashes, as in my-task; given: My_Task",
        ),
        (["new", "task", "quadratic"], "there already is a task 'quadratic', in fedbilevel: choose another name"),
        (["new", "algorithm", "json"], "there already is a Python module or keyword 'json'"),
        (["new", "task", "class"], "there already is a Python module or keyword 'class'"),
        (["new", "task", "brand-new", "--out", "."], ". already exists: choose another --out"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line(run, tmp_path, arguments, message):
    (tmp_path / "own.py").write_text(SMALL)
    (tmp_path / "method.py").write_text(METHOD)
    code, out, err = run(*arguments)
    assert code == 2 and message in err, err
    assert err.startswith("fedbilevel: ") and err.count("\n") == 1 and "Traceback" not in out + err


def test_a_link_to_a_file_is_a_file_of_its_own_name(run, tmp_path):
    (tmp_path / "stored").write_text(SMALL)
    (tmp_path / "own.py").symlink_to("stored")
    assert run("run", "own.py", "simfbo", "--rounds", 4, "--out", "here")[0] == 0
    assert list(json.loads((tmp_path / "here/simfbo/config.json").read_text())["code"]) == [str(tmp_path / "own.py")]


@pytest.fixture
def begun(run, tmp_path):
    """A run of an own task and a sweep, both to be continued."""
    (tmp_path / "own.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()\n{SMALL}")
    assert run("run", "own.py", "simfbo", "--rounds", 4, "--out", "here")[0] == 0
    assert run("sweep", "own.py", "simfbo", "--grid", "gamma_x=0.1,0.2", "--seeds", 1, "--rounds", 4, "--out", "swept")[0] == 0
    (tmp_path / "here/simfbo/result.json").unlink()
    (tmp_path / "swept/results.jsonl").unlink()
    return tmp_path


def test_an_own_algorithm_that_fails_and_a_picture_that_does_are_a_line_each(run, tmp_path):
    (tmp_path / "method.py").write_text(METHOD.replace("x, y, u = state", "x, y = state"))
    code, _, err = run("run", "quadratic", "method.py", "--rounds", 4)
    assert code == 2 and re.fullmatch(r"fedbilevel: method\.py:\d+: ValueError: too many values to unpack.*\n", err)
    (tmp_path / "own.py").write_text(
        SMALL.replace("fb.Task.of(", "fb.Task.of(shown=lambda x: x.picture, *[").replace(
            "g, 1.0, jnp.zeros(()),", "g, 1.0, jnp.zeros(())],"
        )
    )
    assert run("run", "own.py", "simfbo", "--rounds", 4, "--out", "here")[0] == 0
    assert run("report", "here")[0] == 0
    assert "own.py:14: shown(x) cannot be computed: AttributeError" in (tmp_path / "report.html").read_text()


def test_a_changed_file_stops_a_resume_unless_the_user_says_otherwise(run, begun):
    old = own_code.hashes(["own.py"])[str(begun / "own.py")][0]
    (begun / "own.py").write_text(SMALL + "# changed\n")
    for where in ("here", "swept"):
        code, _, err = run("resume", where)
        assert code == 2 and f"{begun / 'own.py'} has changed since the run began (SHA-256 {old[:12]} then, " in err
        assert "--changed-code" in err and err.count("\n") == 1
        assert run("resume", where, "--changed-code")[0] == 0
        assert run("resume", where)[0] == 0
    stored = json.loads((begun / "here/simfbo/config.json").read_text())
    assert stored["code"][str(begun / "own.py")] == [old, own_code.hashes(["own.py"])[str(begun / "own.py")][0]]


def test_a_task_that_is_gone_is_one_line_and_its_runs_can_still_be_compared(run, begun):
    (begun / "own.py").unlink()
    for where in ("here", "swept"):
        code, _, err = run("resume", where)
        assert (code, err) == (2, f"fedbilevel: {where}{'/simfbo' * (where == 'here')}: there is no file {begun / 'own.py'}\n")
    assert run("compare", "here")[0] == 0
    assert run("report", "here", "swept")[0] == 0
    config = begun / "here/simfbo/config.json"
    config.write_text(config.read_text().replace(f"{begun / 'own.py'}:small", "small"))
    code, _, err = run("resume", "here")
    assert code == 2 and "config.json: there is no task 'small'" in err and err.count("\n") == 1


@pytest.fixture
def said_to_another_user(begun):
    """Run the command as somebody who was given the folders, with the file that they name at its place: (exit code, stderr)."""
    (begun / "executed").unlink()
    own = {"XDG_STATE_HOME": str(begun / "another user"), "MPLCONFIGDIR": str(begun / "matplotlib")}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "1"}

    def said(*arguments):
        done = subprocess.run([*COMMAND, *arguments], cwd=begun, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr

    return said


def refuses_to_execute(said):
    code, err = said
    return code == 2 and "own.py would be executed, and you have not run it here" in err and err.count("\n") == 1


def test_nothing_that_a_folder_names_is_executed_unless_the_user_has_run_it(begun, said_to_another_user):
    assert refuses_to_execute(said_to_another_user("resume", "here", "--changed-code"))
    assert not (begun / "executed").exists()


@pytest.mark.slow
def test_no_command_executes_what_a_folder_names_until_it_is_told_to(begun, said_to_another_user):
    said = said_to_another_user
    assert said("compare", "here") == (0, "") and said("report", "here", "swept") == (0, "")
    assert "would be executed, and you have not run it here" in (begun / "report.html").read_text()
    for command in (["resume", "here"], ["resume", "swept"], ["resume", "swept", "--changed-code"]):
        assert refuses_to_execute(said(*command))
    assert not (begun / "executed").exists()
    assert said("resume", "here", "--trust-code") == (0, "") and (begun / "executed").exists()


def test_a_file_that_is_edited_while_it_runs_is_the_one_that_was_named(tmp_path):
    (tmp_path / "own.py").write_text(SMALL)
    name = chosen(TASKS, str(tmp_path / "own.py"))
    before = own_code.hashes([name])
    (tmp_path / "own.py").write_text(SMALL.replace("weight: float = 1.0", "weight: float = 2.0"))
    assert own_code.hashes([name]) == before and find(TASKS, "task", name).load()().weight == 1
    assert find(TASKS, "task", chosen(TASKS, name)).load()().weight == 2


def offered(folder, package, tasks="", algorithms="", version="0.1"):
    """An installed package, as far as Python can tell."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nSummary: from {package}\n")
    (info / "entry_points.txt").write_text(f"[fedbilevel.tasks]\n{tasks}\n[fedbilevel.algorithms]\n{algorithms}\n")
    return info


@pytest.mark.slow
def test_installed_packages_offer_names_and_a_broken_one_breaks_nothing_else(tmp_path):
    site = tmp_path / "site"
    offered(site, "fb-small", "small = own_small:small", "mymethod = own_method:MyMethod")
    offered(site, "fb-broken", "gone = nowhere:task\nquadratic = own_small:small\ntwice = own_small:small\nodd = own_small:f")
    offered(site, "fb-other", "twice = own_small:small", "odd = own_small:small")
    damaged = offered(site, "fb-damaged", "no value")
    (site / "own_small.py").write_text(SMALL)
    (site / "own_method.py").write_text(METHOD)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}

    def said(*arguments):
        done = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    code, out, err = said("list")
    assert code == 0 and re.search(r"^  small +from fb-small +package fb-small$", out, re.M) and "  mymethod " in out
    assert len(re.findall("^  quadratic ", out, re.M)) == 1 and "twice" not in out
    assert err.splitlines() == [
        "fedbilevel: warning: fb-broken offers 'quadratic', but that is one of fedbilevel's own names: it needs another one",
        "fedbilevel: warning: fb-broken and fb-other both offer 'twice': uninstall one of them",
    ]
    shutil.rmtree(damaged)  # JAX does not start with such a package
    for name, message in {
        "gone": "the package fb-broken is broken: ModuleNotFoundError: No module named 'nowhere'",
        "twice": "fb-broken and fb-other both offer 'twice': uninstall one of them",
        "odd": "the package fb-broken is broken: AttributeError: module 'own_small' has no attribute 'f'",
    }.items():
        assert said("run", name, "simfbo") == (2, "", f"fedbilevel: {message}\n")
    code, _, err = said("run", "quadratic", "odd")
    assert (
        code == 2 and "the package fb-other offers small, which is no algorithm: decorate a class with @fedbilevel.algo" in err
    )
    assert said("run", "small", "mymethod", "--rounds", "4", "--out", "here")[0] == 0
    assert json.loads((tmp_path / "here/mymethod/config.json").read_text())["versions"]["fb-small"] == "0.1"
    (tmp_path / "here/mymethod/result.json").unlink()
    metadata = next(site.glob("fb_small*/METADATA"))
    metadata.write_text(metadata.read_text().replace("Version: 0.1", "Version: 0.2"))
    assert "fb-small 0.1 (now 0.2)" in said("resume", "here")[1]
    (tmp_path / "here/mymethod/result.json").unlink()
    environment["PYTHONPATH"] = str(ROOT)
    code, _, err = said("resume", "here")
    assert code == 2 and "there is no task 'small'" in err and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["task", pytest.param("algorithm", marks=pytest.mark.slow)])
def test_a_new_project_passes_its_own_test_as_it_is(kind, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*COMMAND, "new", kind, "my-own"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    project = tmp_path / "my-own"
    assert {file.name for file in project.iterdir()} == {"pyproject.toml", "README.md", "my_own.py", "test_my_own.py"}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=project, env=environment, capture_output=True
    )
    assert tested.returncode == 0, tested.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["task", "algorithm"])
def test_a_new_project_can_be_installed_and_its_commands_run(kind, tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'site'}"}

    def done(*command, where=tmp_path):
        result = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    done(*COMMAND, "new", kind, "my-own")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", tmp_path / "site"]
    done(sys.executable, "-m", "pip", "install", *options, tmp_path / "my-own")
    assert re.search(rf"^  my-own +The {kind} my own +package fedbilevel-my-own$", done(*COMMAND, "list"), re.M)
    readme = (tmp_path / "my-own/README.md").read_text()
    for line in re.findall("^fedbilevel (.*)$", readme, re.M):
        done(*COMMAND, *line.split(), where=tmp_path / "my-own")
