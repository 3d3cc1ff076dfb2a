"""Trees of arrays as an .npz file: an array for each leaf, named by its path (`x/layers/0/bias`), and the trees' structure.

Dictionaries, lists, tuples and None come back as they were, and other nodes, such as modules, as dictionaries by the names of
their fields: reading a file needs no code of the user's, and executes none.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.problem import Tree
from fedbilevel.errors import InputError
from fedbilevel.runs.rows import Row
from fedbilevel.tasks.data.preprocessing import Preprocessing
from fedbilevel.user_files import decoded, naming, read_arrays

LONGEST = 200  # characters of a key in the name of an array
STRUCTURE, HISTORY, PREPROCESSING, BEST = "structure.json", "history.json", "preprocessing.json", "best_round.json"


@dataclass(frozen=True)
class Node:
    """A node of a tree."""

    kind: Literal["array", "none", "list", "tuple", "dict"]
    array: str = ""  # its name in the file
    dtype: str = ""
    keys: Sequence[str | int] = ()
    parts: Sequence[Node] = ()


class Stored(NamedTuple):
    """What a file holds."""

    trees: dict[str, Tree]
    history: list[Row]
    preprocessing: Preprocessing | None
    best_round: int | None


def encoded(
    trees: Mapping[str, Tree],
    history: Sequence[Row] | None = None,
    preprocessing: Preprocessing | None = None,
    best_round: int | None = None,
) -> bytes:
    """The content of a file with trees by name, and, where given, rows of numbers, the preprocessing of tables and a round."""
    arrays: dict[str, np.ndarray] = {}
    nodes = {name: asdict(_described(tree, name, arrays)) for name, tree in trees.items()}
    texts = {STRUCTURE: json.dumps(nodes)}
    if history is not None:
        texts[HISTORY] = json.dumps(list(history))
    if preprocessing is not None:
        texts[PREPROCESSING] = preprocessing.encoded().decode()
    if best_round is not None:
        texts[BEST] = json.dumps(best_round)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays, **{name: np.asarray(text) for name, text in texts.items()})
    return file.getvalue()


def read_trees(path: Path) -> Stored:
    """What `encoded` wrote to a file; `InputError` if it is another file or damaged."""
    arrays = read_arrays(path)
    with naming(path):
        if STRUCTURE not in arrays:
            raise InputError("it holds no x and y as fedbilevel stores them")
        texts = {name: str(arrays[name]).encode() for name in (STRUCTURE, HISTORY, PREPROCESSING, BEST) if name in arrays}
        nodes = decoded(texts[STRUCTURE], dict[str, Node])
        history = decoded(texts[HISTORY], list[Row]) if HISTORY in texts else []
        preprocessing = Preprocessing.decoded(texts[PREPROCESSING]) if PREPROCESSING in texts else None
        best_round = decoded(texts[BEST], int) if BEST in texts else None
        return Stored({name: _rebuilt(node, arrays) for name, node in nodes.items()}, history, preprocessing, best_round)


def _described(tree: Tree, name: str, arrays: dict[str, np.ndarray]) -> Node:
    """The tree's structure; its arrays are added to those of the file."""
    if tree is None:
        return Node("none")
    if jax.tree_util.all_leaves([tree]):
        while name in arrays:  # a key with a slash in it
            name += "'"
        array = np.asarray(tree)
        arrays[name] = array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array  # .npz has no bfloat16
        return Node("array", name, array.dtype.name)
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    keys = [getattr(path[0], "key", None) for path, _ in children]
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in children]
    parts = [_described(child, f"{name}/{_storable(of)}", arrays) for of, (_, child) in zip(names, children, strict=True)]
    if type(tree) in (list, tuple):
        return Node("list" if type(tree) is list else "tuple", parts=parts)
    return Node("dict", keys=[_key(k, n) for k, n in zip(keys, names, strict=True)], parts=parts)


def _key(key: Any, name: str) -> str | int:
    """A dictionary's key, or its name where it is neither a number nor a text that JSON can hold."""
    is_number = isinstance(key, int) and not isinstance(key, bool)
    return key if is_number else (key if isinstance(key, str) else name).encode(errors="backslashreplace").decode()


def _storable(name: str) -> str:
    """The part of an array's name that stands for a key: printable, and short enough for a file's name in an archive."""
    return "".join(c if c.isprintable() else "_" for c in name)[:LONGEST]


def _rebuilt(node: Node, arrays: Mapping[str, np.ndarray]) -> Any:
    if node.kind == "array":
        if node.array not in arrays:
            raise InputError(f"it has no array {node.array!r}")
        array = arrays[node.array]
        if array.dtype.name == node.dtype:
            return array
        try:
            return array.view(jnp.dtype(node.dtype))
        except (TypeError, ValueError):
            raise InputError(f"{node.array!r} cannot be {node.dtype!r}") from None
    parts = [_rebuilt(part, arrays) for part in node.parts]
    match node.kind:
        case "list":
            return parts
        case "tuple":
            return tuple(parts)
        case "dict":
            return dict(zip(node.keys, parts, strict=False))
    return None
