"""Calls of the library: each works, or is refused in one line that names the argument and the value."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.problem import Batch
from fedbilevel.core.sets import Sets
from fedbilevel.settings import step_size
from fedbilevel.tasks.quadratic import Quadratic

SCHEDULED = next(iter(fb.MeFBO().scheduled_at(0)))
ROWS = [np.ones((3, 2)), np.zeros((2, 2))]
POINT = jnp.array(1.0), jnp.zeros(2), Batch(ROWS[0], ROWS[0])
Labelled = collections.namedtuple("Labelled", "images labels")


def loss(x, y, rows):
    return jnp.mean(jnp.sum((y - rows) ** 2, 1)) + x**2


def looped(x, y, rows):
    return jax.lax.while_loop(lambda v: v < 0, lambda v: v + 1, loss(x, y, rows))


def called_back(x, y, rows):
    return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), float), jnp.mean((y - rows) ** 2) + x**2)


@jax.custom_vjp
def once_only(v):
    return v**2


def no_second(residual, cotangent):
    """A first derivative without one of its own."""

    @jax.custom_jvp
    def slope(v):
        return 2 * v

    @slope.defjvp
    def fails(primals, tangents):
        raise ArithmeticError("no derivative of this")

    return (slope(residual) * cotangent,)


once_only.defvjp(lambda v: (v**2, v), no_second)


def once(x, y, rows):
    return jnp.mean(jnp.sum(once_only(y - rows - x), 1))


class Unhashable:
    __hash__ = None

    def __call__(self, x, y, rows):
        return loss(x, y, rows)


class NotDecorated(fb.FedBiO.__base__):
    def init(self, x, y, clients): ...
    def step(self, state, clients, key): ...
    def rounds(self, key, size): ...


def solve(**changes):
    values = dict(f=loss, g=loss, x0=jnp.array(1.0), y0=jnp.zeros(2), lower=ROWS, algorithm=fb.SimFBO(), steps=1)
    return fb.solve(**values | changes)


def sweep(**changes):
    return fb.sweep(**dict(task="quadratic", algorithm="simfbo", grid={"gamma_x": [0.1]}, seeds=1, rounds=5) | changes)


def tune(**changes):
    return fb.tune(**dict(task="quadratic", algorithms="simfbo", rounds=5, candidates=1, rungs=1, passes=1, seeds=1) | changes)


def rowwise(of):
    """The same loss, for rows of another kind."""
    return dict(f=lambda x, y, rows: loss(x, y, of(rows)), g=lambda x, y, rows: loss(x, y, of(rows)))


def build(**changes):
    problem = changes.pop("problem", fb.Problem(loss, loss))
    return fb.Population.build(problem, **dict(upper=ROWS, lower=ROWS) | changes)


def decorated(**fields):
    return fb.algorithm(type("Mine", (NotDecorated,), {**fields, "__annotations__": dict.fromkeys(fields, float)}))


WORKS = {
    "lower: a generator": lambda: solve(lower=(rows for rows in ROWS)),
    "lower: a tuple": lambda: solve(lower=tuple(ROWS)),
    "lower: the values of a dictionary": lambda: solve(lower=dict(enumerate(ROWS)).values()),
    "lower: bytes in the other order": lambda: solve(lower=[rows.astype(">f8") for rows in ROWS]),
    "lower: arrays of JAX": lambda: solve(lower=[jnp.asarray(rows) for rows in ROWS]),
    "lower: whole numbers": lambda: solve(lower=[rows.astype(int) for rows in ROWS]),
    "lower: yes and no": lambda: solve(lower=[rows.astype(bool) for rows in ROWS], **rowwise(lambda rows: 1.0 * rows)),
    "lower: a NamedTuple each": lambda: solve(
        lower=[Labelled(rows, rows) for rows in ROWS], **rowwise(lambda rows: rows.images)
    ),
    "lower and upper: generators": lambda: solve(lower=iter(ROWS), upper=iter(ROWS)),
    "one client": lambda: solve(lower=ROWS[:1]),
    "weights: a generator": lambda: solve(weights=(w for w in (1, 2))),
    "weights: an array": lambda: solve(weights=np.array([1, 2])),
    "weights: an array of JAX": lambda: solve(weights=jnp.array([1.0, 2.0])),
    "weights: a tuple": lambda: solve(weights=(1, 2.5)),
    "batch_size: np.int64": lambda: solve(batch_size=np.int64(2)),
    "batch_size: more than there are rows": lambda: solve(batch_size=7),
    "batch_size: None": lambda: solve(batch_size=None),
    "batch_size: an array of one whole number": lambda: solve(batch_size=np.array(2)),
    "steps: np.int64": lambda: solve(steps=np.int64(1)),
    "rounds: np.int32": lambda: solve(steps=None, rounds=np.int32(4)),
    "steps: an array of one whole number": lambda: solve(steps=jnp.array(1)),
    "every: np.uint8": lambda: solve(every=np.uint8(1)),
    "seed: np.int64": lambda: solve(seed=np.int64(3)),
    "seed: the largest": lambda: solve(seed=2**32 - 1),
    "clients_per_round: np.int64": lambda: solve(clients_per_round=np.int64(1)),
    "chunk_size: np.int64": lambda: solve(chunk_size=np.int64(1)),
    "loss_bound: np.float32": lambda: solve(loss_bound=np.float32(1e3)),
    "participation: Uniform": lambda: solve(participation=fb.Uniform(np.int64(1))),
    "participation: Bernoulli": lambda: solve(participation=fb.Bernoulli(np.float32(0.5))),
    "participation: a whole probability": lambda: solve(participation=fb.Bernoulli(1)),
    "participation: Dropouts": lambda: solve(participation=fb.Dropouts(fb.Everyone(), 0)),
    "x0: a number": lambda: solve(x0=1.0),
    "x0: np.float64": lambda: solve(x0=np.float64(1)),
    "y0: a list of numbers": lambda: solve(
        y0=[0.0, 0.0], **dict.fromkeys("fg", lambda x, y, rows: loss(x, jnp.stack(y), rows))
    ),
    "x0: bytes in the other order": lambda: solve(x0=np.ones((), ">f4")),
    "x0: a tree": lambda: solve(x0={"a": np.ones(2)}, **dict.fromkeys("fg", lambda x, y, rows: loss(x["a"].sum(), y, rows))),
    "sets: a Box of numpy numbers": lambda: solve(algorithm=fb.MeFBO(), x_set=fb.Box(np.float32(0), np.int64(2))),
    "sets: an infinite Box": lambda: fb.Box(-np.inf, np.array(1.0)),
    "sets: a whole radius": lambda: fb.Ball(2),
    "sets: Simplex": lambda: fb.Simplex(),
    "sweep: seeds: np.int64": lambda: sweep(seeds=np.int64(1)),
    "tune: np.int64": lambda: tune(candidates=np.int64(1), rungs=np.int8(1), seeds=np.int32(1)),
    "metrics": lambda: solve(metrics=lambda x, y: {"size": jnp.sum(y), "five": 5}),
    "metrics: none": lambda: solve(metrics=lambda x, y: {}),
    "algorithm: none given": lambda: solve(algorithm=None),
    "algorithm: none given, y local": lambda: fb.solve(Quadratic(clients=2, lower_level="local").build(), steps=1),
    "observe": lambda: solve(observe=lambda snapshot: None),
    "f: a partial function": lambda: solve(f=functools.partial(loss)),
    "f: a jitted function": lambda: solve(f=jax.jit(loss)),
    "a hyperparameter: np.int64 for a real number": lambda: fb.SimFBO(gamma_x=np.int64(1)),
    "a hyperparameter: np.int64": lambda: fb.SimFBO(local_steps=np.int64(2)),
    "a hyperparameter: a number of JAX": lambda: solve(algorithm=fb.SimFBO(gamma_x=jnp.array(0.1))),
    "a hyperparameter: traced": lambda: jax.jit(lambda step: fb.SimFBO(gamma_x=step))(0.1),
    "iterate: np.int64": lambda: fb.iterate(np.int64(2), lambda k, value: value + 1, 0),
    "iterate: a traced number": lambda: jax.jit(lambda n: fb.iterate(n, lambda k, value: value + 1, 0))(3),
    "iterate: never": lambda: fb.iterate(0, lambda k, value: value + 1, 0),
    "at_client": lambda: fb.at_client(lambda self, client: client),
    "algorithm": lambda: decorated(eta=step_size(0.1, "η")),
    "Problem": lambda: fb.Problem(loss, loss, Sets(y=fb.Ball(1.0))),
    "Population.build: generators": lambda: build(upper=iter(ROWS), lower=iter(ROWS), weights=iter([1, 2])),
    "Population.build: batch_size": lambda: build(batch_size=np.int16(4)),
}


def refused(what, call, *said):
    return pytest.param(call, said, id=what)


REFUSED = [
    # the clients' rows
    refused("lower: None", lambda: solve(lower=None), "lower", "None"),
    refused("lower: a number", lambda: solve(lower=3), "lower", "3"),
    refused("lower: text", lambda: solve(lower="rows"), "lower", "'rows'"),
    refused("lower: one array", lambda: solve(lower=np.ones((2, 3, 2))), "lower", "ndarray"),
    refused("lower: a dictionary", lambda: solve(lower={"a": ROWS[0]}), "lower", "dict"),
    refused("lower: a set", lambda: solve(lower={1, 2}), "lower", "set"),
    refused("lower: one client's NamedTuple", lambda: solve(lower=Labelled(ROWS[0], ROWS[0])), "lower", "Labelled"),
    refused("lower: no client", lambda: solve(lower=[]), "lower", "no client"),
    refused("lower: a generator of nothing", lambda: solve(lower=iter(())), "lower", "no client"),
    refused("lower: a client without rows", lambda: solve(lower=[ROWS[0], np.ones((0, 2))]), "lower", "client 1", "no rows"),
    refused("lower: masked entries", lambda: solve(lower=[ROWS[0], np.ma.masked_less(ROWS[1], 1e9)]), "client 1", "masked"),
    refused("lower: a client that is None", lambda: solve(lower=[ROWS[0], None]), "lower", "client 1"),
    refused("lower: clients that are None", lambda: solve(lower=[None, None]), "lower", "client 0"),
    refused("lower: text rows", lambda: solve(lower=[np.array(["a", "b"])]), "lower", "client 0", "<U1"),
    refused("lower: a client that is text", lambda: solve(lower=["abc", "abc"]), "lower", "client 0"),
    refused("lower: objects", lambda: solve(lower=[np.array([None, 1], object)]), "lower", "client 0", "object"),
    refused("lower: dates", lambda: solve(lower=[np.array(["2020-01-01"], "M8[D]")]), "lower", "client 0", "datetime64"),
    refused("lower: spans of time", lambda: solve(lower=[np.ones((3, 2), "m8[s]")]), "lower", "client 0", "timedelta64"),
    refused("lower: longer than a double", lambda: solve(lower=[np.ones((3, 2), "g")]), "lower", "client 0", "float64"),
    refused("lower: text in a later client", lambda: solve(lower=[ROWS[0], np.array([["a", "b"]])]), "lower", "client 1"),
    refused("lower: numbers without rows", lambda: solve(lower=[1.0, 2.0]), "lower", "client 0"),
    refused("lower: arrays without axes", lambda: solve(lower=[np.array(1.0)]), "lower", "client 0"),
    refused("lower: unequal rows in a client", lambda: solve(lower=[(np.ones(2), np.ones(3))]), "client 0", "2", "3"),
    refused("lower: rows of two shapes", lambda: solve(lower=[np.ones((3, 2)), np.ones((3, 4))]), "client 1", "(3, 4)"),
    refused("lower: two structures", lambda: solve(lower=[ROWS[0], (ROWS[1],)]), "lower", "client 1"),
    refused("lower: keys that cannot be sorted", lambda: solve(lower=[{"a": ROWS[0], 1: ROWS[0]}]), "lower", "client 0"),
    refused("upper: another number of clients", lambda: solve(upper=ROWS[:1]), "upper", "1", "2"),
    refused("upper: a number", lambda: solve(upper=5), "upper", "5"),
    refused("upper: a client without rows", lambda: solve(upper=[ROWS[0], np.ones((0, 2))]), "upper", "client 1"),
    refused("lower: not finite", lambda: solve(lower=[np.full((3, 2), np.nan)]), "not finite"),
    # where to start
    refused("x0: None", lambda: solve(x0=None), "x0", "no arrays"),
    refused("x0: an empty tree", lambda: solve(x0={}), "x0", "no arrays"),
    refused("x0: an empty array", lambda: solve(x0=np.ones(0)), "x0", "no arrays with numbers"),
    refused("x0: text", lambda: solve(x0="start"), "x0", "'start'"),
    refused("x0: text in a tree", lambda: solve(x0={"a": 1.0, "b": "b"}), "x0", "'b'"),
    refused("x0: an object", lambda: solve(x0=object()), "x0", "object"),
    refused("x0: a function", lambda: solve(x0=loss), "x0", "function"),
    refused("x0: objects", lambda: solve(x0=np.array([None])), "x0", "object"),
    refused("x0: whole numbers", lambda: solve(x0=np.arange(3)), "x0", "int64"),
    refused("x0: a whole number", lambda: solve(x0=1), "x0", "int"),
    refused("x0: complex", lambda: solve(x0=np.ones(2, complex)), "x0", "complex128"),
    refused("x0: longer than a double", lambda: solve(x0=np.longdouble(1)), "x0", "float64"),
    refused("x0: keys that cannot be sorted", lambda: solve(x0={"a": 1.0, 1: 1.0}), "x0"),
    refused("y0: None", lambda: solve(y0=None), "y0", "no arrays"),
    refused("y0: text", lambda: solve(y0="start"), "y0", "'start'"),
    refused("y0: not finite", lambda: solve(y0=np.array([np.inf, 0])), "y0", "not finite"),
    # the losses
    refused("f: None", lambda: solve(f=None), "f must be a function", "None"),
    refused("f: a number", lambda: solve(f=1.5), "f must be a function", "1.5"),
    refused("g: text", lambda: solve(g="loss"), "g must be a function", "'loss'"),
    refused("g: too few arguments", lambda: solve(g=lambda x, y: y.sum()), "g(x, y, batch)", "positional argument"),
    refused("f: too many arguments", lambda: solve(f=lambda x, y, rows, more: x), "f(x, y, batch)", "'more'"),
    refused(
        "f: shapes that do not fit", lambda: solve(f=lambda x, y, rows: (rows @ rows).sum()), "f(x, y, batch)", "TypeError"
    ),
    refused("g: raises", lambda: solve(g=lambda x, y, rows: rows["a"]), "g(x, y, batch)"),
    refused("g: branches on a number", lambda: solve(g=lambda x, y, rows: x if x > 0 else -x), "g(x, y, batch)"),
    refused("f: nothing", lambda: solve(f=lambda x, y, rows: None), "f(x, y, batch)", "None"),
    refused("f: text", lambda: solve(f=lambda x, y, rows: "loss"), "f(x, y, batch)"),
    refused("f: a whole number", lambda: solve(f=lambda x, y, rows: 3), "f(x, y, batch)", "int"),
    refused("f: a number for each row", lambda: solve(f=lambda x, y, rows: rows[:, 0]), "f(x, y, batch)", "mean"),
    refused("f: no derivative", lambda: fb.Problem(looped, loss).fx(*POINT), "∇_x f cannot be computed", "Reverse-mode"),
    refused(
        "g: no second derivative",
        lambda: fb.Problem(loss, once).gyy(*POINT, POINT[1]),
        "∇²g cannot be",
        "no derivative of this",
    ),
    refused("f: on single rows", lambda: solve(f=called_back), "on each row alone", "vmap"),
    refused("f: not hashable", lambda: solve(f=Unhashable()), "f must be hashable", "Unhashable"),
    # how long, how much, how random
    refused("algorithm: a wrong name", lambda: solve(algorithm="simfb"), "algorithm", "'simfb'"),
    refused("algorithm: its class", lambda: solve(algorithm=fb.SimFBO), "algorithm", "SimFBO"),
    refused("algorithm: not decorated", lambda: solve(algorithm=NotDecorated()), "@algorithm", "NotDecorated"),
    refused("neither rounds nor steps", lambda: solve(steps=None), "rounds", "steps"),
    refused("rounds and steps", lambda: solve(rounds=3), "rounds", "steps"),
    refused("steps: zero", lambda: solve(steps=0), "steps", "0"),
    refused("steps: a real number", lambda: solve(steps=2.0), "steps", "2.0"),
    refused("steps: text", lambda: solve(steps="5"), "steps", "'5'"),
    refused("steps: True", lambda: solve(steps=True), "steps", "True"),
    refused("steps: np.True_", lambda: solve(steps=np.True_), "steps", "True"),
    refused("steps: a list", lambda: solve(steps=[1]), "steps", "[1]"),
    refused("steps: an array", lambda: solve(steps=np.array([[1, 2], [3, 4]])), "steps", "[3, 4]"),
    refused("rounds: not a number", lambda: solve(steps=None, rounds=np.nan), "rounds", "nan"),
    refused("rounds: too few", lambda: solve(algorithm=fb.FedBiOAcc(), steps=None, rounds=1), "1 rounds are too few"),
    refused("rounds: too many", lambda: solve(steps=None, rounds=2**31), "rounds", "2147483648"),
    refused("batch_size: zero", lambda: solve(batch_size=0), "batch_size", "0"),
    refused("batch_size: negative", lambda: solve(batch_size=-1), "batch_size", "-1"),
    refused("batch_size: a real number", lambda: solve(batch_size=2.5), "batch_size", "2.5"),
    refused("batch_size: True", lambda: solve(batch_size=True), "batch_size", "True"),
    refused("batch_size: text", lambda: solve(batch_size="all"), "batch_size", "'all'"),
    refused("batch_size: 2 ** 31", lambda: solve(batch_size=2**31), "batch_size", "2147483648"),
    refused("seed: negative", lambda: solve(seed=-1), "seed", "-1"),
    refused("seed: None", lambda: solve(seed=None), "seed", "None"),
    refused("seed: a real number", lambda: solve(seed=1.5), "seed", "1.5"),
    refused("seed: too large", lambda: solve(seed=2**32), "seed", "4294967296"),
    refused("seed: a key of JAX", lambda: solve(seed=jax.random.key(0)), "seed"),
    refused("every: zero", lambda: solve(every=0), "every", "0"),
    refused("every: None", lambda: solve(every=None), "every", "None"),
    refused("chunk_size: zero", lambda: solve(chunk_size=0), "chunk_size", "0"),
    refused("chunk_size: a real number", lambda: solve(chunk_size=1.5), "chunk_size", "1.5"),
    refused("products: unknown", lambda: solve(products="float8"), "products", "float8"),
    refused("products: None", lambda: solve(products=None), "products", "None"),
    refused("loss_bound: zero", lambda: solve(loss_bound=0), "loss_bound", "0"),
    refused("loss_bound: infinite", lambda: solve(loss_bound=np.inf), "loss_bound", "inf"),
    refused("loss_bound: text", lambda: solve(loss_bound="1"), "loss_bound", "'1'"),
    # who takes part, and how much each counts
    refused("clients_per_round: more than there are", lambda: solve(clients_per_round=3), "clients", "3"),
    refused("clients_per_round: a real number", lambda: solve(clients_per_round=1.0), "clients_per_round", "1.0"),
    refused("clients_per_round and participation", lambda: solve(clients_per_round=1, participation=fb.Uniform(1)), "not both"),
    refused("participation: text", lambda: solve(participation="all"), "participation", "'all'"),
    refused("participation: a number", lambda: solve(participation=0), "participation", "0"),
    refused("participation: a class", lambda: solve(participation=fb.Everyone), "participation", "Everyone"),
    refused("participation: more than there are", lambda: solve(participation=fb.Uniform(3)), "2", "3"),
    refused("Uniform: text", lambda: fb.Uniform("3"), "size", "'3'"),
    refused("Uniform: None", lambda: fb.Uniform(None), "size", "None"),
    refused("Uniform: zero", lambda: fb.Uniform(0), "size", "0"),
    refused("Uniform: a real number", lambda: fb.Uniform(1.5), "size", "1.5"),
    refused("Bernoulli: text", lambda: fb.Bernoulli("1"), "probability", "'1'"),
    refused("Bernoulli: None", lambda: fb.Bernoulli(None), "probability", "None"),
    refused("Bernoulli: zero", lambda: fb.Bernoulli(0), "probability", "0"),
    refused("Bernoulli: more than one", lambda: fb.Bernoulli(1.5), "probability", "1.5"),
    refused("Bernoulli: a list", lambda: fb.Bernoulli([0.5]), "probability", "[0.5]"),
    refused("Dropouts: not a participation", lambda: fb.Dropouts(3, 0.5), "among", "3"),
    refused("Dropouts: None", lambda: fb.Dropouts(None, 0.5), "among", "None"),
    refused("Dropouts: one", lambda: fb.Dropouts(fb.Everyone(), 1), "probability", "1"),
    refused("Dropouts: not a number", lambda: fb.Dropouts(fb.Everyone(), np.nan), "probability", "nan"),
    refused("weights: too few", lambda: solve(weights=[1.0]), "weights", "[1.0]"),
    refused("weights: too many", lambda: solve(weights=[1, 2, 3]), "weights", "[1, 2, 3]"),
    refused("weights: a table", lambda: solve(weights=np.ones((2, 2))), "weights", "[1., 1.]"),
    refused("weights: a number", lambda: solve(weights=1.0), "weights", "1.0"),
    refused("weights: text", lambda: solve(weights=["1", "2"]), "weights", "'1'"),
    refused("weights: a text", lambda: solve(weights="12"), "weights", "['1', '2']"),
    refused("weights: a dictionary", lambda: solve(weights={0: 1, 1: 2}), "weights", "{0: 1, 1: 2}"),
    refused("weights: None in it", lambda: solve(weights=[1, None]), "weights", "None"),
    refused("weights: negative", lambda: solve(weights=[1, -1]), "weights", "-1"),
    refused("weights: zero", lambda: solve(weights=[1, 0]), "weights", "0"),
    refused("weights: not a number", lambda: solve(weights=[1, np.nan]), "weights", "nan"),
    refused("weights: infinite", lambda: solve(weights=[1, np.inf]), "weights", "inf"),
    refused("weights: masked", lambda: solve(weights=np.ma.masked_equal([1.0, 2.0], 2)), "weights", "masked"),
    refused("weights: complex", lambda: solve(weights=[1, 2j]), "weights", "2j"),
    refused("weights: one vanishes beside the other", lambda: solve(weights=[1, 1e-320]), "weights", "1e-320"),
    # sets
    refused("x_set: None", lambda: solve(algorithm=fb.MeFBO(), x_set=None), "x_set", "None"),
    refused("x_set: a pair", lambda: solve(algorithm=fb.MeFBO(), x_set=(0, 1)), "x_set", "(0, 1)"),
    refused("y_set: a class", lambda: solve(algorithm=fb.MeFBO(), y_set=fb.Ball), "y_set", "Ball"),
    refused("y_set: not projected on", lambda: solve(y_set=fb.Ball(1)), "SimFBO"),
    refused("Box: text", lambda: fb.Box("0", "1"), "low", "'0'"),
    refused("Box: None", lambda: fb.Box(0, None), "high", "None"),
    refused("Box: turned around", lambda: fb.Box(1, 0), "low", "1"),
    refused("Box: not a number", lambda: fb.Box(np.nan, 1), "low", "nan"),
    refused("Box: an array", lambda: fb.Box(np.zeros(2), 1), "low", "[0., 0.]"),
    refused("Ball: negative", lambda: fb.Ball(-1), "radius", "-1"),
    refused("Ball: infinite", lambda: fb.Ball(np.inf), "radius", "inf"),
    refused("Ball: text", lambda: fb.Ball("1"), "radius", "'1'"),
    refused("Ball: complex", lambda: fb.Ball(1j), "radius", "1j"),
    refused("Simplex: zero", lambda: fb.Simplex(0), "scale", "0"),
    refused("Simplex: None", lambda: fb.Simplex(None), "scale", "None"),
    # metrics and observers
    refused("metrics: not a function", lambda: solve(metrics={"a": 1}), "metrics must be a function", "{'a': 1}"),
    refused("metrics: a list", lambda: solve(metrics=lambda x, y: [x]), "metrics(x, y)", "dictionary", "["),
    refused("metrics: nothing", lambda: solve(metrics=lambda x, y: None), "metrics(x, y)", "None"),
    refused("metrics: raises", lambda: solve(metrics=lambda x, y: {"a": x["a"]}), "metrics(x, y)"),
    refused("metrics: too few arguments", lambda: solve(metrics=lambda x: {"a": x}), "metrics(x, y)", "positional argument"),
    refused("metrics: converts to numbers", lambda: solve(metrics=lambda x, y: {"a": float(x)}), "metrics(x, y)"),
    refused("metrics: an array", lambda: solve(metrics=lambda x, y: {"both": y}), "'both'", "[2]"),
    refused("metrics: text", lambda: solve(metrics=lambda x, y: {"name": "y"}), "metrics(x, y)"),
    refused("metrics: a key of JAX", lambda: solve(metrics=lambda x, y: {"odd": jax.random.key(0)}), "'odd'", "key"),
    refused("metrics: complex", lambda: solve(metrics=lambda x, y: {"odd": 1j * x}), "'odd'", "complex"),
    refused(
        "metrics: the upper loss", lambda: solve(metrics=lambda x, y: {"upper_loss": x}), "'upper_loss'", "the problem has"
    ),
    refused(
        "metrics: the lower loss", lambda: solve(metrics=lambda x, y: {"lower_loss": x}), "'lower_loss'", "the problem has"
    ),
    refused("metrics: a counter", lambda: solve(metrics=lambda x, y: {"rounds": x}), "'rounds'", "a run of SimFBO has"),
    refused("metrics: a diagnostic", lambda: solve(metrics=lambda x, y: {"u_norm": x}), "'u_norm'", "a run of SimFBO has"),
    refused("metrics: absences", lambda: solve(metrics=lambda x, y: {"absences": x}), "'absences'", "a run of SimFBO has"),
    refused("metrics: scheduled", lambda: solve(metrics=lambda x, y: {SCHEDULED: x}, algorithm=fb.MeFBO()), SCHEDULED, "MeFBO"),
    refused("metrics: a name that is a number", lambda: solve(metrics=lambda x, y: {1: x}), "metric", "1"),
    refused("observe: not a function", lambda: solve(observe=[]), "observe must be a function", "[]"),
    # folders and files
    refused("out: empty", lambda: solve(out=""), "out", "''"),
    refused("out: a number", lambda: solve(out=3), "out", "3"),
    refused("sweep: out", lambda: fb.sweep("quadratic", "simfbo", {"gamma_x": [1]}, rounds=5, out=" "), "out", "' '"),
    refused("tune: out", lambda: fb.tune("quadratic", "simfbo", rounds=64, out=b"t"), "out", "b't'"),
    refused("write_report: nothing", lambda: fb.write_report(), "at least one folder"),
    refused("load: no such file", lambda: fb.load("nowhere.npz"), "there is no file nowhere.npz"),
    refused("resume: None", lambda: fb.resume(None), "folder", "None"),
    refused("load: a number", lambda: fb.load(3), "path", "3"),
    refused("save: a number", lambda: fb.Solution(1, 2, []).save(3), "path", "3"),
    refused("write_report: None", lambda: fb.write_report(None), "folders", "None"),
    # sweeps and tunings
    refused("sweep: by", lambda: sweep(by=None), "by must be", "None"),
    refused("sweep: knobs", lambda: sweep(knobs="clients=2"), "knobs", "'clients=2'"),
    refused("sweep: no value", lambda: sweep(grid={"gamma_x": []}), "no value for gamma_x"),
    refused("sweep: bytes", lambda: sweep(grid={"gamma_x": b"12"}), "gamma_x", "b'12'"),
    refused("tune: algorithms", lambda: tune(algorithms=3), "algorithms", "3"),
    refused("tune: by", lambda: tune(by=3), "by must be", "3"),
    refused("tune: knobs", lambda: tune(knobs=3), "knobs", "3"),
    refused("tune: a box that is a number", lambda: tune(boxes={"gamma_x": 1}), "the box of gamma_x", "LOW:HIGH", "1"),
    refused("tune: a box that is text", lambda: tune(boxes={"gamma_x": "12"}), "the box of gamma_x", "'12'"),
    refused("tune: seconds", lambda: tune(seconds="1"), "seconds", "'1'"),
    refused("tune: no rounds", lambda: tune(rounds=None), "give either a budget of rounds"),
    # hyperparameters, and algorithms of one's own
    refused("a step size: zero", lambda: fb.SimFBO(gamma_x=0), "gamma_x", "0"),
    refused("a step size: text", lambda: fb.SimFBO(gamma_x="0.1"), "gamma_x", "'0.1'"),
    refused("a step size: None", lambda: fb.SimFBO(gamma_x=None), "gamma_x", "None"),
    refused("a step size: True", lambda: fb.SimFBO(gamma_x=True), "gamma_x", "True"),
    refused("a step size: infinite", lambda: fb.SimFBO(gamma_x=np.inf), "gamma_x", "inf"),
    refused("a step size: an array of JAX", lambda: fb.SimFBO(gamma_x=jnp.ones(3)), "gamma_x", "[1., 1., 1.]"),
    refused("a step size: a list", lambda: fb.SimFBO(gamma_x=[0.1]), "gamma_x", "[0.1]"),
    refused("a count: a real number", lambda: fb.SimFBO(local_steps=2.0), "local_steps", "2.0"),
    refused("a count: a real number of JAX", lambda: fb.SimFBO(local_steps=jnp.array(2.0)), "local_steps", "2.0"),
    refused("a count: negative", lambda: fb.SimFBO(local_steps=-2), "local_steps", "-2"),
    refused("a flag: a number", lambda: fb.FedBiO(share_batch=1), "share_batch", "1"),
    refused("a choice: unknown", lambda: fb.FedMBO(estimator="phf"), "estimator", "phf"),
    refused("a choice: None", lambda: fb.FedMBO(estimator=None), "estimator", "None"),
    refused("algorithm: not a class", lambda: fb.algorithm(3), "@algorithm", "3"),
    refused("algorithm: another class", lambda: fb.algorithm(dict), "@algorithm", "dict"),
    refused("algorithm: a field that is no setting", lambda: decorated(eta=0.1), "eta", "Mine"),
    refused("at_client: not a function", lambda: fb.at_client(3), "at_client", "3"),
    refused("at_client: None", lambda: fb.at_client(None), "at_client", "None"),
    refused("iterate: text", lambda: fb.iterate("3", lambda k, v: v, 0), "n must be", "'3'"),
    refused("iterate: a real number", lambda: fb.iterate(2.5, lambda k, v: v, 0), "n must be", "2.5"),
    refused("iterate: a real number of JAX", lambda: fb.iterate(jnp.array(2.5), lambda k, v: v, 0), "n must be", "2.5"),
    refused("iterate: negative", lambda: fb.iterate(-1, lambda k, v: v, 0), "n must be", "-1"),
    refused("iterate: None", lambda: fb.iterate(None, lambda k, v: v, 0), "n must be", "None"),
    refused("iterate: not a function", lambda: fb.iterate(2, 3, 0), "body", "3"),
    # problems and populations
    refused("Problem: f", lambda: fb.Problem(None, loss), "f must be a function", "None"),
    refused("Problem: g", lambda: fb.Problem(loss, 3), "g must be a function", "3"),
    refused("Problem: sets", lambda: fb.Problem(loss, loss, fb.Ball(1)), "sets", "Ball"),
    refused("Problem: a set in them", lambda: fb.Problem(loss, loss, Sets(x=3)), "x_set", "3"),
    refused("Problem: metrics", lambda: fb.Problem(loss, loss, metrics=[("a", loss)]), "metrics", "[("),
    refused(
        "Problem: a metric's name", lambda: fb.Problem(loss, loss, metrics=(("lower_loss", loss),)), "metrics", "lower_loss"
    ),
    refused("Problem: a metric", lambda: fb.Problem(loss, loss, metrics=(("a", 3),)), "a must be a function", "3"),
    refused("Population.build: no problem", lambda: build(problem=loss), "problem", "function"),
    refused("Population.build: upper", lambda: build(upper=None), "upper", "None"),
    refused("Population.build: clients", lambda: build(upper=ROWS[:1]), "upper", "1", "2"),
    refused("Population.build: weights", lambda: build(weights=[1]), "weights", "[1]"),
    refused("Population.build: batch_size", lambda: build(batch_size=[4]), "batch_size", "[4]"),
    refused("Population.build: batch_size of 2 ** 31", lambda: build(batch_size=2**31), "batch_size", "2147483648"),
]


@pytest.mark.parametrize("call", WORKS.values(), ids=WORKS)
def test_what_was_meant_works(call):
    call()


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line_with_its_name_and_value(call, said):
    with pytest.raises(fb.InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    for part in said:
        assert part in message
