"""What is given for each client, one entry after another: rows and weights, checked and made arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError, require


def one_per_client(what: str, given: Iterable[Tree]) -> list[Tree]:
    """The entries of a list, or of anything that gives them one after another; `InputError` if it is something else."""
    one = isinstance(given, (str, bytes, Mapping, Set, np.ndarray, Array)) or hasattr(given, "_fields")
    fits = isinstance(given, Iterable) and not one
    require(fits, what, f"a list with one entry per client, not {type(given).__name__}", given)
    entries = list(given)
    if not entries:
        raise InputError(f"{what} has no client in it: give a list with one entry per client")
    return entries


def check_rows(whose: str, arrays: list[Any], like: list[Any]) -> None:
    """Raise `InputError` unless these are arrays of numbers with a row per sample, and rows like the others'."""
    shapes = [np.shape(array) for array in arrays]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise InputError(f"{whose}'s arrays need one common first axis, a row per sample; their shapes: {shapes}")
    if [shape[1:] for shape in shapes] != [np.shape(array)[1:] for array in like]:
        raise InputError(f"{whose}'s rows have another shape than client 0's: give every client rows alike; given: {shapes}")
    if shapes[0][0] == 0:
        raise InputError(f"{whose} has no rows: leave the client out or give it data")
    for array in arrays:
        if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool) or array.dtype.kind == "m":
            raise InputError(f"{whose} has rows of {array.dtype}: give arrays of numbers")


def joined(what: str, parts: Iterable[Any]) -> Array:
    """Arrays one after another; `InputError` if JAX's whole numbers are too short for theirs."""
    whole = np.concatenate(list(parts))
    dtype = jax.dtypes.canonicalize_dtype(whole.dtype)
    if jnp.issubdtype(dtype, jnp.integer) and dtype != whole.dtype:
        for value in map(int, (whole.min(), whole.max())):
            if not jnp.iinfo(dtype).min <= value <= jnp.iinfo(dtype).max:
                raise InputError(f"{what} holds {value}, which JAX's {dtype} cannot: make it a float, or set JAX_ENABLE_X64=1")
    return jnp.asarray(whole)


def converted(what: str, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The rows in another type; `InputError` if that loses more than the digits that a shorter float does not have."""
    if rows.dtype == dtype:
        return rows
    if rows.dtype.kind not in "biuf" or dtype.kind not in "biuf":
        raise InputError(f"{what} holds {rows.dtype}, and the task's rows are {dtype}: give numbers")
    with np.errstate(invalid="ignore", over="ignore"):
        made = rows.astype(dtype)
        if rows.dtype.kind == dtype.kind == "f":
            lost = np.isfinite(rows) & ~np.isfinite(made)
        else:
            lost = (made.astype(rows.dtype) != rows) | ((made < 0) != (rows < 0))
    if lost.any():
        raise InputError(f"{what} holds {rows[lost].flat[0]}, which {dtype}, the type of the task's rows, cannot: fix the data")
    return made


def shares_of(weights: Iterable[float], clients: int) -> Array:
    """The weights, scaled such that they sum to 1; `InputError` unless they are numbers above 0, one per client."""
    wanted = f"{clients} numbers above 0, one per client"
    if isinstance(weights, Iterable) and not isinstance(weights, (Mapping, Set)) and not hasattr(weights, "__array__"):
        weights = list(weights)
    try:
        given = np.asarray(weights)
        numbers = given.shape == (clients,) and given.dtype.kind in "iuf" and not np.ma.is_masked(weights)
        fits = numbers and bool(np.all(given > 0))
    except ValueError:  # of parts that do not make an array
        fits = False
    require(fits, "weights", wanted, weights)
    with np.errstate(over="ignore", invalid="ignore"):
        shares = given.astype(float) / given.astype(float).sum()
    least = jnp.finfo(jax.dtypes.canonicalize_dtype(float)).tiny
    require(bool(shares.min() >= least), "weights", f"{wanted}, and none lost beside the others", weights)
    return jnp.asarray(shares)
