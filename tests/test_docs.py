"""The README is true, and every public name is documented."""

import importlib
import inspect
import pkgutil
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
from federations import deployed

import fedbilevel
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.participation import Everyone
from fedbilevel.simulate import Simulator
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.traffic import Totals

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_readmes_code_runs_and_improves(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 20
    exec(code, {})
    before, after = map(float, capsys.readouterr().out.split("->"))
    assert after < 0.2 * before


def test_the_readme_lists_every_algorithm_and_every_task():
    for name, entry in {**ALGORITHMS, **TASKS}.items():
        assert f"| `{name}` | {entry.summary} | {entry.paper} |" in README


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
    for name in (*fedbilevel._MODULES, *(entry.name for entry in ALGORITHMS.values())):
        assert getattr(fedbilevel, name) is not None


def test_the_skeleton_of_a_new_algorithm_runs_and_agrees_between_the_engines(capsys, monkeypatch):
    guide = (Path(__file__).parent.parent / "docs" / "new-algorithm.md").read_text()
    skeleton, use = re.findall(r"```python\n(.*?)```", guide, re.S)
    assert len([line for line in skeleton.splitlines() if line.strip()]) < 50
    module = types.ModuleType("my_method")
    monkeypatch.setitem(sys.modules, "my_method", module)
    exec(skeleton, vars(module))
    exec(use, vars(module))
    assert float(capsys.readouterr().out) < 2.0

    algorithm, task = module.MyMethod(), Quadratic(clients=3, noise=0.1).build()
    simulator = Simulator(task.population, Everyone())
    federation, _ = deployed(algorithm, task.population, Everyone())
    ours, _ = jax.jit(simulator.init)(algorithm, task.x, task.y, jax.random.key(0))
    theirs, _ = federation.init(algorithm, task.x, task.y, jax.random.key(0))
    for k in range(3):
        ours, traffic = jax.jit(simulator.step)(algorithm, ours, jax.random.key(k))
        theirs, sent = federation.step(algorithm, theirs, jax.random.key(k))
        assert Totals().plus(traffic) == sent and sent.rounds == algorithm.rounds(None, 3)
    np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-9)
