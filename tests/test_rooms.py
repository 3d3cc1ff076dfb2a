"""How the code is laid out: what the root holds, and that nobody reaches into another module's private names."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_repr_html_", "_repr_png_", "_exit"}  # of named tuples, notebooks, and os
ATTACKERS = [ROOT / "tests" / "hostile_engine.py"]  # who keep to no names
FOLDERS = "fedbilevel", "tests", "benchmarks", "docs", "examples"
FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py") if p not in ATTACKERS)


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined_in(tree):
    """The names that a module defines, as functions, classes, variables or attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def private_names_of_others(source):
    """Private names that a module uses and does not define."""
    tree = ast.parse(source)
    own = set(defined_in(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                yield f"line {node.lineno}: {ast.unparse(node)}"
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[_, ast.Constant(value=str(name)), *_]) if is_private(name):
                yield f"line {node.lineno}: {name}"
            case ast.ImportFrom(names=names):
                yield from (f"line {node.lineno}: import {alias.name}" for alias in names if is_private(alias.name))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_module_touches_private_names_of_another(file):
    assert list(private_names_of_others(file.read_text())) == []


def test_the_search_finds_what_it_looks_for():
    source = "from a import _b\nc._d()\nself._e = 1\nself._e\nt._replace(x=1)\nc._f = 1\nmonkeypatch.setattr(c, '_g', 1)"
    found = ["line 1: import _b", "line 2: c._d", "line 6: c._f", "line 7: _g"]
    assert sorted(private_names_of_others(source)) == found


def test_the_root_of_the_package_holds_five_modules_at_most():
    modules = {p.stem for p in (ROOT / "fedbilevel").glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= 5
    rooms = {p.name for p in (ROOT / "fedbilevel").iterdir() if (p / "__init__.py").exists()}
    assert rooms == {
        "core",
        "aggregations",
        "algorithms",
        "tasks",
        "engines",
        "runs",
        "report",
        "library",
        "federation",
        "command",
    }
