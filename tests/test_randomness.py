"""Our random bits are JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import deployed

from fedbilevel.core import randomness
from fedbilevel.core.participation import Everyone
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions


def words(keys):
    return np.asarray(jax.random.key_data(keys))


@pytest.fixture(params=["cpu", "gpu"], scope="module")
def programs_for(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: request.param)
        jax.clear_caches()  # of programs for the other
        program = str(jax.make_jaxpr(lambda key: randomness.bits(key, (2,)))(jax.random.key(0)))
        assert ("scan" in program) == (request.param == "cpu")  # a loop
        yield
    jax.clear_caches()


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_keys_and_bits_are_those_of_jax(seed, programs_for):
    key = jax.random.key(seed)
    for number in (0, 1, 12345, 2**31 - 1):
        np.testing.assert_array_equal(words(randomness.fold_in(key, number)), words(jax.random.fold_in(key, number)))
    np.testing.assert_array_equal(words(jnp.stack(randomness.split(key))), words(jax.random.split(key)))
    np.testing.assert_array_equal(randomness.bits(key, (3, 2, 7)), jax.random.bits(key, (3, 2, 7), jnp.uint32))
    for n in (1, 2, 100, 3000):  # two passes of sorting from 1,626 on
        np.testing.assert_array_equal(randomness.permutation(key, n), jax.random.permutation(key, n))


def test_many_keys_at_once_give_what_each_gives_alone(programs_for):
    keys = jax.random.split(jax.random.key(3), 5)
    together = jax.jit(jax.vmap(lambda key, k: randomness.bits(randomness.fold_in(key, k), (4,))))(keys, jnp.arange(5))
    for k in range(5):
        np.testing.assert_array_equal(together[k], jax.random.bits(jax.random.fold_in(keys[k], k), (4,), jnp.uint32))


def test_a_seed_means_the_same_whatever_generator_jax_is_set_to():
    expected = words(jax.random.key(5)), words(jax.random.fold_in(jax.random.key(5), 3))
    with jax.default_prng_impl("rbg"):
        key = randomness.wrapped(words(randomness.key(5)))
        np.testing.assert_array_equal(words(key), expected[0])
        np.testing.assert_array_equal(words(randomness.fold_in(key, 3)), expected[1])


@pytest.mark.parametrize("remote", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_is_the_same_whatever_generator_jax_is_set_to(remote):
    def end():
        experiment = Configuration.resolve(
            "hyper-representation", {"clients": 3}, "simfbo", {}, RunOptions(steps=2)
        ).experiment()
        task, algorithm, key = experiment.task, experiment.algorithm, randomness.key(1)
        engine = deployed(algorithm, task.population, Everyone())[0] if remote else experiment.engine
        state, *_ = engine.init(algorithm, task.x, task.y, key)
        return engine.step(algorithm, state, key)[0].x

    with jax.default_prng_impl("rbg"):  # first, since programs are kept
        other = end()
    np.testing.assert_array_equal(end(), other)
