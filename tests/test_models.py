"""The networks against JAX's own convolutions, known sizes, and finite differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from fedbilevel.tasks.models import conv4, convolution, lenet, mlp

made_conv4 = jax.jit(conv4.init, static_argnums=(1, 2))


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("size", "stride", "side"), [(3, 1, 7), (3, 2, 7), (3, 2, 8), (5, 1, 9), (1, 1, 4)])
def test_patches_times_a_matrix_is_a_convolution(size, stride, side):
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.standard_normal((2, side, side, 3)))
    weights, bias = rng.standard_normal((size * size * 3, 4)), rng.standard_normal(4)
    ours = convolution.convolve(images, (jnp.asarray(weights), jnp.asarray(bias)), size, stride)
    layout = ("NHWC", "HWIO", "NHWC")
    theirs = lax.conv_general_dilated(
        images, weights.reshape(size, size, 3, 4), (stride, stride), "VALID", dimension_numbers=layout
    )
    np.testing.assert_allclose(ours, theirs + bias, rtol=1e-10, atol=1e-12)


def test_pooling():
    images = jnp.arange(2 * 5 * 4 * 3.0).reshape(2, 5, 4, 3)
    by_hand = np.asarray(images)[:, :4].reshape(2, 2, 2, 2, 2, 3)
    np.testing.assert_array_equal(convolution.pooled_max(images), by_hand.max((2, 4)))


def test_lenet_has_lecuns_61706_weights_and_takes_images_up_to_32_pixels():
    layers = jax.jit(lenet.init, static_argnums=(1, 2))(jax.random.key(0), 1, 10)
    assert count(layers) == 61_706
    for side in (8, 28, 32):
        assert jax.eval_shape(lenet.apply, layers, np.ones((3, side, side, 1))).shape == (3, 10)
    apply, image = jax.jit(lenet.apply), np.ones((1, 28, 28, 1))
    edge = apply(layers, np.pad(image, ((0, 0), (2, 2), (2, 2), (0, 0))))
    np.testing.assert_allclose(apply(layers, image), edge)


def test_conv4_has_finns_sizes_and_normalises_over_the_images_of_a_task():
    blocks = made_conv4(jax.random.key(0), 1, 64)
    assert count(blocks) == (9 * 64 + 64) + 3 * (9 * 64 * 64 + 64) + 4 * 128
    images = np.random.default_rng(1).random((5, 28, 28, 1))
    apply = jax.jit(conv4.apply, static_argnames="strided")
    features = apply(blocks, images, strided=True)
    assert features.shape == (5, 64)
    colour = jax.eval_shape(made_conv4, jax.random.key(0), 3, 64)
    assert jax.eval_shape(apply, colour, np.ones((2, 84, 84, 3)), strided=False).shape == (2, 1600)
    np.testing.assert_allclose(features, apply(blocks, 3 * images, strided=True), rtol=0.02, atol=0.02)  # scale-free
    assert not np.allclose(features[:2], apply(blocks, images[:2], strided=True))


def test_the_derivatives_of_normalised_maps_are_those_that_jax_finds():
    def plainly(maps, scale, shift):
        mean, variance = maps.mean((0, 1, 2)), maps.var((0, 1, 2))
        return (maps - mean) / jnp.sqrt(variance + conv4.EPSILON) * scale + shift

    rng = np.random.default_rng(0)
    given = tuple(rng.standard_normal(shape) for shape in [(2, 3, 4, 5), (5,), (5,), (2, 3, 4, 5)])

    def derivatives(normalised):
        slopes = jax.grad(lambda *a: jnp.sum(jnp.sin(a[3] * normalised(*a[:3]))), (0, 1, 2))
        twice = jax.grad(lambda *a: sum(jnp.sum(jnp.cos(s)) for s in slopes(*a)), (0, 1, 2))
        return jax.jit(lambda *a: (normalised(*a[:3]), slopes(*a), twice(*a)))(*given)

    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11), derivatives(conv4.normalised), derivatives(plainly)
    )


def test_second_order_products_through_convolutions_are_finite_differences():
    rng = np.random.default_rng(1)
    images = rng.random((3, 12, 12, 1))
    blocks = made_conv4(jax.random.key(0), 1, 3)
    flat, tree = ravel_pytree(blocks)
    slope = jax.jit(jax.grad(lambda v: jnp.sum(jnp.tanh(conv4.apply(tree(v), images, strided=True)))))
    direction = rng.standard_normal(flat.shape)
    product = jax.jit(lambda v: jax.vjp(slope, v)[1](direction)[0])(flat)
    step = 1e-6
    difference = (slope(flat + step * direction) - slope(flat - step * direction)) / (2 * step)
    np.testing.assert_allclose(product, difference, rtol=1e-4, atol=1e-6 * float(jnp.abs(product).max()))


def test_an_mlp_is_its_formula():
    layers = mlp.init(jax.random.key(0), [4, 3, 2])
    inputs = np.random.default_rng(0).standard_normal((5, 4))
    (a, b), (c, d) = [tuple(map(np.asarray, layer)) for layer in layers]
    np.testing.assert_allclose(mlp.apply(layers, jnp.asarray(inputs)), np.maximum(inputs @ a + b, 0) @ c + d)
