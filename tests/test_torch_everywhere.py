"""PyTorch modules in an own task: `solve`, `resume` after Ctrl-C and kill -9, `sweep`, report, and a real federation."""

import json
import shutil

import jax
import numpy as np
import pytest
from killing import kill_after_rows
from real_federations import COMMAND, ENVIRONMENT, Running, assert_equal, command, free_port, rows
from test_recorded import imported, stopping_at, without_time

import fedbilevel as fb

pytest.importorskip("torch")

TASK = """
from typing import Literal

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import fedbilevel as fb

LAYERS = {
    "mlp": lambda: [nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 1)],
    "cnn": lambda: [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 1)],
}


@fb.task
def shrinking(layers: Literal["mlp", "cnn"] = "mlp", data: fb.ClientData = fb.ClientData()) -> fb.Task:
    torch.manual_seed(0)
    clients = data.each("*.npy", np.load, row=np.zeros(37, np.float32))
    network = fb.from_torch(nn.Sequential(*LAYERS[layers]()), np.zeros((1, 1, 6, 6), np.float32))

    def f(x, y, rows):
        return jnp.mean((network.apply(y, rows[:, :36].reshape(-1, 1, 6, 6))[:, 0] - rows[:, 36]) ** 2)

    def g(x, y, rows):
        return f(x, y, rows) + jnp.exp(x) * sum(jnp.sum(p**2) for p in y.values())

    return fb.Task.of(f, g, jnp.full((), -3.0), network.parameters, lower=clients)
"""
SITES = ["north", "south"]
SMALL_STEPS = [o for name in ("eta_y", "gamma_y", "eta_u", "gamma_u") for o in ("--set", f"{name}=0.03")]
STEPS = fb.SimFBO(eta_x=1, gamma_x=1, eta_y=0.03, gamma_y=0.03, eta_u=0.03, gamma_u=0.03)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "rows").mkdir()
    for m, count in enumerate((5, 9)):
        images = np.random.default_rng(m).standard_normal((count, 36)).astype(np.float32)
        np.save(tmp_path / f"rows/{m}.npy", np.column_stack([images, 1 + images.mean(1)]))
    (tmp_path / "modules.py").write_text(TASK)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["mlp", "cnn"])
def test_a_module_is_solved_resumed_swept_and_shown(layers, place):
    with imported(place / "modules.py") as module:
        task = module.shrinking(layers=layers).build(str(place / "rows"))
        whole = fb.solve(task, algorithm=STEPS, rounds=40)
        with pytest.raises(KeyboardInterrupt):
            fb.solve(task, algorithm=STEPS, rounds=40, out=place / "run", observe=stopping_at(8))
        swept = fb.sweep(task, STEPS, {"gamma_x": [1, 2]}, seeds=1, by="upper_loss", rounds=40, every=10, out=place / "sweep")
    resumed = fb.resume(place / "run")
    assert without_time(resumed.history) == without_time(whole.history)
    jax.tree.map(np.testing.assert_array_equal, resumed.y, dict(whole.y))
    same = next(cell for cell in swept.cells if cell.values["gamma_x"] == 1)
    np.testing.assert_allclose([r["upper_loss"] for r in same.outcomes[0].rows], [r["upper_loss"] for r in whole.history], 1e-5)
    assert "modules.py" in fb.write_report(place / "run", place / "sweep", out=place / "page.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["mlp", "cnn"])
def test_a_killed_run_of_a_module_goes_on_to_the_same_bits(layers, place):
    run = ["run", place / "modules.py", "simfbo", "--knob", f"layers={layers}", "--data", place / "rows", "--every", "20"]
    run += ["--rounds", "3000", *SMALL_STEPS, "--out"]
    kill_after_rows([*COMMAND, *run, place / "killed"], place / "killed/simfbo/metrics.jsonl", env=ENVIRONMENT)
    assert not (place / "killed/simfbo/result.json").exists()
    command("resume", place / "killed")
    command(*run, place / "whole")
    killed, whole = (fb.load(place / name) for name in ("killed", "whole"))
    assert without_time(killed.history) == without_time(whole.history) and whole.history[-1]["rounds"] == 3000
    jax.tree.map(np.testing.assert_array_equal, (killed.x, killed.y), (whole.x, whole.y))


@pytest.mark.slow
@pytest.mark.federation
def test_modules_on_a_federation_have_the_simulated_numbers(place):
    federation, code = place / "f", place / "modules.py"
    command("federation", "init", federation, "--sites", ",".join(SITES), "--port", free_port())
    for m, site in enumerate(SITES):
        own = federation / site / "own"
        (own / "data").mkdir(parents=True)
        shutil.copy(place / f"rows/{m}.npy", own / "data")
        shutil.copy(code, own)
        settings = {"task": "shrinking", "loader": "task", "data": "../own/data"}
        lines = [*(f"{name} = {json.dumps(value)}" for name, value in settings.items()), "", "[trusted]", ""]
        (federation / site / "local/site.toml").write_text("\n".join(lines))
        command("federation", "trust", federation / site, own / "modules.py")
    running = Running(federation, "server", *SITES)
    try:
        running.await_sites()
        for layers in ("mlp", "cnn"):
            run = ["run", code, "simfbo", "--rounds", "20", "--knob", f"layers={layers}", *SMALL_STEPS, "--out"]
            command(*run, place / f"{layers}-deployed", "--federation", federation)
            command(*run, place / f"{layers}-simulated", "--data", place / "rows")
            assert_equal(rows(place / f"{layers}-deployed"), rows(place / f"{layers}-simulated"))
    finally:
        running.stop()
