"""What the clients compute: gradients and second-order products, counted by running each algorithm without numbers.

A *gradient* is one of ∇_x f, ∇_y f, ∇_x g, ∇_y g of one client on one minibatch; a *second-order product* is ∇²_yy g · v
or ∇²_xy g · v on one. A minibatch n times as large counts n times, and what is differentiated along a direction counts as a
second-order product more. Which client functions a step calls, and at how many
clients, is found with the simulated engine's own keys, so random chains, sampled cohorts and dropouts are counted as they
happened; what a function computes is found by calling it on zeros with a problem that only counts: so FedPace is taken to
use derivatives, and where it uses secants, three gradients are counted as two second-order products. All of it follows from the
experiment and the step alone: it is the same for both engines, and no run needs to store it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.core import randomness
from fedbilevel.core.population import Client
from fedbilevel.core.problem import FiveBatches, Problem, Tree
from fedbilevel.core.traffic import Totals, Traffic
from fedbilevel.engines.simulated_clients import ClientCall, Rehearsed
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.simulation import simulated

STEPS_AT_ONCE = 256


class Work(NamedTuple):
    """Numbers of minibatch derivatives, over all clients."""

    gradients: int = 0
    second_order: int = 0  # products with ∇²_yy g and ∇²_xy g


class Tally:
    """The work of a simulated experiment up to any step, for any seed; what has been counted is kept."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self._engine, task = simulated(experiment), experiment.task
        self._state = self._engine.state_shapes(experiment.algorithm, task.x, task.y, randomness.key(0))
        self._of_start = jax.jit(self._start)
        self._of_steps = jax.jit(lambda key, first: lax.map(partial(self._step, key), first + jnp.arange(STEPS_AT_ONCE)))
        self._until: dict[int, list[Work]] = {}

    def at(self, steps: Sequence[int], seed: int | None = None) -> list[Work]:
        """The work up to each of these steps, with the experiment's own seed unless another is given."""
        seed = self.experiment.options.seed if seed is None else seed
        key = randomness.key(seed)
        until = self._until.setdefault(seed, [])
        if not until:
            until.append(_work(self._of_start(key)))
        while len(until) <= max(steps, default=0):
            more = jax.tree.map(np.asarray, self._of_steps(key, len(until)))
            for k in range(STEPS_AT_ONCE):
                new = _work(jax.tree.map(lambda a: a[k], more))
                until.append(Work(until[-1].gradients + new.gradients, until[-1].second_order + new.second_order))
        return [until[step] for step in steps]

    def _start(self, key: Array) -> Traffic:
        task, algorithm = self.experiment.task, self.experiment.algorithm
        return self._engine.rehearse_init(self._counted, algorithm, task.x, task.y, randomness.fold_in(key, 0))[1]

    def _step(self, key: Array, step: Array) -> Traffic:
        return self._engine.rehearse_step(self._counted, self.experiment.algorithm, self._state, randomness.fold_in(key, step))

    def _counted(self, call: ClientCall) -> Rehearsed:
        """What the active members of a call compute, found by calling it with a problem that only counts."""
        population = self._engine.population
        with jax.ensure_compile_time_eval(), jax.disable_jit():
            here = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), call.arguments_of_one())

            def at(m: int) -> tuple[Work, Tree, bool]:
                problem = CountingProblem(population.problem.f, population.problem.g)
                client = CountingClient(problem, m, population.batch_size is None, population.own_x)
                answer = call.function(cast(Client, client), *here)
                return Work(**problem.counted), answer, client.differs

            work, answer, differs = at(0)
            each = np.asarray([at(m)[0] if differs else work for m in range(population.size)])
        gradients, second_order = (jnp.asarray(each)[call.members] * call.active[:, None]).sum(0)
        return Rehearsed(answer, (gradients, second_order))


def _work(counted: Traffic) -> Work:
    totals = Totals().plus(counted)
    return Work(totals.up, totals.down)


@dataclass(frozen=True)
class CountingProblem(Problem):
    """A problem whose derivatives are zero and are counted; instead of a batch it takes the batch's size."""

    counted: Counter[str] = field(default_factory=Counter)

    def upper_loss(self, x: Array, y: Array, batch: Any) -> Array:
        return jnp.zeros((), x.dtype)

    def fx(self, x: Array, y: Array, batch: Any) -> Array:
        return self._count("gradients", batch, x, x)

    def fy(self, x: Array, y: Array, batch: Any) -> Array:
        return self._count("gradients", batch, x, y)

    def gx(self, x: Array, y: Array, batch: Any) -> Array:
        return self._count("gradients", batch, x, x)

    def gy(self, x: Array, y: Array, batch: Any) -> Array:
        return self._count("gradients", batch, x, y)

    def gyy(self, x: Array, y: Array, batch: Any, v: Array) -> Array:
        return self._count("second_order", batch, x, y)

    def gxy(self, x: Array, y: Array, batch: Any, v: Array) -> Array:
        return self._count("second_order", batch, x, x)

    def _count(self, kind: str, size: int, x: Array, like: Array) -> Array:
        self.counted[kind] += size
        if isinstance(x, jax.core.Tracer):  # nothing else is traced here than what is differentiated
            self.counted["second_order"] += size
        return jnp.zeros_like(like)


class CountingClient:
    """Stands in for a `Client`; its batches are just their sizes, in multiples of the usual minibatch."""

    def __init__(self, problem: CountingProblem, m: int, full_batches: bool, own_x: Array | None = None):
        self.problem, self._m, self._full_batches, self.own_x = problem, m, full_batches, own_x
        self.weight = jnp.ones(())
        self.differs = False  # whether the function looked at which client this is

    @property
    def number(self) -> Array:
        """See `Client.number`."""
        self.differs = True
        return jnp.asarray(self._m)

    @property
    def rows(self) -> tuple[Array, Array]:
        """See `Client.rows`."""
        return jnp.ones((), jnp.int32), jnp.ones((), jnp.int32)

    def batch(self, k: Any = 0, times: int = 1) -> int:
        """See `Client.batch`."""
        return 1 if self._full_batches else times

    def five_batches(self, k: Any = 0, times: int = 1, shared: bool = False) -> FiveBatches:
        """See `Client.five_batches`."""
        return FiveBatches(*[cast(Any, self.batch(k, times))] * 5)

    def order(self, n: int, k: Any = 0) -> Array:
        """See `Client.order`."""
        return jnp.arange(n, dtype=jnp.int32)

    def whole(self) -> int:
        """See `Client.whole`; it counts as one batch."""
        return 1
