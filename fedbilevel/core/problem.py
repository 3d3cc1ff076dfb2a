"""The bilevel problem of one client and its six derivatives.

    min_{x∈X}  Σ w_m f_m(x, y*(x))    with    y*(x) = argmin_{y∈Y}  Σ w_m g_m(x, y)

All clients share the two functions `f` and `g` and differ in their data. Inside the package `x` and `y`
are vectors; `from_trees` turns a user's pytrees into them once, where a problem is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from optax.projections import projection_l2_ball

from fedbilevel.core.sets import UNCONSTRAINED, ConvexSet, Sets
from fedbilevel.errors import InputError, computing, in_one_line, require, warn

Tree = Any
Loss = Callable[[Any, Any, Tree], Array]
Named = tuple[tuple[str, Loss], ...]  # by name
LowerLevel = Literal["global", "local"]  # whose problem y solves: all clients', or each its own
LOSSES = ("upper_loss", "lower_loss")


class Pair(NamedTuple):
    """The iterates of a method that keeps x and y alone."""

    x: Array
    y: Array


class Point(NamedTuple):
    """The iterates of a single-loop method; u estimates [∇²_yy g]⁻¹ ∇_y f."""

    x: Array
    y: Array
    u: Array

    def moved(self, d: Point, x_step: Any, y_step: Any, u_step: Any, radius: Any = None) -> Point:
        """The point after a step along -d; where a radius is given, u is kept in that ball."""
        u = self.u - u_step * d.u
        return Point(self.x - x_step * d.x, self.y - y_step * d.y, u if radius is None else projection_l2_ball(u, radius))


class Batch(NamedTuple):
    """One draw of a client's data: rows for the upper loss `f` and rows for the lower loss `g`."""

    upper: Tree
    lower: Tree


class Ragged(NamedTuple):
    """All rows of a client, padded to the longest client's number; padding has share 0."""

    rows: Tree
    share: Array  # of each row in the client's mean


@partial(jax.jit, static_argnums=0)  # so that all derivatives share one trace
def mean_loss(loss: Loss, x: Array, y: Array, rows: Tree) -> Array:
    """The loss on some rows. On ragged rows it is the mean of single-row losses, as a loss must be."""
    return rows.share @ alone(loss, x, y, rows.rows) if isinstance(rows, Ragged) else loss(x, y, rows)


def alone(loss: Loss, x: Array, y: Array, rows: Tree) -> Array:
    """The loss on each row alone."""
    with computing("a loss or a metric on each row alone"):
        return jax.vmap(lambda row: loss(x, y, jax.tree.map(lambda a: a[None], row)))(rows)


@dataclass(frozen=True)
class Problem:
    """The losses `f` and `g`: (x, y, rows) -> scalar, each a mean over the rows it is given; and the sets X and Y.

    `metrics` are further means over f's rows that are reported for a solution, with their names, and `lower_metrics` over g's.
    `tests` are means over rows like f's that a client holds out of both losses.
    """

    f: Loss
    g: Loss
    sets: Sets = UNCONSTRAINED
    metrics: Named = ()
    tests: Named = ()
    lower_metrics: Named = ()

    def __post_init__(self) -> None:
        for what, given in (("metrics", self.metrics), ("tests", self.tests), ("lower_metrics", self.lower_metrics)):
            pairs = isinstance(given, tuple) and all(isinstance(m, tuple) and len(m) == 2 for m in given)
            require(pairs, what, "a tuple of pairs (name, function)", given)
        for name, loss in (("f", self.f), ("g", self.g), *self.metrics, *self.tests, *self.lower_metrics):
            require(callable(loss), name, "a function (x, y, rows) -> number", loss)
            require(_is_hashable(loss), name, "hashable, as a function is: wrap it in one", loss)
        names = (*self.metric_names, *self.test_names)
        unique = len(set(names)) == len(names)
        require(unique, "metrics", f"named apart from each other and from {' and '.join(LOSSES)}", self.metrics)
        require(isinstance(self.sets, Sets), "sets", "Sets(x=..., y=...)", self.sets)
        for name, of in zip(("x_set", "y_set"), self.sets, strict=True):
            require(isinstance(of, ConvexSet), name, "a Box, Ball or Simplex", of)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of what the clients' data says about a solution: the two losses, then the metrics."""
        return (*LOSSES, *(name for name, _ in (*self.metrics, *self.lower_metrics)))

    @property
    def test_names(self) -> tuple[str, ...]:
        """The names of `tests`."""
        return tuple(name for name, _ in self.tests)

    def evaluate(self, x: Array, y: Array, batch: Batch) -> Array:
        """The two losses and the further metrics, in the order of `metric_names`."""
        upper = [mean_loss(loss, x, y, batch.upper) for loss in (self.f, *(loss for _, loss in self.metrics))]
        lower = [mean_loss(loss, x, y, batch.lower) for loss in (self.g, *(loss for _, loss in self.lower_metrics))]
        return jnp.stack([upper[0], lower[0], *upper[1:], *lower[1:]])

    def test(self, x: Array, y: Array, rows: Tree) -> Array:
        """The `tests` on rows that are held out."""
        return jnp.stack([mean_loss(loss, x, y, rows) for _, loss in self.tests])

    def upper_loss(self, x: Array, y: Array, batch: Batch) -> Array:
        """f"""
        return mean_loss(self.f, x, y, batch.upper)

    def fx(self, x: Array, y: Array, batch: Batch) -> Array:
        """∇_x f"""
        with computing("∇_x f"):
            return jax.grad(lambda x: mean_loss(self.f, x, y, batch.upper))(x)

    def fy(self, x: Array, y: Array, batch: Batch) -> Array:
        """∇_y f"""
        with computing("∇_y f"):
            return jax.grad(lambda y: mean_loss(self.f, x, y, batch.upper))(y)

    def gx(self, x: Array, y: Array, batch: Batch) -> Array:
        """∇_x g"""
        with computing("∇_x g"):
            return jax.grad(lambda x: mean_loss(self.g, x, y, batch.lower))(x)

    def gy(self, x: Array, y: Array, batch: Batch) -> Array:
        """∇_y g"""
        with computing("∇_y g"):
            return self._gy(x, y, batch)

    def _gy(self, x: Array, y: Array, batch: Batch) -> Array:
        return jax.grad(lambda y: mean_loss(self.g, x, y, batch.lower))(y)

    def gyy(self, x: Array, y: Array, batch: Batch, v: Array) -> Array:
        """∇²_yy g · v"""
        return self._second_order(x, y, batch, v)[1]

    def gxy(self, x: Array, y: Array, batch: Batch, v: Array) -> Array:
        """∇²_xy g · v := ∇_x ⟨∇_y g, v⟩"""
        return self._second_order(x, y, batch, v)[0]

    def _second_order(self, x: Array, y: Array, batch: Batch, v: Array) -> tuple[Array, Array]:
        # One linearisation gives both products: on equal arguments XLA merges the two calls into one,
        # and drops the half that nobody asks for.
        with computing("∇²g"):
            return jax.vjp(lambda x, y: self._gy(x, y, batch), x, y)[1](v)

    def direction(self, z: Point, batches: FiveBatches) -> Point:
        """The descent directions of the three intertwined problems in x, y and u at z.

        D_x = ∇_x f - ∇²_xy g u,    D_y = ∇_y g,    D_u = ∇²_yy g u - ∇_y f.
        """
        x, y, u = z
        return Point(
            x=self.fx(x, y, batches.f1) - self.gxy(x, y, batches.g1, u),
            y=self.gy(x, y, batches.y),
            u=self.gyy(x, y, batches.g2, u) - self.fy(x, y, batches.f2),
        )

    def check(self, x: Array, y: Array, batch: Batch) -> None:
        """Raise `InputError` unless f, g and the metrics return one number each at (x, y)."""
        further = [(name, loss, batch.upper) for name, loss in self.metrics]
        further += [(name, loss, batch.lower) for name, loss in self.lower_metrics]
        for name, loss, rows in (("f", self.f, batch.upper), ("g", self.g, batch.lower), *further):
            with computing(f"{name}(x, y, batch)"):
                out = jax.eval_shape(lambda x, y, rows, loss=loss: mean_loss(loss, x, y, rows), x, y, rows)
            if not (isinstance(out, jax.ShapeDtypeStruct) and out.shape == () and jnp.issubdtype(out.dtype, jnp.floating)):
                given = jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", out)
                raise InputError(f"{name}(x, y, batch) must return one real number, not {given}: take the mean over the batch")


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class FiveBatches(NamedTuple):
    """The minibatches of one `direction`, named as in FedBiO's Algorithm 2; equal ones may be shared."""

    y: Batch
    g1: Batch
    g2: Batch
    f1: Batch
    f2: Batch


@dataclass(frozen=True)
class Layout:
    """How the arrays of a pytree lie one after another in a vector; equal for equal trees, so that JAX compiles once."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, name: str, tree: Tree) -> tuple[Layout, Array]:
        """The layout of a start and the start as a vector; `InputError` unless it consists of finite real numbers."""
        leaves, structure = flattened(name, tree)
        for leaf in leaves:
            dtype = getattr(leaf, "dtype", np.dtype(float))
            if not jnp.issubdtype(dtype, jnp.floating):
                held = f"{dtype} numbers" if jnp.issubdtype(dtype, jnp.number) else in_one_line(repr(leaf))
                raise InputError(f"{name} holds {held}, which have no gradient: make them floats, in arrays")
        if not sum(map(np.size, leaves)):
            raise InputError(f"{name} has no arrays with numbers in them: give the start as an array or a pytree of arrays")
        vector = jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])
        dtypes = tuple(jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", vector.dtype)) for leaf in leaves)
        if any(isinstance(leaf, np.ndarray) and leaf.dtype != dtype for leaf, dtype in zip(leaves, dtypes, strict=True)):
            warn(f"{name} is in double precision, and JAX computes in single: set JAX_ENABLE_X64=1, or give float32")
        if not jnp.isfinite(vector).all():
            raise InputError(f"{name} holds a value that is not finite in {vector.dtype}: start from finite numbers")
        return cls(structure, tuple(map(np.shape, leaves)), dtypes), vector

    def tree(self, vector: Array) -> Tree:
        """The vector as a tree, its arrays in their own precision."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        parts = zip(jnp.split(vector, ends[:-1]), self.shapes, self.dtypes, strict=True)
        return jax.tree.unflatten(self.structure, [part.reshape(shape).astype(dtype) for part, shape, dtype in parts])


@dataclass(frozen=True)
class OnVectors:
    """A loss of trees as a loss of vectors."""

    loss: Loss
    x: Layout
    y: Layout

    def __call__(self, x: Array, y: Array, rows: Tree) -> Array:
        return self.loss(self.x.tree(x), self.y.tree(y), rows)


def from_trees(
    f: Loss,
    g: Loss,
    x0: Tree,
    y0: Tree,
    sets: Sets = UNCONSTRAINED,
    metrics: Named = (),
    tests: Named = (),
    lower_metrics: Named = (),
) -> tuple[Problem, Array, Array, Callable, Callable]:
    """The problem in vectors, its start (x, y), and the two functions that give trees back."""
    (x_layout, x), (y_layout, y) = Layout.of("x0", x0), Layout.of("y0", y0)
    on_trees = Problem(f, g, sets, metrics, tests, lower_metrics)

    def on_vectors(loss: Loss) -> OnVectors:
        return OnVectors(loss, x_layout, y_layout)

    given = {"metrics": metrics, "tests": tests, "lower_metrics": lower_metrics}
    named: Any = {what: tuple((name, on_vectors(loss)) for name, loss in of) for what, of in given.items()}
    problem = replace(on_trees, f=on_vectors(f), g=on_vectors(g), **named)
    return problem, x, y, x_layout.tree, y_layout.tree


def flattened(what: str, tree: Tree) -> tuple[list[Any], Any]:
    """The arrays of a tree, and its structure; `InputError` if it is no tree."""
    try:
        leaves, structure = jax.tree.flatten(tree)
        arrays = [leaf if isinstance(leaf, (float, Array)) else _native(np.asarray(leaf)) for leaf in leaves]
    except (TypeError, ValueError) as error:  # such as of keys that cannot be sorted
        raise InputError(f"{what} is not a tree of arrays: {in_one_line(error)}") from None
    if any(np.ma.is_masked(leaf) for leaf in leaves):
        raise InputError(f"{what} has masked entries, whose numbers would count: leave them out")
    for array in arrays:
        if isinstance(array, np.ndarray) and array.dtype.kind in "fc" and np.finfo(array.dtype).eps < np.finfo(float).eps:
            raise InputError(f"{what} holds {array.dtype} numbers, which JAX does not have: give float64 or shorter")
    return arrays, structure


def _native(array: np.ndarray) -> np.ndarray:
    """The array with its bytes in this machine's order, the only one that JAX has."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)
