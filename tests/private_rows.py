"""A small problem whose derivatives all depend on its rows, and an audit of what is told about one of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import beta

from fedbilevel.core.population import Population
from fedbilevel.core.privacy import RowPrivacy
from fedbilevel.core.problem import Problem
from fedbilevel.tasks.base import Task


def f(x, y, rows):
    return jnp.mean(0.5 * jnp.sum((y - rows) ** 2, 1) + jnp.sin(rows @ x))


def g(x, y, rows):
    return jnp.mean(jnp.logaddexp(0, 3 * rows @ y) * jnp.exp(0.3 * rows @ x) + 0.5 * jnp.sum(y**2))


def some_rows(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, 3)) for n in sizes]


def population(sizes=(7, 12), batch_size=None, **privacy):
    made = Population.build(Problem(f, g), some_rows(sizes, 1), some_rows(sizes), None, batch_size)
    return dataclasses.replace(made, privacy=RowPrivacy(**privacy) if privacy else None)


def task(sizes=(400, 400, 400), batch_size=20):
    x, y = np.zeros(3), np.zeros(3)
    return Task.of(f, g, x, y, lower=some_rows(sizes), upper=some_rows(sizes, 1), batch_size=batch_size)


Y = jnp.zeros(3), jnp.asarray([2.0, 0, 0])  # on both sides of the canary's own best y


def two_gradients(client, points):
    """A client function that asks two gradients on one draw, at points between which the canary's changes its sign."""
    batch = client.batch()
    first, second = (client.problem.gy(jnp.zeros(3), y, batch) for y in points)
    return first - second


def audited(privacy, delta, trials, batch_size=None, rows=8, weight=10.0):
    """A lower bound on ε of `two_gradients`, from how well a threshold tells a canary's presence."""

    def loss(x, y, rows):  # a new function for each audit, so that nothing compiled before is used
        present, place = rows[:, 0], rows[:, 1:]
        return jnp.mean(present * weight * 0.5 * jnp.sum((y - place) ** 2, 1))

    def data(present):
        return [np.r_[[[present, 1.0, 0, 0]], np.zeros((rows - 1, 4))]]

    def answers(present):
        made = Population.build(Problem(loss, loss), data(present), data(present), None, batch_size)
        made = dataclasses.replace(made, privacy=privacy)
        keys = jax.random.split(jax.random.key(int(present)), trials)
        return np.asarray(jax.jit(jax.vmap(lambda key: two_gradients(made.client(0, key), Y)))(keys))[:, 0]

    return told_apart(-answers(1.0), -answers(0.0), delta)


def told_apart(present, absent, delta):
    """With confidence 0.999 a lower bound on ε, from numbers that are larger if a canary is present.

    The threshold is chosen on half of them and judged on the others.
    """
    grid = np.quantile(np.r_[present[::2], absent[::2]], np.linspace(0.3, 0.9995, 60))

    def bound(present, absent, t):
        hits, alarms, n = (present > t).sum(), (absent > t).sum(), len(present)
        least = beta.ppf(0.0005, hits, n - hits + 1) if hits else 0.0
        most = beta.ppf(0.9995, alarms + 1, n - alarms)
        return np.log((least - delta) / most) if least > delta else -np.inf

    chosen = max(grid, key=lambda t: bound(present[::2], absent[::2], t))
    return bound(present[1::2], absent[1::2], chosen)
