"""What a solution can do: a short line, a notebook's page, pictures, tables, and files that give x and y back."""

import base64
import json
import re
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb

STEPS = fb.SimFBO(eta_y=0.05, gamma_y=0.05, eta_u=0.05, gamma_u=0.05)
ROWS = [jnp.arange(3.0) + m for m in range(2)]


class Layer(NamedTuple):
    weight: object
    bias: object


def f(x, y, rows):
    return jnp.mean((y["a"].sum() - rows) ** 2) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(x))


def g(x, y, rows):
    return jnp.mean((y["a"].sum() - rows) ** 2) + jnp.sum((y["a"] - x["w"][0]) ** 2) + sum(b**2 for b in y["b"])


START = {"w": [jnp.ones(2), None], "v": (jnp.zeros(()),)}, {"a": jnp.zeros(2), "b": (jnp.ones(()), jnp.ones(()))}


@pytest.fixture(scope="module")
def solution():
    return fb.solve(f, g, *START, lower=ROWS, algorithm=STEPS, rounds=30, metrics=lambda x, y: {"size": y["a"].sum()})


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_it_is_printed_in_a_line_and_unpacked_as_before(solution):
    x, y, history = solution
    assert re.fullmatch(
        r"<Solution: x of 3 numbers, y of 4 after 30 rounds: upper_loss \d\S*, lower_loss \d\S*>", repr(solution)
    )
    assert x is solution.x and y is solution.y and history is solution.history


def test_a_notebook_shows_its_curves_without_a_network(solution):
    page = solution._repr_html_()
    (picture,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    drawn = base64.b64decode(picture).decode()
    assert "upper loss" in drawn and "lower loss" in drawn and "http" not in page and "&lt;Solution" in page
    assert "<img" not in fb.Solution(None, None, [])._repr_html_()


def test_its_numbers_are_drawn_by_name(solution, tmp_path):
    (axis,) = solution.plot("size").axes
    (line,) = axis.get_lines()
    assert list(line.get_xdata()) == [0, 10, 20, 30] and list(line.get_ydata()) == [row["size"] for row in solution.history]
    assert solution.plot("size")._repr_png_().startswith(b"\x89PNG")  # for a notebook
    solution.plot().savefig(tmp_path / "losses.png")
    with pytest.raises(fb.InputError, match="the history has no number 'sizes'; did you mean size"):
        solution.plot("sizes")


def test_pandas_gets_a_row_for_each_time_metrics_were_due(solution, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))
    assert solution.to_pandas() == solution.history
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fb.InputError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
        solution.to_pandas()


def test_a_saved_solution_comes_back_as_it_was(solution, tmp_path):
    solution.save(tmp_path / "found.npz")
    found = fb.load(tmp_path / "found.npz")
    assert_same(found.x, solution.x)
    assert_same(found.y, solution.y)
    assert found.history == solution.history
    with np.load(tmp_path / "found.npz") as plain:
        assert {"x/w/0", "x/v/0", "y/a", "y/b/0", "y/b/1"} <= set(plain.files)
        np.testing.assert_array_equal(plain["y/a"], solution.y["a"])
    with pytest.raises(fb.InputError, match=r"the file's name must end in .npz; given: found"):
        solution.save("found")


@pytest.mark.parametrize(
    ("tree", "loaded"),
    [
        ({True: 1.0, False: 2.0}, {"True": 1.0, "False": 2.0}),
        ({1.5: 1.0}, {"1.5": 1.0}),
        ({"a\0b": 1.0, "a\0c": 2.0}, {"a\0b": 1.0, "a\0c": 2.0}),
        ({"\udcff": 1.0}, {"\\udcff": 1.0}),
        ({"k" * 70_000: 1.0, "k" * 70_001: 2.0}, {"k" * 70_000: 1.0, "k" * 70_001: 2.0}),
    ],
    ids=["Booleans", "a number", "not printable", "no text", "long"],
)
def test_odd_keys_come_back_or_their_names_do(tree, loaded, tmp_path):
    fb.Solution(tree, None, []).save(tmp_path / "odd.npz")
    assert_same(fb.load(tmp_path / "odd.npz").x, loaded)


def test_other_nodes_come_back_as_dictionaries_and_small_floats_as_such(tmp_path):
    half = jnp.arange(3, dtype=jnp.bfloat16)
    tree = {"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}, "layer": Layer(half, {7: jnp.ones(2)})}
    fb.Solution(tree, None, []).save(tmp_path / "odd.npz")
    found = fb.load(tmp_path / "odd.npz")
    assert found.y is None and found.x["layer"]["weight"].dtype == half.dtype
    assert_same(found.x, {**tree, "layer": {"weight": half, "bias": {7: jnp.ones(2)}}})


def test_every_run_leaves_x_and_y_in_its_folder(run, tmp_path):
    run("run", "quadratic", "simfbo", "fedavg", "--knob", "clients=3", "--rounds", "20", "--out", "here")
    found = fb.load(tmp_path / "here/simfbo")
    np.testing.assert_array_equal(found.x, np.load(tmp_path / "here/simfbo/x.npy"))
    rows = (tmp_path / "here/simfbo/metrics.jsonl").read_text().splitlines()
    assert found.history == list(map(json.loads, rows)) and found.y.ndim == 1
    with pytest.raises(fb.InputError, match=r"here holds several runs: choose from .*here/fedavg, .*here/simfbo"):
        fb.load(tmp_path / "here")
    (tmp_path / "here/fedavg/solution.npz").unlink()
    with pytest.raises(fb.InputError, match="fedavg has no x and y yet"):
        fb.load(tmp_path / "here/fedavg")


def test_each_clients_own_y_has_a_row_per_client(run, tmp_path):
    run(
        "run",
        "quadratic",
        "fedbio-local",
        "--knob",
        "clients=3",
        "--knob",
        "lower_level=local",
        "--rounds",
        "20",
        "--out",
        "here",
    )
    assert fb.load(tmp_path / "here/fedbio-local").y.shape[0] == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an .npz file of plain arrays"),
        ({"x": np.ones(2)}, "it holds no x and y as fedbilevel stores them"),
        ({"structure.json": np.asarray('{"x": {"kind": "heap"}}')}, "Invalid enum value 'heap'"),
        ({"structure.json": np.asarray('{"x": {"kind": "array", "array": "x"}}')}, "it has no array 'x'"),
    ],
)
def test_a_damaged_file_is_refused_in_a_line(content, message, tmp_path):
    file = tmp_path / "found.npz"
    file.write_bytes(content) if isinstance(content, bytes) else np.savez(file, **content)
    with pytest.raises(fb.InputError, match=message) as refused:
        fb.load(file)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)
