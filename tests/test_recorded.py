"""`solve` with a folder: the same numbers as without, what the commands make of it, and stopping."""

import contextlib
import importlib.util
import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb

MINE = """
import jax.numpy as jnp
import fedbilevel as fb

@fb.task
def small(weight: float = 1.0) -> fb.Task:
    def f(x, y, rows):
        return jnp.mean((y["a"] - rows) ** 2) + weight * x**2

    def g(x, y, rows):
        return jnp.mean((y["a"] - x - rows) ** 2)

    return fb.Task.of(f, g, jnp.ones(()), {"a": jnp.zeros(())}, lower=[jnp.arange(3.0), jnp.ones(2)])
"""
STEPS = fb.SimFBO(eta_y=0.1, gamma_y=0.1, eta_u=0.1, gamma_u=0.1)


@contextlib.contextmanager
def imported(file):
    """A file as a module, as `import` would give it."""
    spec = importlib.util.spec_from_file_location(f"{file.stem}_for_recorded", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def small(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with imported(tmp_path / "mine.py") as module:
        yield module.small


def without_time(history):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


def stopping_at(step):
    def observe(moment):
        if moment.step >= step:
            os.kill(os.getpid(), signal.SIGINT)

    return observe


def test_a_folder_changes_no_number_and_is_one_that_the_commands_read(run, small, tmp_path, capsys):
    plain = fb.solve(small(weight=2.0).build(), algorithm=STEPS, rounds=30)
    recorded = fb.solve(small(weight=2.0).build(), algorithm=STEPS, rounds=30, out=tmp_path / "mine")
    assert "simfbo: round 30 of 30, upper loss" in capsys.readouterr().err
    assert without_time(recorded.history) == without_time(plain.history)
    for found in (recorded, fb.load(tmp_path / "mine")):
        jax.tree.map(np.testing.assert_array_equal, (found.x, found.y), (plain.x, plain.y))
    stored = json.loads((tmp_path / "mine/config.json").read_text())
    assert stored["configuration"]["task"] == f"{tmp_path / 'mine.py'}:small"
    assert stored["configuration"]["knobs"] == {"weight": 2.0} and list(stored["code"]) == [str(tmp_path / "mine.py")]
    for command in ("compare", "report"):
        assert run(command, "mine")[0] == 0
    assert "<html" in fb.write_report(tmp_path / "mine", out=tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(fb.InputError, match=r"the page's name must end in .html; given: page"):
        fb.write_report(tmp_path / "mine", out="page")
    with pytest.raises(fb.InputError, match=r"already holds a run: resume it, or choose another folder$"):
        fb.solve(small().build(), algorithm=STEPS, rounds=30, out=tmp_path / "mine")


def test_ctrl_c_keeps_what_is_done_and_resume_ends_with_the_same_bits(run, small, tmp_path, capsys):
    whole = fb.solve(small().build(), algorithm="simfbo", rounds=40)
    with pytest.raises(KeyboardInterrupt):
        fb.solve(small().build(), algorithm="simfbo", rounds=40, out=tmp_path / "my run", observe=stopping_at(8))
    assert capsys.readouterr().err.endswith(f"stopped; continue with: fedbilevel resume '{tmp_path / 'my run'}'\n")
    assert len(fb.load(tmp_path / "my run").history) < len(whole.history)
    code, _, err = run("resume", "my run")
    assert (code, err) == (0, "")
    found = fb.load(tmp_path / "my run")
    jax.tree.map(np.testing.assert_array_equal, (found.x, found.y), (whole.x, whole.y))
    assert without_time(found.history) == without_time(whole.history)


def test_what_no_file_describes_keeps_its_numbers_and_is_not_resumed(run, tmp_path, capsys):
    def f(x, y, rows):
        return jnp.mean((y - rows) ** 2) + x**2

    def g(x, y, rows):
        return jnp.mean((y - x - rows) ** 2)

    start = dict(lower=[jnp.ones(3)] * 2, algorithm=STEPS, rounds=40, out=tmp_path / "mine")
    with pytest.raises(KeyboardInterrupt):
        fb.solve(f, g, jnp.ones(()), jnp.zeros(()), **start, observe=stopping_at(8))
    assert capsys.readouterr().err.endswith(f"stopped; what is done is in {tmp_path / 'mine'}\n")
    assert fb.load(tmp_path / "mine").history
    code, _, err = run("resume", "mine")
    assert code == 2 and "its task was made in Python, and no file describes it" in err and err.count("\n") == 1
    assert run("compare", "mine")[0] == 0
    assert run("report", "mine")[0] == 0


def test_own_participation_is_recorded_and_not_resumed(small, tmp_path):
    who = fb.Dropouts(fb.Uniform(1), 0.1)
    fb.solve(small().build(), algorithm=STEPS, rounds=20, participation=who, out=tmp_path / "mine")
    assert json.loads((tmp_path / "mine/config.json").read_text())["configuration"]["task"] == "<solve>"
