"""Rounds as in the field's public code, in PyTorch with one client after another, against ours.

Hyper-representation at the papers' size: an MLP 784-200-10 whose hidden layer is x and whose head is y, minibatches of
64. PyTorch keeps all data in its device's memory, draws indices and gathers rows as we do (the public code's loaders are
slower), and computes second-order products by differentiating a gradient again. It computes FedNest's corrections, which
are zero with one local step, as FedNest's code does; a compiler may notice that they are zero. Both sides first make the same
steps with the same cohorts and minibatches, and must agree; then both are timed alternately, each with its own draws.
Products are in full float32 on both sides.

    pip install -e '.[bench]' && python benchmarks/sequential_torch.py
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU's memory is for both

import jax
import numpy as np
import torch
from papers import experiment
from timing import compiled, in_turns, ratio, seconds
from torch import Tensor

from fedbilevel.runs.experiment import Experiment

Layer = tuple[Tensor, ...]  # weights and bias
Rows = tuple[Tensor, Tensor]  # images and labels
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "simfbo": ("simfbo", {}),
    "simfbo, one minibatch": ("simfbo", dict(share_batch=True)),
    "fednest": ("fednest", {}),
    "mefbo": ("mefbo", {}),
}
AGREEMENT, CHECKED_STEPS = (1e-4, 1e-3), 5  # of x and of y, and of their ways in those steps
REPEATS, TURN_SECONDS = 5, 0.5  # turns, and about how long PyTorch has in each


class Batch:
    """Images and labels for f and for g, gathered when a loss first asks for them."""

    def __init__(self, upper: Callable[[], Rows], lower: Callable[[], Rows]):
        self._gather_upper, self._gather_lower = upper, lower

    @functools.cached_property
    def upper(self) -> Rows:
        return self._gather_upper()

    @functools.cached_property
    def lower(self) -> Rows:
        return self._gather_lower()


@dataclass(frozen=True)
class Losses:
    """f and g at x = (W, b) and y = (V, c), with their derivatives."""

    center: float
    spread: float
    ridge: float

    def f(self, x: Layer, y: Layer, batch: Batch) -> Tensor:
        return self._cross_entropy(x, y, batch.upper)

    def g(self, x: Layer, y: Layer, batch: Batch) -> Tensor:
        return self._cross_entropy(x, y, batch.lower) + self.ridge * sum(p.square().sum() for p in y)

    def _cross_entropy(self, x: Layer, y: Layer, rows: Rows) -> Tensor:
        images, labels = rows
        pixels = (images.float() / 255 - self.center) / self.spread
        hidden = torch.relu(torch.addmm(x[1], pixels, x[0]))
        return torch.nn.functional.cross_entropy(torch.addmm(y[1], hidden, y[0]), labels)

    def gy(self, x: Layer, y: Layer, batch: Batch) -> Layer:
        y = variables(y)
        return torch.autograd.grad(self.g(x, y, batch), y)

    def fx(self, x: Layer, y: Layer, batch: Batch) -> Layer:
        x = variables(x)
        return torch.autograd.grad(self.f(x, y, batch), x)

    def fy(self, x: Layer, y: Layer, batch: Batch) -> Layer:
        y = variables(y)
        return torch.autograd.grad(self.f(x, y, batch), y)

    def gyy(self, x: Layer, y: Layer, batch: Batch, v: Layer) -> Layer:
        y = variables(y)
        gradient = torch.autograd.grad(self.g(x, y, batch), y, create_graph=True)
        return torch.autograd.grad(gradient, y, v)

    def gxy(self, x: Layer, y: Layer, batch: Batch, v: Layer) -> Layer:
        x, y = variables(x), variables(y)
        gradient = torch.autograd.grad(self.g(x, y, batch), y, create_graph=True)
        return torch.autograd.grad(gradient, x, v)

    def all_of_f(self, x: Layer, y: Layer, batch: Batch) -> tuple[Layer, Layer]:
        """∇_x f and ∇_y f from one pass."""
        x, y = variables(x), variables(y)
        both = torch.autograd.grad(self.f(x, y, batch), (*x, *y))
        return both[:2], both[2:]

    def all_of_g(self, x: Layer, y: Layer, batch: Batch, v: Layer) -> tuple[Layer, Layer, Layer]:
        """∇_y g, ∇²_xy g v and ∇²_yy g v from one pass, differentiated once more."""
        x, y = variables(x), variables(y)
        gradient = torch.autograd.grad(self.g(x, y, batch), y, create_graph=True)
        both = torch.autograd.grad(gradient, (*x, *y), v)
        return tuple(p.detach() for p in gradient), both[:2], both[2:]


def variables(layer: Layer) -> Layer:
    return tuple(p.detach().requires_grad_() for p in layer)


def plus(a: Layer, scale: float, b: Layer) -> Layer:
    return tuple(p + scale * q for p, q in zip(a, b, strict=True))


def scaled(scale: float, a: Layer) -> Layer:
    return tuple(scale * p for p in a)


def mean(layers: Iterable[Any]) -> Any:
    """Of equally weighted clients' results, each a layer or a tuple of layers."""
    n, total = 0, None
    for result in layers:
        n += 1
        total = result if total is None else _added(total, result)
    return _divided(total, n)


def _added(a: Any, b: Any) -> Any:
    return a + b if isinstance(a, Tensor) else tuple(_added(p, q) for p, q in zip(a, b, strict=True))


def _divided(a: Any, n: int) -> Any:
    return a / n if isinstance(a, Tensor) else tuple(_divided(p, n) for p in a)


# --- the algorithms: one local step, as the experiments have it ---


def simfbo(h: Any, losses: Losses, z: tuple, clients: Clients, t: int, length: int) -> tuple:
    """SimFBO, Algorithm 1."""

    def direction(batches: list[Batch]) -> tuple[Layer, Layer, Layer]:
        x, y, u = z
        if h.share_batch:
            (fx, fy), (gy, gxy, gyy) = losses.all_of_f(x, y, batches[0]), losses.all_of_g(x, y, batches[0], u)
        else:
            for_y, g1, g2, f1, f2 = batches
            fx, fy, gy = losses.fx(x, y, f1), losses.fy(x, y, f2), losses.gy(x, y, for_y)
            gxy, gyy = losses.gxy(x, y, g1, u), losses.gyy(x, y, g2, u)
        return plus(fx, -1, gxy), gy, plus(gyy, -1, fy)

    q = mean(direction(client(1 if h.share_batch else 5)) for client in clients.call(clients.draw()))
    x, y, u = (plus(a, -step, d) for a, step, d in zip(z, (h.gamma_x, h.gamma_y, h.gamma_u), q, strict=True))
    norm = torch.sqrt(sum(p.square().sum() for p in u))
    return x, y, scaled(torch.clamp(h.radius / norm, max=1.0), u)  # type: ignore[arg-type]


def fednest(h: Any, losses: Losses, z: tuple, clients: Clients, t: int, length: int) -> tuple:
    """FedNest: FedSVRG on y, one Neumann chain that all share, a corrected step on x."""
    x, y = z
    for _ in range(h.lower_rounds):
        S = clients.draw()
        q = mean(losses.gy(x, y, *client(1)) for client in clients.call(S))

        def descended(batch: Batch) -> Layer:
            correction = plus(losses.gy(x, y, batch), -1, losses.gy(x, y, batch))
            return plus(y, -h.beta, plus(correction, 1, q))

        y = mean(descended(*client(1)) for client in clients.call(S))
    p = mean(losses.fy(x, y, *client(1)) for client in clients.call(clients.draw()))
    p = scaled(h.neumann_terms / h.smoothness, p)
    for _ in range(length):
        hessian = mean(losses.gyy(x, y, *client(1), p) for client in clients.call(clients.draw()))
        p = plus(p, -1 / h.smoothness, hessian)

    def assembled(batch: Batch) -> Layer:
        return plus(losses.fx(x, y, batch), -1, losses.gxy(x, y, batch, p))

    hypergradient = mean(assembled(*client(1)) for client in clients.call(clients.draw()))

    def moved(batch: Batch) -> Layer:
        correction = plus(losses.fx(x, y, batch), -1, losses.fx(x, y, batch))
        return plus(x, -h.alpha, plus(correction, 1, hypergradient))

    return mean(moved(*client(1)) for client in clients.call(clients.draw())), y


def mefbo(h: Any, losses: Losses, z: tuple, clients: Clients, t: int, length: int) -> tuple:
    """MeFBO, Algorithm 1."""
    x, y, theta = z
    c = h.penalty * (t + 1.0) ** h.growth
    pull = scaled(1 / h.proximal, plus(y, -1, theta))

    def direction(batch: Batch) -> tuple[Layer, Layer, Layer]:
        a, b = variables(x), variables(y)
        at_y = torch.autograd.grad(losses.f(a, b, batch) / c + losses.g(a, b, batch), (*a, *b))
        a, b = variables(x), variables(theta)
        at_theta = torch.autograd.grad(losses.g(a, b, batch), (*a, *b))
        return plus(at_y[:2], -1, at_theta[:2]), plus(at_y[2:], -1, pull), plus(at_theta[2:], -1, pull)

    q = mean(direction(*client(1)) for client in clients.call(clients.draw()))
    steps = (h.lambda_x, h.lambda_y, h.lambda_theta)
    return tuple(plus(a, -step, d) for a, step, d in zip(z, steps, q, strict=True))


STEPS: dict[str, Callable[..., tuple]] = {"simfbo": simfbo, "fednest": fednest, "mefbo": mefbo}


# --- who takes part, and with which rows ---


class Data:
    """All clients' rows on a device."""

    def __init__(self, of: Experiment, device: str):
        self.device, self.size = device, of.task.population.batch_size
        self.upper, self.lower = (self._moved(shards) for shards in (of.task.population.upper, of.task.population.lower))

    def _moved(self, shards: Any) -> tuple[Rows, list[int], list[int]]:
        images, labels = (torch.tensor(np.asarray(a)).to(self.device) for a in shards.rows)
        return (images.reshape(-1, 784), labels.long()), np.asarray(shards.start).tolist(), np.asarray(shards.size).tolist()

    def drawn(self, shards: tuple[Rows, list[int], list[int]], m: int) -> Rows:
        """A minibatch of client m's rows."""
        (images, labels), start, size = shards
        index = torch.randint(start[m], start[m] + size[m], (self.size,), device=self.device)
        return images[index], labels[index]


class Clients:
    """Who takes part, drawn by PyTorch."""

    def __init__(self, of: Experiment, data: Data):
        self.of, self.data = of, data

    def draw(self) -> list[int]:
        """A cohort."""
        return torch.randperm(self.of.task.population.size)[: self.of.engine.participation.size].tolist()  # type: ignore[attr-defined]

    def call(self, cohort: list[int]) -> Iterator[Callable[[int], list[Batch]]]:
        """For each of the cohort in turn, what draws so many minibatches."""
        data = self.data
        for m in cohort:
            upper, lower = (functools.partial(data.drawn, shards, m) for shards in (data.upper, data.lower))
            yield lambda n, upper=upper, lower=lower: [Batch(upper, lower) for _ in range(n)]


@functools.partial(jax.jit, static_argnums=3)
def _drawn_by_us(population: Any, m: int, key: jax.Array, n: int) -> Any:
    """One minibatch, or five, of client m's call with this key."""
    client = population.client(m, jax.random.fold_in(key, m))
    return (client.batch(),) if n == 1 else client.five_batches()


class SameClients(Clients):
    """The cohorts and minibatches of our own step with a key."""

    def __init__(self, of: Experiment, data: Data, key: jax.Array):
        super().__init__(of, data)
        self.key, self.calls = key, 0

    def draw(self) -> list[int]:
        ids, _ = self.of.engine.participation.draw(self._next(), self.of.task.population.size)
        return np.asarray(ids).tolist()

    def call(self, cohort: list[int]) -> Iterator[Callable[[int], list[Batch]]]:
        key, population = self._next(), self.of.task.population
        for m in cohort:

            def batches(n: int, m: int = m) -> list[Batch]:
                drawn = _drawn_by_us(population, m, key, n)
                return [Batch(*(functools.partial(self._tensors, rows) for rows in batch)) for batch in drawn]

            yield batches

    def _tensors(self, rows: Any) -> Rows:
        images, labels = (torch.tensor(np.asarray(a)).to(self.data.device) for a in rows)
        return images.reshape(-1, 784), labels.long()

    def _next(self) -> jax.Array:
        self.calls += 1
        return jax.random.fold_in(self.key, self.calls - 1)


# --- agreement and time ---


def losses_of(of: Experiment) -> Losses:
    """The network's scaling of pixels and the weight of |y|², as the task has them."""
    images = np.concatenate([np.asarray(s.rows.images) for s in (of.task.population.upper, of.task.population.lower)])
    return Losses(float(images.mean() / 255), float(images.std() / 255), 0.05)


def start_of(of: Experiment, device: str) -> tuple:
    loss: Any = of.task.population.problem.f
    layers = (loss.x.tree(of.task.x)[0], loss.y.tree(of.task.y)[0])
    x, y = (tuple(torch.tensor(np.asarray(p)).to(device) for p in layer) for layer in layers)
    third = {"simfbo": (scaled(0.0, y),), "mefbo": (y,), "fednest": ()}
    return x, y, *third[name_of(of)]


def name_of(of: Experiment) -> str:
    return {"SimFBO": "simfbo", "FedMBO": "fednest", "MeFBO": "mefbo"}[type(of.algorithm).__name__]


def chain_length(of: Experiment, server_key: jax.Array) -> int:
    """The Neumann rounds of FedNest's step; 0 for the others."""
    return int(of.algorithm.lengths(server_key, of.engine.participation.size).max()) if name_of(of) == "fednest" else 0  # type: ignore[attr-defined]


def disagreement(of: Experiment, device: str) -> np.ndarray:
    """The length of the difference of x or y after some steps, relative to its own and to its way from the start.

    (Not the largest entry: where rounding makes one of millions of activations pass 0 on one side only, a column of x
    differs by a hundred times as much as all others.)
    """
    losses, z, data = losses_of(of), start_of(of, device), Data(of, device)
    state, *_ = of.engine.init(of.algorithm, of.task.x, of.task.y, jax.random.key(0))
    step = jax.jit(type(of.engine).step)
    for t in range(CHECKED_STEPS):
        key = jax.random.fold_in(jax.random.key(1), t)
        server_key, clients_key = jax.random.split(key)
        z = STEPS[name_of(of)](of.algorithm, losses, z, SameClients(of, data, clients_key), t, chain_length(of, server_key))
        state, *_ = step(of.engine, of.algorithm, state, key)
    ours = [np.asarray(v) for v in (state.x, state.y)]
    theirs = [np.concatenate([p.detach().cpu().numpy().ravel() for p in v]) for v in z[:2]]
    own, way, apart = (
        np.array([np.linalg.norm(a - b) for a, b in zip(ours, others, strict=True)])
        for others in ((0.0, 0.0), (of.task.x, of.task.y), theirs)
    )
    return np.array([(apart / own).max(), (apart / way).max()])


def sequential(of: Experiment, device: str, count: int) -> Callable[[], Any]:
    """What makes so many steps from the start in PyTorch, with the same numbers of rounds as ours has."""
    losses, start, clients = losses_of(of), start_of(of, device), Clients(of, Data(of, device))
    keys = [jax.random.split(jax.random.fold_in(jax.random.key(of.options.seed), t))[0] for t in range(count)]
    lengths = [chain_length(of, key) for key in keys]

    def work() -> None:
        z = start
        for t, length in enumerate(lengths):
            z = STEPS[name_of(of)](of.algorithm, losses, z, clients, t, length)
        if device == "cuda":
            torch.cuda.synchronize()

    return work


def compare(name: str, participants: int, devices: list[str], data: str) -> dict[str, Any]:
    """One line of the table."""
    algorithm, settings = CASES[name]
    of = experiment(algorithm, data=data, clients_per_round=participants, products="float32", **settings)
    own, way = differences = np.max([disagreement(of, device) for device in devices], 0)
    if not np.all(differences <= AGREEMENT):
        raise SystemExit(
            f"{name}, {participants} clients: after {CHECKED_STEPS} steps x or y differs by {own:.1e}, {way:.1e} of its way"
        )
    line: dict[str, Any] = dict(name=name, participants=participants, difference=own)
    for device in devices:
        one = sequential(of, device, 1)
        one()
        count = max(1, min(50, round(TURN_SECONDS / seconds(one))))
        ours, _ = compiled(of, count)
        works = {"ours": ours, "torch": sequential(of, device, count)}
        in_turns(works, 1)
        taken = in_turns(works, REPEATS)
        line[f"ours beside {device}"] = 1e3 * statistics.median(taken["ours"]) / count
        line[device] = 1e3 * statistics.median(taken["torch"]) / count
        line[f"{device} ratio"] = ratio(taken["torch"], taken["ours"])
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--participants", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES), help="some of the cases")
    parser.add_argument("--data", default="", help="folder with MNIST; generated images of its shape unless given")
    given = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    on = jax.devices()[0].device_kind
    print(f"ours: JAX {jax.__version__} on {on}; PyTorch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'algorithm, ms a step':22}{'clients':>8}{'differ by':>11}", end="")
    print("".join(f"{'ours':>9}{f'torch {device}':>12}{'ratio':>8}" for device in devices))
    for participants in given.participants:
        for name in given.only:
            line = compare(name, participants, devices, given.data)
            print(f"{name:22}{participants:8}{line['difference']:11.0e}", end="")
            each = ((line[f"ours beside {device}"], line[device], line[f"{device} ratio"]) for device in devices)
            print("".join(f"{ours:9.2f}{theirs:12.1f}{ratio:8.1f}" for ours, theirs, ratio in each), flush=True)


if __name__ == "__main__":
    main()
