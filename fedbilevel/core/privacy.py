"""Differential privacy of rows: derivatives in which each row's contribution is clipped, and to which noise is added.

A *release* is one derivative on one draw of rows. With v_i the derivative of the loss on row i alone, it is

    ( Σ_{i∈B} min(1, C / |v_i|) v_i  +  z C ξ ) / E|B|,    ξ ~ N(0, I),

where B has each of the client's n rows independently with probability q = E|B| / n (Poisson sampling), or all of them where
there are no minibatches (Abadi et al., Deep Learning with Differential Privacy, CCS 2016). C is `clip_f` for gradients of f,
`clip_g` for those of g, and `clip_products` · |v| for products of g's second derivatives with v. Without a row the sum differs
by at most C, so what a client function computes from releases is private, whatever it does with them. The number of rows is
taken to be known.

The key of a release's noise is a keyed hash of the question: of the draw, of which derivative it is, and of the point. So two
different questions never share their noise, not even in a loop on one draw, and the same question has the same answer, which
tells nothing new. A client function reaches the rows in no other way: losses themselves, and derivatives of releases, are
refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import threefry_2x32

from fedbilevel.core.problem import Batch, Loss, Problem, Tree, alone
from fedbilevel.core.randomness import bits, fold_in, split, wrapped
from fedbilevel.core.traffic import product
from fedbilevel.errors import InputError
from fedbilevel.settings import check_all, real

CUT = 1e-20  # the probability that a draw has more rows than there is room for
PER_ROW_NUMBERS = 2**22  # of derivatives of single rows that are held at once
ADDED = (
    4  # normal numbers in each number of noise, which fills the gaps between floats and lengthens their tails (Holohan, 2021)
)
MOST_NOISE = 1e4  # so that divergences are well above their rounding
LEAST_BOUND = 1e-6  # so that the squares of lengths near it are well above the smallest floats
UPPER, LOWER = "upper", "lower"
DERIVATIVES = ("fx", "fy", "gx", "gy", "gyy", "gxy")  # by number, in a release's key


def _bound(meaning: str) -> Any:
    """A bound on what one row contributes."""
    return real(1.0, meaning, least=LEAST_BOUND)


@dataclass(frozen=True, kw_only=True)
class RowPrivacy:
    """How the rows of every client are protected. Either ε is given, and the noise follows from it, or the noise is."""

    epsilon: float | None = real(None, "ε of the whole run, to which the noise is calibrated", above=0, most=100)
    delta: float = real(1e-5, "δ", above=0, below=0.5)
    noise: float | None = real(
        None, "z, the noise's deviation in units of a row's largest contribution", above=0, most=MOST_NOISE
    )
    clip_f: float = _bound("C, the longest gradient of f on one row that counts in full")
    clip_g: float = _bound("the same of g")
    clip_products: float = _bound("the same of g's second-order products on one row, per unit of the vector")
    metric_noise: float = real(30.0, "z of each evaluation of the metrics at a site", above=0, most=MOST_NOISE)
    metric_clip: float = _bound("the largest metric of one row that counts in full")

    def __post_init__(self) -> None:
        check_all(self, owner="privacy")
        if (self.epsilon is None) == (self.noise is None):
            raise InputError("privacy: give either epsilon, to which the noise is calibrated, or the noise")

    @property
    def multiplier(self) -> float:
        """z, once it is known."""
        if self.noise is None:
            raise InputError("privacy: the noise has not been calibrated to epsilon")
        return self.noise

    def values(self) -> dict[str, float]:
        """What is given or has a default, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


class Draw(NamedTuple):
    """As many of a client's rows as there is room for, which of them were drawn, how many are on average, and a secret key."""

    rows: Tree
    drawn: Array
    expected: Array
    key: Array


Ask = Callable[[str, Array, Array, Any, Any], Array]  # (derivative, x, y, draw, v): a release


class PrivateProblem:
    """What a client function may ask about a client's rows: the six derivatives of `Problem`, each of them a release."""

    def __init__(self, ask: Ask):
        self._ask = ask

    def fx(self, x: Array, y: Array, batch: Batch) -> Array:
        """∇_x f"""
        return self._ask("fx", x, y, batch.upper, None)

    def fy(self, x: Array, y: Array, batch: Batch) -> Array:
        """∇_y f"""
        return self._ask("fy", x, y, batch.upper, None)

    def gx(self, x: Array, y: Array, batch: Batch) -> Array:
        """∇_x g"""
        return self._ask("gx", x, y, batch.lower, None)

    def gy(self, x: Array, y: Array, batch: Batch) -> Array:
        """∇_y g"""
        return self._ask("gy", x, y, batch.lower, None)

    def gyy(self, x: Array, y: Array, batch: Batch, v: Array) -> Array:
        """∇²_yy g · v"""
        return self._ask("gyy", x, y, batch.lower, v)

    def gxy(self, x: Array, y: Array, batch: Batch, v: Array) -> Array:
        """∇²_xy g · v"""
        return self._ask("gxy", x, y, batch.lower, v)

    def upper_loss(self, x: Array, y: Array, batch: Batch) -> Array:
        """f, which is refused."""
        raise InputError("the algorithm measures f itself, which privacy of rows does not cover: choose another algorithm")

    direction = Problem.direction


def private(problem: Problem, privacy: RowPrivacy) -> PrivateProblem:
    """The problem, asked through releases alone."""

    def ask(name: str, x: Array, y: Array, draw: Draw, v: Array | None) -> Array:
        how = _How(name, problem.f if name.startswith("f") else problem.g, privacy)
        return _release(how, (x, y, v), draw)

    return PrivateProblem(ask)


def row_derivative(name: str, loss: Loss, x: Array, y: Array, row: Tree, v: Array | None) -> Array:
    """One of the derivatives on one row alone."""

    def value(x: Array, y: Array) -> Array:
        return alone(loss, x, y, jax.tree.map(lambda a: a[None], row))[0]

    if v is None:
        return jax.grad(value, "xy".index(name[1]))(x, y)
    return jax.vjp(lambda x, y: jax.grad(value, 1)(x, y), x, y)[1](v)["xy".index(name[1])]


class _How(NamedTuple):
    name: str
    loss: Loss
    privacy: RowPrivacy

    def bound(self, v: Array | None) -> Array | float:
        """C"""
        p = self.privacy
        if v is not None:
            return p.clip_products * jnp.linalg.norm(v)
        return p.clip_f if self.name.startswith("f") else p.clip_g


@partial(jax.custom_jvp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def _release(how: _How, point: tuple[Array, Array, Array | None], draw: Draw) -> Array:
    x, y, v = point
    bound = how.bound(v)

    def contribution(row: Tree, drawn: Array) -> Array:
        return clipped(row_derivative(how.name, how.loss, x, y, row, v), bound) * drawn

    total = _sum_over_rows(contribution, (x, y)["xy".index(how.name[1])], draw)
    noise = how.privacy.multiplier * bound * gaussian(_key_of(draw.key, how.name, point), total)
    return (total + noise.astype(total.dtype)) / draw.expected.astype(total.dtype)


@_release.defjvp
def _refused(how: _How, primals: Any, tangents: Any) -> Any:
    raise InputError(
        "the algorithm differentiates what clients compute, which privacy of rows does not cover: choose another algorithm"
    )


def clipped(v: Array, bound: Array | float) -> Array:
    """v, shortened to the bound if it is longer; 0 if it is not finite."""
    largest = jnp.max(jnp.abs(v))  # so that squares of tiny entries do not vanish, and with them the length
    length = largest * jnp.linalg.norm(v / jnp.where(largest > 0, largest, 1))
    return jnp.where(jnp.isfinite(length), v, 0) * clip_factor(length, bound).astype(v.dtype)


def clip_factor(length: Array, bound: Array | float) -> Array:
    """What shortens a vector of that length to the bound if it is longer; 0 if the length is not finite."""
    least = jnp.finfo(length.dtype).tiny  # where the bound is 0, as of products with 0
    return jnp.where(jnp.isfinite(length), bound / jnp.maximum(jnp.maximum(length, bound), least), 0)


def _sum_over_rows(contribution: Callable[[Tree, Array], Array], like: Array, draw: Draw) -> Array:
    """Σ of the rows' contributions, of so many at once that their derivatives take bounded memory."""
    n = len(draw.drawn)
    size = max(1, min(n, PER_ROW_NUMBERS // max(1, like.size)))
    chunks = -(-n // size)

    def padded(a: Array) -> Array:
        return jnp.pad(a, [(0, chunks * size - n), *[(0, 0)] * (a.ndim - 1)]).reshape(chunks, size, *a.shape[1:])

    def add(total: Array, chunk: tuple[Tree, Array]) -> tuple[Array, None]:
        return total + jax.vmap(contribution)(*chunk).sum(0), None

    together = jax.tree.map(padded, (draw.rows, draw.drawn))
    return lax.scan(add, jnp.zeros_like(like), together)[0]


def _key_of(key: Array, name: str, point: tuple[Array, Array, Array | None]) -> Array:
    """A key that depends on every bit of the question."""
    words = jnp.concatenate([_words(a) for a in point if a is not None])
    counts = jnp.concatenate([lax.iota(jnp.uint32, words.size), words])
    hashed = threefry_2x32(jax.random.key_data(fold_in(key, DERIVATIVES.index(name))), counts)
    return wrapped(hashed.reshape(2, -1).sum(1, dtype=jnp.uint32))


def _words(a: Array) -> Array:
    kinds = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
    return lax.bitcast_convert_type(a, kinds[a.dtype.itemsize]).astype(jnp.uint32).ravel()


def gaussian(key: Array, like: Array) -> Array:
    """N(0, I) of that shape, in single precision or better."""
    dtype = jnp.promote_types(like.dtype, jnp.float32)
    return jax.random.normal(key, (ADDED, *like.shape), dtype).sum(0) / math.sqrt(ADDED)


def capacity(longest: int, wanted: int | None) -> int:
    """Room for a draw of so many rows on average from at most `longest`, by Bernstein's inequality for its size."""
    if wanted is None or wanted >= longest:
        return longest
    decades = -math.log(CUT)
    return min(longest, math.ceil(wanted + decades / 3 + math.sqrt(decades**2 / 9 + 2 * wanted * decades)))


def rate(rows: int, wanted: int | None) -> float:
    """q: no row is in a draw with a greater probability."""
    return 1.0 if wanted is None else min(1.0, wanted / rows + 2.0**-32)


def drawn(key: Array, size: Array, longest: int, wanted: int | None) -> tuple[Array, Array, Array, Array]:
    """Positions among `size` rows, at most `longest`; which were drawn, and how many are on average; and a key for noise."""
    sampling, noise = split(key)
    position = lax.iota(jnp.int32, longest)
    if wanted is None:
        return jnp.minimum(position, size - 1), position < size, size, noise
    chosen = (product(bits(sampling, (longest,)), size)[0] < wanted) & (position < size)
    room = capacity(longest, wanted)
    places = position if room == longest else jnp.nonzero(chosen, size=room, fill_value=0)[0].astype(jnp.int32)
    there = chosen if room == longest else lax.iota(jnp.int32, room) < chosen.sum()
    return jnp.minimum(places, size - 1), there, jnp.minimum(wanted, size), noise


def private_metrics(metrics: tuple[tuple[Loss, Tree], ...], x: Array, y: Array, privacy: RowPrivacy, key: Array) -> Array:
    """Means over rows, with noise: each row's values are clipped, and all means together are one release."""
    bound = privacy.metric_clip

    def mean(loss: Loss, rows: Tree) -> tuple[Array, Array]:
        values = alone(loss, x, y, rows)
        kept = jnp.where(jnp.isfinite(values), jnp.clip(values, -bound, bound), 0)
        return kept.mean(), jnp.asarray(bound / len(values), kept.dtype)

    means, reach = zip(*(mean(loss, rows) for loss, rows in metrics), strict=True)
    deviation = privacy.metric_noise * math.sqrt(len(means)) * jnp.stack(reach)
    return jnp.stack(means) + deviation * gaussian(key, deviation).astype(deviation.dtype)


def of_metrics(problem: Problem, upper: Tree, lower: Tree, test: Tree | None) -> tuple[tuple[Loss, Tree], ...]:
    """The metrics in the order in which clients tell them, each with its rows."""
    on_upper = ((loss, upper) for _, loss in problem.metrics)
    on_lower = ((loss, lower) for _, loss in problem.lower_metrics)
    on_data = ((problem.f, upper), (problem.g, lower), *on_upper, *on_lower)
    return on_data if test is None else (*on_data, *((loss, test) for _, loss in problem.tests))
