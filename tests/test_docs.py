"""The README and the documentation are true, and every public name is documented."""

import importlib
import inspect
import pkgutil
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from federations import deployed

import fedbilevel
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.command import main
from fedbilevel.core.participation import Everyone
from fedbilevel.core.traffic import Totals
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.quadratic import Quadratic

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = ("tasks", "examples", "first-problem", "api", "results", "algorithms/index", *(f"algorithms/{n}" for n in ALGORITHMS))
GENERATED = {f"{page}.md" for page in PAGES}


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.S | re.M)


def test_the_readmes_code_runs_and_improves(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 20
    exec(code, {})
    before, after = map(float, capsys.readouterr().out.split("->"))
    assert after < 0.2 * before


def test_the_readme_is_short_and_counts_the_algorithms():
    assert len(README.splitlines()) <= 150
    assert f"Each of {len(ALGORITHMS)} algorithms" in README


def test_the_catalogue_lists_every_algorithm_and_every_task():
    catalogue = (ROOT / "docs" / "catalogue.md").read_text()
    for name, entry in {**ALGORITHMS, **TASKS}.items():
        assert f"| `{name}` | {entry.summary} | {entry.paper} |" in catalogue


def test_every_public_name_is_documented():
    missing = []
    for info in pkgutil.walk_packages(fedbilevel.__path__, "fedbilevel."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != info.name:
                continue
            if inspect.isclass(value):
                members = [(f"{name}.{m}", getattr(value, m)) for m in vars(value) if not m.startswith("_")]
                missing += [f"{info.name}.{n}" for n, v in members if inspect.isroutine(v) and not inspect.getdoc(v)]
            if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
                missing.append(f"{info.name}.{name}")
    assert missing == []


def test_every_exported_name_is_there():
    assert {entry.name for entry in ALGORITHMS.values()} <= set(fedbilevel.__all__) == set(dir(fedbilevel))
    for name in fedbilevel.__all__:
        assert getattr(fedbilevel, name) is not None


def test_the_reference_has_every_exported_name_with_its_arguments(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = importlib.import_module("api").reference(lambda text: text.strip())
    for name in fedbilevel.__all__:
        value = getattr(fedbilevel, name)
        assert f"### {name}\n" in page or f"`{name}`" in page
        if inspect.isfunction(value):
            (entry,) = re.findall(rf"^### {name}\n(.*?)^##", page, re.S | re.M)
            assert f"\n\n{inspect.getdoc(value).splitlines()[0]}" in entry
            assert all(re.search(rf"\b{argument}\b: ", entry) for argument in inspect.signature(value).parameters)
    assert "- `rounds`, `steps`: how long to run" in page and "0x" not in page


def test_the_skeleton_of_a_new_algorithm_runs_and_agrees_between_the_engines(capsys, monkeypatch):
    skeleton, use = blocks(ROOT / "docs" / "new-algorithm.md", "python")
    assert len([line for line in skeleton.splitlines() if line.strip()]) < 50
    module = types.ModuleType("my_method")
    monkeypatch.setitem(sys.modules, "my_method", module)
    exec(skeleton, vars(module))
    exec(use, vars(module))
    assert float(capsys.readouterr().out) < 2.0

    algorithm, task = module.MyMethod(), Quadratic(clients=3, noise=0.1).build()
    simulator = SimulatedEngine(task.population, Everyone())
    federation, _ = deployed(algorithm, task.population, Everyone())
    ours, *_ = jax.jit(simulator.init)(algorithm, task.x, task.y, jax.random.key(0))
    theirs, *_ = federation.init(algorithm, task.x, task.y, jax.random.key(0))
    for k in range(3):
        ours, traffic, *_ = jax.jit(simulator.step)(algorithm, ours, jax.random.key(k))
        theirs, sent, *_ = federation.step(algorithm, theirs, jax.random.key(k))
        assert Totals().plus(traffic) == sent and sent.rounds == algorithm.rounds(None, 3)
    np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-9)


@pytest.mark.parametrize("page", [p.name for p in DOCS if blocks(p, "python") and p.name != "new-algorithm.md"])
def test_the_code_of_every_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "pytorch.md":
        pytest.importorskip("torch")
    exec("\n".join(blocks(ROOT / "docs" / page, "python")), {})


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tutorial.md", "report.md", "new-task.md"])  # federation.md's need several machines
def test_the_commands_of_every_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "new-task.md":
        make_rows, task, _ = blocks(ROOT / "docs" / page, "python")
        exec(make_rows, {})
        (tmp_path / "mine.py").write_text(task)
    for line in "".join(blocks(ROOT / "docs" / page, "sh")).splitlines():
        monkeypatch.setattr(sys, "argv", line.split())
        main.main()


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.name)
def test_a_page_has_no_other_code_and_its_links_lead_somewhere(page):
    fences = re.findall(r"^```(.*)$", page.read_text(), re.M)
    assert set(fences[::2]) <= {"python", "sh", "toml"} and set(fences[1::2]) <= {""}
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert link in GENERATED or (page.parent / link).exists(), link


def test_links_of_the_readme_lead_somewhere():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
