"""Trees of arrays as bytes: a JSON description, then the arrays' own bytes. No pickle, so no code.

    8 bytes: length of the description | description (UTF-8) | array | array | ...

Trees are made of None, booleans, numbers, strings, lists, tuples, named tuples, dicts with string keys, and
arrays. A named tuple is described by its name and is decoded only if the reader names its type.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbilevel.errors import InputError, in_one_line

MOST_DESCRIPTION = 16 << 20  # bytes of a description, which takes many times as much once it is read

KINDS = {"bool", "bfloat16", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))} | {
    f"float{bits}" for bits in (16, 32, 64)
}


def encode(tree: Any) -> bytes:
    """The tree as bytes."""
    arrays: list[np.ndarray] = []

    def describe(node: Any) -> Any:
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if isinstance(node, list):
            return [describe(child) for child in node]
        if isinstance(node, tuple):
            children = [describe(child) for child in node]
            return {"named": type(node).__name__, "children": children} if hasattr(node, "_fields") else {"tuple": children}
        if isinstance(node, dict):
            return {"dict": {str(key): describe(child) for key, child in node.items()}}
        arrays.append(np.ascontiguousarray(node))
        if arrays[-1].dtype.name not in KINDS:
            raise TypeError(f"cannot send a value of {type(node)} with dtype {arrays[-1].dtype}")
        return {"array": arrays[-1].dtype.name, "shape": list(np.shape(node))}

    description = json.dumps(describe(tree)).encode()
    contents = [a.reshape(-1).view(np.uint8).data for a in arrays]  # copied once, into the message
    return b"".join([len(description).to_bytes(8, "little"), description, *contents])


def decode(data: bytes, types: Mapping[str, type] | None = None) -> Any:
    """The tree in these bytes; `types` are the named tuples that may occur. `InputError` if the bytes are damaged."""
    view, known = memoryview(data), types or {}
    end = 8 + int.from_bytes(view[:8], "little")
    if end > len(view):
        raise InputError(f"a message of {len(view)} bytes is cut off or not a fedbilevel message: send it again")
    if end > MOST_DESCRIPTION:
        raise InputError(f"a message has a description of {end - 8:,} bytes, and {MOST_DESCRIPTION:,} are the most: refused")
    position = end

    def build(node: Any) -> Any:
        nonlocal position
        if isinstance(node, list):
            return [build(child) for child in node]
        if not isinstance(node, dict):
            return node
        if "tuple" in node:
            return tuple(build(child) for child in node["tuple"])
        if "named" in node:
            return known[node["named"]](*(build(child) for child in node["children"]))
        if "dict" in node:
            return {key: build(child) for key, child in node["dict"].items()}
        if node["array"] not in KINDS:
            raise ValueError(node["array"])
        dtype, shape = jnp.dtype(node["array"]), tuple(node["shape"])
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError("a shape is not made of whole numbers")
        size = dtype.itemsize * math.prod(shape)
        array = np.frombuffer(view[position : position + size], dtype).reshape(shape)
        position += size
        return array

    try:
        tree = build(json.loads(bytes(view[8:end])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        why = f"{type(error).__name__}: {in_one_line(error, 100)}"
        raise InputError(f"a message is damaged or not a fedbilevel message ({why}): send it again") from None
    if position != len(view):
        raise InputError(f"a message has {len(view) - position} bytes too many: send it again")
    return tree


def named_tuples(cls: type) -> dict[str, type]:
    """The named tuple types visible in the modules of a class and its bases, by name."""
    seen = {name: value for base in cls.__mro__ for name, value in vars(sys.modules[base.__module__]).items()}
    return {name: value for name, value in seen.items() if isinstance(value, type) and hasattr(value, "_fields")}
