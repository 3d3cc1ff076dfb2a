"""SimFBO's round at the papers' size against the machine's matrix product, in one run: `make bench`.

10 of 100 clients take part, batch 64, one local step. The time is that of a round inside the compiled loop; the
fraction is of the largest rate at which this machine multiplied matrices, measured between the rounds.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
from hyper_representation import operations, population
from jax import lax

from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.participation import Uniform
from fedbilevel.simulate import Simulator

PARTICIPANTS, ROUNDS, REPEATS, SIDE = 10, 50, 8, 2048


def seconds(function, *arguments) -> float:
    began = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - began


def main() -> None:
    clients, x, y = population()
    simulator = Simulator(clients, Uniform(PARTICIPANTS))
    matrix = jnp.ones((SIDE, SIDE), jnp.float32)
    multiply = jax.jit(lambda a: a @ a)
    multiply(matrix).block_until_ready()

    @jax.jit
    def rounds(algorithm, simulator, state, key):
        return lax.fori_loop(0, ROUNDS, lambda t, s: simulator.step(algorithm, s, jax.random.fold_in(key, t))[0], state)

    measured = []
    for share_batch in (True, False):
        algorithm = SimFBO(share_batch=share_batch)
        state, _ = simulator.init(algorithm, x, y, jax.random.key(0))
        began = time.perf_counter()
        compiled = rounds.lower(algorithm, simulator, state, jax.random.key(1)).compile()
        measured.append((share_batch, compiled, (algorithm, simulator, state, jax.random.key(1)), time.perf_counter() - began))
        jax.block_until_ready(compiled(*measured[-1][2]))

    product, best = float("inf"), [float("inf")] * len(measured)
    for _ in range(REPEATS):
        product = min(product, *(seconds(multiply, matrix) for _ in range(3)))
        best = [min(b, seconds(compiled, *arguments)) for b, (_, compiled, arguments, _) in zip(best, measured, strict=True)]

    peak = 2 * SIDE**3 / product
    print(f"device {jax.devices()[0].device_kind}, matrix product {peak / 1e9:.0f} GFLOP/s (float32, {SIDE} x {SIDE})\n")
    print(f"{'minibatches of a step':24}{'ms/round':>10}{'GFLOP/round':>13}{'fraction of peak':>18}{'compile s':>11}")
    for (share_batch, _, _, compile_seconds), total in zip(measured, best, strict=True):
        work, spent = PARTICIPANTS * operations(share_batch), total / ROUNDS
        name = "one, shared" if share_batch else "five, independent"
        print(f"{name:24}{1e3 * spent:10.2f}{work / 1e9:13.2f}{work / spent / peak:18.2f}{compile_seconds:11.1f}")


if __name__ == "__main__":
    main()
