"""One of every file that a user can touch, as the program writes it, and what may be put in place of its values."""

import dataclasses
import hashlib
import json
import tomllib

import numpy as np

from fedbilevel.engines import wire
from fedbilevel.federation.provision import Federation
from fedbilevel.runs.checkpoint import MAGIC
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.reproductions import plan, results
from fedbilevel.runs.reproductions.study import Study
from fedbilevel.runs.stopping import StopRequest
from fedbilevel.runs.sweeps.folder import SweepFolder
from fedbilevel.runs.sweeps.sweep import Sweep
from fedbilevel.tasks.data.columns import Columns
from fedbilevel.tasks.data.tables import tables

KNOBS = {"clients": 2, "x_dimension": 2, "y_dimension": 2}
PLAN = """
title = "One method"
paper = "nobody's"
task = "quadratic"
metric = "x_error"
scale = "plain"
rounds = 4
every = 2
seeds = 2
claimed = [["SimFBO"]]
knobs = { clients = 2, x_dimension = 2, y_dimension = 2 }
columns = [{ at = 4 }, { reach = 0.5 }]
published = { all = { SimFBO = [0.5, 3] } }

[[panels]]
name = "all"
run = { clients_per_round = 2 }

[[methods]]
name = "SimFBO"
algorithm = "simfbo"
hyperparameters = { local_steps = 2 }
paper = { "eta_x+gamma_x" = 0.03 }
grid = { "eta_x+gamma_x" = [0.01, 0.03] }

[quick]
task = "quadratic"
rounds = 2
"""
SETTINGS = 'task = "quadratic"\nknobs = { clients = 2 }\nhyperparameters = { simfbo = { gamma_x = 0.1 } }\n'

OWN_TASK = """
import jax.numpy as jnp
import fedbilevel as fb

@fb.task
def small(weight: float = 1.0, clients: int = fb.count(2, "how many"), way: str = "plain", on: bool = True) -> fb.Task:
    \"\"\"A parabola.\"\"\"
    def f(x, y, rows):
        return jnp.mean((y - rows) ** 2) + x**2

    def g(x, y, rows):
        return weight * jnp.mean((y - x - rows) ** 2)

    return fb.Task.of(f, g, 1.0, jnp.zeros(()), lower=[jnp.ones(3 + m) * m for m in range(clients)])
"""


def make(folder):
    """Fill a folder with one of every file, each as the program writes it."""
    options = RunOptions(rounds=4, every=2)
    (run,) = RunFolder.create({folder / "run": Configuration.resolve("quadratic", KNOBS, "simfbo", {}, options)})
    run.execute(StopRequest(), lambda moment: None)
    sweep = Sweep("quadratic", KNOBS, "simfbo", {"local_steps": 2}, {"gamma_x": [0.01, 0.02]}, 2, options)
    SweepFolder.create(folder / "sweep", sweep, metric="upper_loss").execute()
    (folder / "plans/results").mkdir(parents=True)
    (folder / "plans/mine.toml").write_text(PLAN)
    study = Study(plan.read("mine", folder / "plans"), folder / "study", plans=folder / "plans")
    study.tune()
    study.run()
    (folder / "plans/results/mine.csv").write_text(results.to_csv(results.collect(study)))
    (folder / "plans/results/mine.json").write_text(json.dumps(dataclasses.asdict(study.description())))
    (folder / "settings.toml").write_text(SETTINGS)
    (folder / "mine.py").write_text(OWN_TASK)
    Federation(folder, "localhost", 8002, ("a", "b")).write()
    (folder / "site.toml").write_text('task = "quadratic"\nloader = "share"\nclient = 1\nknobs = { clients = 2 }\n')
    table = {"a": [1.5, 2.5, 4.0], "b": ["x", "", "y"], "label": [0, 1, 1]}
    (folder / "preprocessing.json").write_bytes(tables([table], Columns("label", categories=["b"])).preprocessing.encoded())
    np.savez(folder / "rows.npz", upper=np.zeros((2, 3)), lower=np.ones(2))
    planned = {name: json.loads((folder / "run/config.json").read_bytes()) for name in ("one", "other")}
    (folder / "starting.json").write_text(json.dumps(planned))
    (folder / "job.json").write_text(json.dumps({"begun": True, "left_out": ["a: refused"], "final": False}))


DEEP = "a value nested very deeply"
NESTED = "[" * 3000 + "]" * 3000
VALUES = [None, True, -1, 0, 3, 10**30, 1.5, -0.0, float("nan"), float("inf"), "", "text", "..", [], [1], {}, {"a": 1}, DEEP]


def places(tree, path=()):
    """The paths to all values of a tree but the tree itself."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in ((*path, key), *places(value, (*path, key)))]


def json_text(tree):
    return json.dumps(tree).replace(json.dumps(DEEP), NESTED)


def toml_text(tree):
    def written(value):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {written(v)}" for k, v in value.items() if v is not None) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(written(v) for v in value if v is not None) + "]"
        return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")

    lines = [f"{json.dumps(name)} = {written(value)}\n" for name, value in tree.items() if value is not None]
    return "".join(lines).replace(json.dumps(DEEP), NESTED)


def changed(choose, tree):
    """The tree with a value removed, replaced, or added; `choose` takes one of a sequence."""
    tree = json.loads(json.dumps(tree))
    *path, last = choose(places(tree) or [("added",)])
    inner = tree
    for key in path:
        inner = inner[key]
    how = choose(("remove", "replace", "replace", "add"))
    if isinstance(inner, list) and how == "add":
        inner.append(choose(VALUES))
    elif how == "add":
        inner[choose(("unknown", "name", "versions", "é\n"))] = choose(VALUES)
    elif how == "remove":
        del inner[last]
    else:
        inner[last] = choose(VALUES)
    return tree


def damaged(choose, name, content):
    """The file's bytes cut, filled with others, or with a value in it changed."""
    how = choose(("cut", "overwritten", "other", "changed", "changed", "changed", "changed"))
    at = choose(range(len(content) + 1))
    if how == "cut":
        return content[:at]
    if how == "overwritten":
        return content[:at] + _bytes(choose, range(1, 5)) + content[at + choose(range(5)) :]
    if how == "other" or name.endswith((".npy", ".npz", ".csv", ".gz", ".py")):
        return _bytes(choose, range(40))
    if name.endswith(".toml"):
        return toml_text(changed(choose, tomllib.loads(content.decode()))).encode()
    if name.endswith(".json"):
        return json_text(changed(choose, json.loads(content))).encode()
    if name.endswith(".jsonl"):
        lines = content.splitlines()
        k = choose(range(len(lines)))
        lines[k] = json_text(changed(choose, json.loads(lines[k]))).encode()
        return b"\n".join(lines) + b"\n"
    tree = wire.decode(content[len(MAGIC) :].partition(b"\n")[2])
    payload = wire.encode({"leaves": tree["leaves"], **changed(choose, {k: v for k, v in tree.items() if k != "leaves"})})
    return MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def _bytes(choose, lengths):
    return bytes(choose(range(256)) for _ in range(choose(lengths)))
