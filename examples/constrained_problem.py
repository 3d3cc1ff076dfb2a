"""A problem of your own, with constraints: which sources of data to learn from, in shares that add up to one.

Six clients offer training data; two of them measure what we want to predict, the others something else. x says how much
each source counts, and must lie on the simplex; y is the model. MeFBO keeps x and y in the given sets.

    python examples/constrained_problem.py
"""

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb

SOURCES, FEATURES, USEFUL = 6, 5, (1, 4)
rng = np.random.default_rng(0)
wanted = rng.normal(size=FEATURES)
truths = [wanted if m in USEFUL else rng.normal(size=FEATURES) for m in range(SOURCES)]


def sample(truth, m, rows=80):
    inputs = rng.normal(size=(rows, FEATURES))
    return {"inputs": inputs, "output": inputs @ truth + 0.1 * rng.normal(size=rows), "source": np.full(rows, m)}


training = [sample(truth, m) for m, truth in enumerate(truths)]
validation = [sample(wanted, m, rows=20) for m in range(SOURCES)]


def f(x, y, rows):
    return jnp.mean((rows["inputs"] @ y - rows["output"]) ** 2)


def g(x, y, rows):  # the mean over clients is Σ_m x_m · (loss of source m)
    return SOURCES * jnp.mean(x[rows["source"]] * (rows["inputs"] @ y - rows["output"]) ** 2) / 2


solution = fb.solve(
    f,
    g,
    jnp.full(SOURCES, 1 / SOURCES),
    jnp.zeros(FEATURES),
    lower=training,
    upper=validation,
    algorithm=fb.MeFBO(eta_x=0.2, lambda_x=0.2, penalty=10.0),
    x_set=fb.Simplex(),
    y_set=fb.Ball(10.0),
    rounds=1500,
)
print("shares of the sources:", " ".join(f"{share:.2f}" for share in solution.x), f"(sum {float(solution.x.sum()):.3f})")
print(f"loss {solution.history[0]['upper_loss']:.3f} -> {solution.metrics['upper_loss']:.3f}")
