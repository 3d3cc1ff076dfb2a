"""FedPace without each of its ingredients, on the cases of the reproduction `ours` and on closed forms.

    python benchmarks/ablation.py [--data FOLDER] [--rounds 750] [--seeds 2] [--variants NAME,...] [CASE ...]

A line for each variant: the metric after a third, two thirds and all of the rounds. Cases are numbers of panels of
`reproductions/ours.toml`, or names of tasks with closed forms.
"""

from __future__ import annotations

import abc
import argparse
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import algorithm
from fedbilevel.algorithms.fedpace import FedPace, Look, Measured, State
from fedbilevel.core.clients import Client, Clients, at_client
from fedbilevel.core.problem import Point
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.reproductions import plan
from fedbilevel.runs.simulation import simulation
from fedbilevel.runs.sweeps.batched_runs import Outcome, run_together

CLOSED_FORMS: dict[str, dict[str, Any]] = {
    "quadratic": {},
    "quadratic, condition 1000": dict(condition=1000.0),
    "valley": {},
}


@algorithm
class NoPenalty(FedPace):
    """δ = 0 throughout."""

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        state = super().init(x, y, clients)
        return state._replace(convex=jnp.ones_like(state.convex), delta=jnp.zeros_like(state.delta))


class Mended(FedPace, abc.ABC):
    """FedPace with something of its state put back after each step."""

    @abc.abstractmethod
    def mended(self, old: State, new: State) -> State:
        """The state after a step."""

    def step(self, state: State, clients: Clients, key: Array) -> State:
        return self.mended(state, super().step(state, clients, key))


@algorithm
class ConstantPenalty(Mended):
    """δ = δ₀ whatever the noise, where g is not convex."""

    def mended(self, old: State, new: State) -> State:
        return new._replace(delta=jnp.where(new.convex, 0, new.delta_0))


@algorithm
class AllRowsAlike(FedPace):
    """δ₀ without the ratio of rows."""

    @at_client
    def first_look(self, client: Client, x: Array, y: Array) -> Look:
        """With as many rows of f as of g."""
        look = super().first_look(client, x, y)
        return look._replace(rows=jnp.ones_like(look.rows))


@algorithm
class FirstCurvature(Mended):
    """L of the first round throughout."""

    def mended(self, old: State, new: State) -> State:
        return new._replace(curvature=old.curvature)


@algorithm
class AllThroughY(FedPace):
    """The limit φ on x's step whether or not D_x comes through y."""

    @at_client
    def answer(self, client: Client, z: Point, delta: Array, secant: Array) -> tuple[Point, Measured, Array]:
        """As if ∇_x f were zero."""
        d, seen, loss = super().answer(client, z, delta, secant)
        return d, seen._replace(fx=jnp.zeros_like(seen.fx)), loss


@algorithm
class UFollowsByItself(FedPace):
    """The limit φ on x's step without what x changes in u's equation."""

    @at_client
    def answer(self, client: Client, z: Point, delta: Array, secant: Array) -> tuple[Point, Measured, Array]:
        """As if ∂_x D_u h were zero."""
        d, seen, loss = super().answer(client, z, delta, secant)
        sketches = seen.sketches._replace(turned_u=jnp.zeros_like(seen.sketches.turned_u))
        return d, seen._replace(sketches=sketches), loss


@algorithm
class OnePace(Mended):
    """p = 1 throughout."""

    def mended(self, old: State, new: State) -> State:
        return new._replace(pace=new.pace._replace(p=jnp.ones_like(new.pace.p)))


@algorithm
class LastIterate(Mended):
    """The last iterates are reported."""

    def mended(self, old: State, new: State) -> State:
        return new._replace(x=new.z.x, y=new.z.y)


VARIANTS: Mapping[str, Callable[[], FedPace]] = {
    "FedPace": FedPace,
    "no penalty: δ = 0": NoPenalty,
    "δ = δ₀ throughout": ConstantPenalty,
    "δ₀ without rows": AllRowsAlike,
    "no momentum": lambda: FedPace(beta=0.0, c=1.0, c_x=0.4),
    "one minibatch": lambda: FedPace(minibatches=1),
    "L of the first round": FirstCurvature,
    "no limit by curvature": lambda: FedPace(c_x=1e9),
    "no limit by y's lag": lambda: FedPace(phi=1e9),
    "that limit for all D_x": AllThroughY,
    "that limit without u": UFollowsByItself,
    "φ = 10 %": lambda: FedPace(phi=0.1),
    "p = 1": OnePace,
    "last iterate": LastIterate,
}


def configuration(case: str, data: str, rounds: int, seed: int) -> Configuration:
    """A case with FedPace's defaults."""
    options = RunOptions(seed=seed, rounds=rounds, every=max(1, rounds // 15), loss_bound=plan.LOSS_BOUND)
    if case in CLOSED_FORMS:
        return Configuration.resolve(case.partition(",")[0], CLOSED_FORMS[case], "fedpace", {}, options)
    panel = plan.read("ours").panels[int(case)]
    return Configuration.resolve(panel.task, dict(panel.knobs), "fedpace", {}, options, data=data)


def measure(case: str, variants: list[str], data: str, rounds: int, seeds: int) -> None:
    """Print a line for each variant of a case."""
    metric = "x_error" if case in CLOSED_FORMS else "test_accuracy"
    experiments = [configuration(case, data, rounds, seed).experiment() for seed in range(1, seeds + 1)]
    print(f"{case if case in CLOSED_FORMS else plan.read('ours').panels[int(case)].name}, {metric}", flush=True)
    for name in variants:
        runs = [simulation(experiments[0].task, VARIANTS[name](), **dataclasses.asdict(e.options)) for e in experiments]
        outcomes = run_together(runs)
        after = (_after(outcomes, metric, rounds * part // 3) for part in (1, 2, 3))
        print(f"    {name:24s} {'  '.join(after)}", flush=True)
        jax.clear_caches()


def _after(outcomes: Sequence[Outcome], metric: str, rounds: int) -> str:
    """The mean of a metric after so many rounds, over the runs that came so far."""
    found = [next((row[metric] for row in o.rows if (row["rounds"] or 0) >= rounds), None) for o in outcomes]
    known = [value for value in found if value is not None]
    if not known:
        return "diverged"
    mean = statistics.fmean(known)
    text = f"{mean:8.1e}" if metric == "x_error" else f"{100 * mean:5.1f}"
    return text if len(known) == len(found) else f"{text} ({len(known)} of {len(found)})"


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CLOSED_FORMS))
    parser.add_argument("--data", default="")
    parser.add_argument("--rounds", type=int, default=750)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    given = parser.parse_args()
    for case in given.cases:
        measure(case, given.variants.split(","), given.data, given.rounds, given.seeds)


if __name__ == "__main__":
    main()
