"""Clients over devices: the clients' computations are split among all devices that JAX sees, across processes."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError, in_one_line

_most_memory: ContextVar[float] = ContextVar("most_memory", default=math.inf)


def each_its_share(rows: Tree) -> Tree:
    """Rows of clients, split equally over the devices; their number is a multiple of the number of devices."""
    return _placed(rows, PartitionSpec("clients"))


def everywhere(tree: Tree) -> Tree:
    """Arrays inside a program, replicated on every device."""
    return _placed(tree, PartitionSpec())


def copied_everywhere(tree: Tree) -> Tree:
    """Arrays outside a program, replicated once for all programs that use them on every device."""
    return tree if jax.device_count() == 1 else jax.device_put(tree, _sharding(PartitionSpec()))


def padded(rows: Tree) -> Tree:
    """The rows with the last client's repeated, until their number is a multiple of the number of devices."""
    missing = -len(jax.tree.leaves(rows)[0]) % jax.device_count()
    return jax.tree.map(lambda r: jnp.concatenate([r, jnp.repeat(r[-1:], missing, 0)]), rows) if missing else rows


def require_devices() -> None:
    """Raise `InputError` if JAX finds no device, for instance if $JAX_PLATFORMS asks for one that is missing."""
    try:
        jax.devices()
    except RuntimeError as error:
        raise InputError(f"JAX cannot use a device here: {in_one_line(error)}") from None


@contextlib.contextmanager
def memory_ceiling(most: float) -> Iterator[None]:
    """During the block, `require_memory` allows at most so many bytes, however many there are."""
    token = _most_memory.set(most)
    try:
        yield
    finally:
        _most_memory.reset(token)


def memory() -> int:
    """Bytes of the memory that arrays are in."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit or not hasattr(os, "sysconf"):  # Windows does not say
        return limit or sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(what: str, needed: float, remedy: str) -> None:
    """Raise `InputError` if something needs more bytes than there are."""
    there = min(memory(), _most_memory.get())
    if needed > there:
        raise InputError(
            f"{what}: about {needed / 1e9:,.1f} GB of memory are needed, and {there / 1e9:.1f} are there: {remedy}"
        )


def out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether JAX raised this because a device has too little memory for a program."""
    return "RESOURCE_EXHAUSTED" in str(error)


def _placed(tree: Tree, how: PartitionSpec) -> Tree:
    return tree if jax.device_count() == 1 else jax.lax.with_sharding_constraint(tree, _sharding(how))


def _sharding(how: PartitionSpec) -> NamedSharding:
    return NamedSharding(jax.make_mesh((jax.device_count(),), ("clients",), axis_types=(AxisType.Auto,)), how)
