"""FedAvg in FedJAX, for `peers.py`."""

from collections.abc import Callable

import jax

jax.tree_map = jax.tree.map  # as FedJAX calls it, whose last release is older than the new name

import fedjax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from peer import BATCH, LOCAL_STEPS, STEP, Data, answer  # noqa: E402


def loss(params, batch, _):
    w1, b1, w2, b2 = params
    logits = jax.nn.relu(batch["x"] @ w1 + b1) @ w2 + b2
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1))


batches = fedjax.ShuffleRepeatBatchHParams(BATCH, num_epochs=None, num_steps=LOCAL_STEPS, skip_shuffle=True)
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    jax.grad(loss), fedjax.optimizers.sgd(STEP), fedjax.optimizers.sgd(1.0), batches
)


def run(data: Data, rounds: int, begin: Callable[[], None]) -> tuple:
    clients = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(data.images, data.labels, strict=True)]
    state = algorithm.init(tuple(map(jnp.asarray, (data.w1, data.b1, data.w2, data.b2))))
    key = jax.random.PRNGKey(0)
    begin()
    for cohort in data.cohorts[:rounds]:
        state, _ = algorithm.apply(state, [(m, clients[m], key) for m in cohort])
    return tuple(map(np.asarray, state.params))


answer(run)
