"""PyTorch's operations in JAX: for each that `from_torch` converts, a function with the arguments that ATen gives it.

Derivatives follow PyTorch's where a function has none: `relu` and `abs` have slope 0 at 0, of equal entries the first is the
largest of a pooling window, the two-norm of zeros has gradient 0. Convolutions are sums over shifted inputs times a matrix,
as in `convolution`: with a kernel for each client that is faster than JAX's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.errors import InputError

Axes = int | Sequence[int] | None


def identity(x: Array, *_: Any, **__: Any) -> Array:
    """The input: copies and memory formats mean nothing here."""
    return x


def nothing(*_: Any, **__: Any) -> None:
    """Checks of the traced program, which are true of every number of rows."""


def over(reduction: Callable[..., Array]) -> Callable[..., Array]:
    """A reduction over the given axes, or over all where none are given."""

    def reduced(x: Array, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
        return reduction(x if dtype is None else x.astype(dtype), axis=axes(dim), keepdims=keepdim)

    return reduced


def axes(dim: Axes) -> int | tuple[int, ...] | None:
    """ATen's axes as NumPy's: none are all."""
    return dim if dim is None or isinstance(dim, int) else tuple(dim) or None


def along(x: Array, dim: int, index: Any) -> tuple[Any, ...]:
    """The index that is `index` on one axis and takes all of the others."""
    return (*[slice(None)] * (dim % x.ndim), index)


# Arithmetic


def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    """x + alpha y"""
    return x + (y if alpha == 1 else alpha * y)


def div(x: Any, y: Any, rounding_mode: str | None = None) -> Array:
    """x / y, rounded down or towards zero if asked."""
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    return (
        jnp.floor_divide(x, y) if rounding_mode == "floor" else jnp.trunc(jnp.true_divide(x, y)).astype(jnp.result_type(x, y))
    )


def power(x: Any, exponent: Any) -> Array:
    """x to an exponent, which if whole gives derivatives at 0 as well."""
    whole = isinstance(exponent, float) and exponent.is_integer()
    return x ** (int(exponent) if whole else exponent)


def clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    """x between bounds, with slope 1 on them."""
    x = x if low is None else jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def addmm(added: Array, x: Array, y: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    """beta added + alpha x y, also for stacks of matrices."""
    return beta * added + alpha * (x @ y)


def variance(x: Array, dim: Axes = None, correction: Any = 1, keepdim: bool = False) -> Array:
    """The variance with `correction` taken off the number of entries."""
    return jnp.var(x, axis=axes(dim), ddof=1 if correction is None else correction, keepdims=keepdim)


def vector_norm(x: Array, order: float = 2, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
    """The two-norm, whose gradient at 0 is 0."""
    if order != 2:
        raise InputError(f"a norm of order {order} is not converted: take order 2")
    squared = over(jnp.sum)(x**2, dim, keepdim, dtype)
    return jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)


def extreme(position: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """The largest or smallest entry along an axis, the first of equal ones, and its position."""

    def found(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        at = position(x, axis=dim, keepdims=True)
        both = jnp.take_along_axis(x, at, dim), at
        return both if keepdim else (both[0].squeeze(dim), both[1].squeeze(dim))

    return found


# Activations


def hardtanh(x: Array, low: Any = -1, high: Any = 1) -> Array:
    """x between bounds, with slope 0 on them."""
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def elu(x: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    """Exponential below 0, linear above."""
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale))


def softplus(x: Array, beta: Any = 1, threshold: Any = 20) -> Array:
    """log(1 + exp(beta x)) / beta, linear where beta x is above the threshold."""
    linear = x * beta > threshold
    return jnp.where(linear, x, jnp.log1p(jnp.exp(jnp.where(linear, 0, x * beta))) / beta)


def dropout(x: Array, rate: float, training: bool | None) -> tuple[Array, None]:
    """The input, if nothing is dropped."""
    if training and rate:
        raise InputError(f"dropout of {rate} is random: call module.eval() first, or set p=0")
    return x, None


# Layers


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x Wᵀ + b"""
    return x @ weight.T if bias is None else x @ weight.T + bias


def embedding(weight: Array, index: Array, padding: int = -1, scale_by_frequency: bool = False, sparse: bool = False) -> Array:
    """Rows of the weight, NaN beyond the last. That of the padding is a constant."""
    if scale_by_frequency:
        raise InputError("scale_grad_by_freq is not converted: leave it out")
    if padding >= 0:
        weight = weight.at[padding].set(lax.stop_gradient(weight[padding]))
    return weight.at[index].get(mode="fill", fill_value=jnp.nan)


def spread(size: Any, dimensions: int) -> tuple[int, ...]:
    """One number for every dimension: ATen lets one stand for all."""
    given = (size,) if isinstance(size, int) else tuple(size)
    return given * dimensions if len(given) == 1 else given


def padded(x: Array, padding: Sequence[int], value: Any = 0) -> Array:
    """x with a frame around its last axes."""
    frame = [(0, 0, 0)] * (x.ndim - len(padding)) + [(p, p, 0) for p in padding]
    return lax.pad(x, jnp.asarray(value, x.dtype), frame)


def shifted(x: Array, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Iterator[Array]:
    """For each place in a window over the last axes, what lies there in all windows."""
    lengths = x.shape[-len(size) :]
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(lengths, size, stride, dilation, strict=True)]
    for place in itertools.product(*map(range, size)):
        starts = [i * d for i, d in zip(place, dilation, strict=True)]
        yield x[..., *(slice(a, a + s * (n - 1) + 1, s) for a, s, n in zip(starts, stride, counts, strict=True))]


def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """(rows, channels, ...) -> (rows, filters, ...), in any number of dimensions."""
    if transposed:
        raise InputError("a transposed convolution is not converted: use a convolution after upsampling")
    size = weight.shape[2:]
    stride, padding, dilation = (spread(given, len(size)) for given in (stride, padding, dilation))
    patches = jnp.stack(list(shifted(padded(x, padding), size, stride, dilation)), axis=2)  # rows, channels, places, ...
    rows, channels, places, *lengths = patches.shape
    patches = patches.reshape(rows, groups, channels // groups * places, -1)
    kernels = weight.reshape(groups, len(weight) // groups, -1)
    maps = jnp.einsum("gfp,rgpl->rgfl", kernels, patches).reshape(rows, len(weight), *lengths)
    return maps if bias is None else maps + per_channel(bias, maps)


def per_channel(values: Array, x: Array) -> Array:
    """A number for each channel, in the shape that broadcasts over (rows, channels, ...)."""
    return values.reshape(-1, *[1] * (x.ndim - 2))


def windows(
    dimensions: int, x: Array, size: Any, stride: Any, padding: Any, ceil_mode: bool, value: Any, dilation: Any = 1
) -> Iterator[Array]:
    """For each place in a pooling window, what lies there in all windows; `value` is around x."""
    if ceil_mode:
        raise InputError("ceil_mode=True is not converted: pad the input instead")
    size, padding, dilation = (spread(given, dimensions) for given in (size, padding, dilation))
    stride = spread(stride, dimensions) if stride else size
    return shifted(padded(x, padding, value), size, stride, dilation)


def max_pool(dimensions: int) -> Callable[..., Array]:
    """The largest entry of each window."""

    def pooled(x: Array, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Array:
        entries = windows(dimensions, x, size, stride, padding, ceil_mode, -jnp.inf, dilation)
        return reduce(lambda a, b: jnp.where((b > a) | jnp.isnan(b), b, a), entries)

    return pooled


def avg_pool(dimensions: int) -> Callable[..., Array]:
    """The mean of each window."""

    def pooled(
        x: Array,
        size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        entries = list(windows(dimensions, x, size, stride, padding, ceil_mode, 0))
        inside = windows(dimensions, jnp.ones_like(x), size, stride, padding, ceil_mode, 0)
        count = len(entries) if count_include_pad else reduce(jnp.add, inside)
        return reduce(jnp.add, entries) / (divisor_override or count)

    return pooled


def adaptive_avg_pool(dimensions: int) -> Callable[..., Array]:
    """Means of as many windows as asked, which together cover the input."""

    def pooled(x: Array, size: Sequence[int | None]) -> Array:
        for axis, count in zip(range(-dimensions, 0), size, strict=True):
            length = x.shape[axis]
            n = length if count is None else count
            means = np.zeros((length, n))
            for i in range(n):
                window = slice(i * length // n, -(-(i + 1) * length // n))
                means[window, i] = 1 / (window.stop - window.start)
            x = jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ means.astype(x.dtype), -1, axis)
        return x

    return pooled


def standardised(x: Array, axis: tuple[int, ...], epsilon: float) -> Array:
    """x with mean 0 and, but for epsilon, variance 1 over some axes."""
    centred = x - x.mean(axis, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(axis, keepdims=True) + epsilon)


def affine(x: Array, scale: Array | None, shift: Array | None) -> Array:
    """x scaled and shifted, where asked."""
    x = x if scale is None else x * scale
    return x if shift is None else x + shift


def affine_per_channel(x: Array, scale: Array | None, shift: Array | None) -> Array:
    """The channels of x scaled and shifted, where asked."""
    return affine(x, *(None if a is None else per_channel(a, x) for a in (scale, shift)))


def layer_norm(
    x: Array, shape: Sequence[int], scale: Array | None = None, shift: Array | None = None, epsilon: float = 1e-5, _: Any = None
) -> Array:
    """Standardised over the last axes."""
    return affine(standardised(x, tuple(range(-len(shape), 0)), epsilon), scale, shift)


def group_norm(
    x: Array, groups: int, scale: Array | None = None, shift: Array | None = None, epsilon: float = 1e-5, _: Any = None
) -> Array:
    """Standardised over each group of channels of a row."""
    grouped = standardised(x.reshape(len(x), groups, -1), (2,), epsilon)
    return affine_per_channel(grouped.reshape(x.shape), scale, shift)


def batch_norm(
    x: Array, scale: Array | None, shift: Array | None, training: bool, momentum: float, epsilon: float
) -> tuple[Array, None, None]:
    """Standardised over all rows given together."""
    axis = (0, *range(2, x.ndim))
    return affine_per_channel(standardised(x, axis, epsilon), scale, shift), None, None


def batch_norm_of_constants(
    x: Array, scale: Array | None, shift: Array | None, mean: Array, variance: Array, momentum: float, epsilon: float
) -> tuple[Array, None, None]:
    """Standardised with a mean and a variance that the module keeps."""
    standard = (x - per_channel(mean, x)) * lax.rsqrt(per_channel(variance, x) + epsilon)
    return affine_per_channel(standard, scale, shift), None, None


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Scaled dot-product attention; a query that may look at nothing gets zeros."""
    query, _ = dropout(query, dropout_p, True)
    if enable_gqa:
        key, value = (jnp.repeat(a, query.shape[-3] // a.shape[-3], axis=-3) for a in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    largest = lax.stop_gradient(scores.max(-1, keepdims=True))
    chances = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0))
    total = chances.sum(-1, keepdims=True)
    return chances / jnp.where(total == 0, 1, total) @ value


# Shapes and indices


def expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    """x broadcast; -1 keeps an axis."""
    own = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [n if wanted == -1 else wanted for n, wanted in zip(own, size, strict=True)])


def squeeze(x: Array, dim: Axes = None) -> Array:
    """x without those of the axes that have length 1."""
    candidates = range(x.ndim) if dim is None else spread(dim, 1)
    return x.squeeze(tuple(a for a in candidates if x.shape[a] == 1))


def take_slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    """A slice of one axis."""
    return x[along(x, dim, slice(start, end, step))]


def put_slice(x: Array, new: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    """x with a slice of one axis replaced."""
    return x.at[along(x, dim, slice(start, end, step))].set(new)


def split(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    """Consecutive parts of these lengths."""
    return jnp.split(x, np.cumsum(sizes)[:-1], axis=dim)


def pad_with(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """x with frames, listed from the last axis on; negative ones cut off."""
    frames = [(pad[i], pad[i + 1], 0) for i in range(0, len(pad), 2)]
    return lax.pad(x, jnp.asarray(value, x.dtype), [(0, 0, 0)] * (x.ndim - len(frames)) + frames[::-1])


def places(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    """ATen's indices as NumPy's: none takes all of an axis."""
    return tuple(slice(None) if index is None else index for index in indices)


def put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    """x with entries replaced or increased."""
    at = x.at[places(indices)]
    return at.add(values) if accumulate else at.set(values)


def gather(x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    """Entries along an axis, for each entry of an index that may be shorter than x on the others."""
    own = tuple(slice(None) if axis == dim % x.ndim else slice(n) for axis, n in enumerate(index.shape))
    return jnp.take_along_axis(x[own], index, dim)


OPERATIONS: dict[str, Callable[..., Any]] = {
    # arithmetic
    "add": add,
    "sub": lambda x, y, alpha=1: add(x, -y, alpha),
    "mul": jnp.multiply,
    "div": div,
    "remainder": jnp.remainder,
    "fmod": jnp.fmod,
    "pow": power,
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "reciprocal": jnp.reciprocal,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "erf": jax.scipy.special.erf,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "trunc": jnp.trunc,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "clamp": clamp,
    "where": jnp.where,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "isnan": jnp.isnan,
    "logical_not": jnp.logical_not,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "bitwise_not": jnp.bitwise_not,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    # reductions and products
    "sum": over(jnp.sum),
    "mean": over(jnp.mean),
    "prod": over(jnp.prod),
    "amax": over(jnp.max),
    "amin": over(jnp.min),
    "any": over(jnp.any),
    "all": over(jnp.all),
    "argmax": over(jnp.argmax),
    "argmin": over(jnp.argmin),
    "max.dim": extreme(jnp.argmax),
    "min.dim": extreme(jnp.argmin),
    "var": variance,
    "linalg_vector_norm": vector_norm,
    "cumsum": lambda x, dim, dtype=None: jnp.cumsum(x, dim, dtype),
    "mm": jnp.matmul,
    "bmm": jnp.matmul,
    "matmul": jnp.matmul,
    "addmm": addmm,
    "baddbmm": addmm,
    # activations
    "relu": jax.nn.relu,
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, slope * x),
    "hardtanh": hardtanh,
    "elu": elu,
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate == "tanh"),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
    "softplus": softplus,
    "_softmax": lambda x, dim, _: jax.nn.softmax(x, dim),
    "_log_softmax": lambda x, dim, _: jax.nn.log_softmax(x, dim),
    "native_dropout": dropout,
    # layers
    "linear": linear,
    "convolution": convolution,
    "embedding": embedding,
    "max_pool1d": max_pool(1),
    "max_pool2d": max_pool(2),
    "max_pool3d": max_pool(3),
    "avg_pool1d": avg_pool(1),
    "avg_pool2d": avg_pool(2),
    "avg_pool3d": avg_pool(3),
    "adaptive_avg_pool1d": adaptive_avg_pool(1),
    "adaptive_avg_pool2d": adaptive_avg_pool(2),
    "adaptive_avg_pool3d": adaptive_avg_pool(3),
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "_native_batch_norm_legit.no_stats": batch_norm,
    "_native_batch_norm_legit_no_training": batch_norm_of_constants,
    "scaled_dot_product_attention": attention,
    # shapes and indices
    "view": jnp.reshape,
    "_unsafe_view": jnp.reshape,
    "permute": jnp.transpose,
    "expand": expand,
    "squeeze": squeeze,
    "unsqueeze": jnp.expand_dims,
    "cat": lambda parts, dim=0: jnp.concatenate(parts, dim),
    "split_with_sizes": split,
    "select": lambda x, dim, index: x[along(x, dim, index)],
    "slice": take_slice,
    "slice_scatter": put_slice,
    "repeat": jnp.tile,
    "flip": jnp.flip,
    "constant_pad_nd": pad_with,
    "index": lambda x, indices: x[places(indices)],
    "_unsafe_index": lambda x, indices: x[places(indices)],
    "index_put": put,
    "index_select": lambda x, dim, index: jnp.take(x, index, dim),
    "gather": gather,
    "sym_size": lambda x, dim: x.shape[dim],
    # new arrays and copies
    "arange": jnp.arange,
    "full": lambda size, value, dtype=None: jnp.full(size, value, dtype),
    "full_like": lambda x, value, dtype=None: jnp.full_like(x, value, dtype),
    "scalar_tensor": jnp.asarray,
    "clone": identity,
    "detach": lax.stop_gradient,
    "copy": lambda x, new, _=False: jnp.broadcast_to(new, x.shape).astype(x.dtype),
    "_to_copy": lambda x, dtype=None: x if dtype is None else x.astype(dtype),
    "_assert_tensor_metadata": nothing,
}
