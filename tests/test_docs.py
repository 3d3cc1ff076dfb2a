"""The README is true, and every public name is documented."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import fedbilevel
from fedbilevel.algorithms import ALGORITHMS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_readmes_code_runs_and_improves(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 20
    exec(code, {})
    before, after = map(float, capsys.readouterr().out.split("->"))
    assert after < 0.2 * before


def test_the_readme_lists_every_algorithm():
    for name, entry in ALGORITHMS.items():
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
