"""What the papers' theorems promise under noise, fitted over many runs. Slow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.participation import Everyone
from fedbilevel.core.population import Population
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.quadratic import Quadratic

pytestmark = pytest.mark.slow


MOST = 16
EQUAL = Quadratic(
    clients=MOST, noise=0.3, rows=256, condition=2.0, hessian_heterogeneity=0.0, linear_heterogeneity=0.0, x_dimension=3
)  # all clients have the same problem, and rows of their own


def final_errors(algorithm, clients, steps, runs, start=None):
    """|x - x*|² at the end of independent runs with that many clients, from x* unless told, all vmapped."""
    task, x_star = EQUAL.build(), EQUAL.coefficients().mean().upper()
    shards = (task.population.upper, task.population.lower)
    parts = [[jax.tree.map(lambda a: np.asarray(a[256 * m : 256 * (m + 1)]), s.rows) for m in range(clients)] for s in shards]
    simulator = SimulatedEngine(Population.build(task.population.problem, *parts, batch_size=1), Everyone())

    def run(key):
        state, *_ = simulator.init(algorithm, jnp.asarray(x_star if start is None else start), task.y, key)
        body = lambda t, state: simulator.step(algorithm, state, jax.random.fold_in(key, t))[0]  # noqa: E731
        return jax.lax.fori_loop(1, steps + 1, body, state).x

    x = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), runs))
    return np.sum((np.asarray(x) - x_star) ** 2, 1)


def test_fedbioaccs_error_falls_linearly_with_the_number_of_clients():
    algorithm = fb.FedBiOAcc(eta=0.3, delta=1.0, local_steps=2)
    sizes = [2, 4, 8, MOST]
    errors = [final_errors(algorithm, size, 400, 64).mean() for size in sizes]
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -1.3 <= slope <= -0.7


def test_fedbioacc_beats_fedbio_after_equal_samples():
    """Each with the best of four steps on x. FedBiOAcc draws as many rows as FedBiO, and evaluates each twice."""
    far = np.zeros(3)
    fedbio = [
        final_errors(fb.FedBiO(eta=eta, gamma=0.3, tau=0.3, local_steps=2), 4, 1500, 192, far)
        for eta in (0.001, 0.003, 0.01, 0.03)
    ]
    fedbioacc = [
        final_errors(fb.FedBiOAcc(eta=eta, delta=1.0, local_steps=2), 4, 1500, 192, far) for eta in (0.01, 0.03, 0.1, 0.3)
    ]
    best, theirs = (min(grid, key=np.mean) for grid in (fedbioacc, fedbio))
    error = np.sqrt((best.var() + theirs.var()) / len(best))
    assert theirs.mean() - best.mean() > 4 * error


def test_simfbo_with_unequal_local_steps_solves_another_problem_and_shrofbo_the_right_one():
    """Clients with more local steps weigh more, by τ_m; with vanishing local steps that is the whole effect."""
    tiny = dict(eta_x=1e-9, eta_y=1e-9, eta_u=1e-9, gamma_x=0.05, gamma_y=0.2, gamma_u=0.2, spread=2)
    knobs = Quadratic(clients=6, condition=4.0, hessian_heterogeneity=0.3)
    k = knobs.coefficients()
    tau = 1 + np.arange(6) % 3
    skewed = type(k)(k.A, k.B, k.b, k.c, k.d, tau / tau.sum())
    for rescale, solved in ((False, skewed), (True, k)):
        *_, last = simulation(knobs.build(), fb.SimFBO(**tiny, rescale=rescale), steps=6000, every=10**6).run()
        np.testing.assert_allclose(last.state.x, solved.mean().upper(), rtol=1e-6)
    assert np.linalg.norm(skewed.mean().upper() - k.mean().upper()) > 0.05 * np.linalg.norm(k.mean().upper())
