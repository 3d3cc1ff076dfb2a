"""Calls of the library: the table of the tests, and every setting, option and argument with odd values."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from test_library_calls import REFUSED, WORKS, build, solve

import fedbilevel as fb
from campaign.case import Case
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.runs.options import RunOptions
from fedbilevel.settings import settings
from fedbilevel.tasks import TASKS

jax.config.update("jax_enable_x64", True)  # as in the tests, whose table it is
ODD = {
    "None": None,
    "True": True,
    "-1": -1,
    "0": 0,
    "3": 3,
    "1.5": 1.5,
    "1e300": 1e300,
    "nan": float("nan"),
    "inf": float("inf"),
    "2 ** 63": 2**63,
    "10 ** 400": 10**400,
    "1j": 1j,
    "'1'": "1",
    "''": "",
    "b'1'": b"1",
    "[]": [],
    "()": (),
    "{}": {},
    "set()": set(),
    "object()": object(),
    "int": int,
    "range(2)": range(2),
    "np.array(2)": np.array(2),
    "np.ones(3)": np.ones(3),
    "np.array(['a'])": np.array(["a"]),
    "np.array(None)": np.array(None),
    "np.datetime64(0, 's')": np.datetime64(0, "s"),
    "np.float16(0.5)": np.float16(0.5),
    "np.uint64(2 ** 63)": np.uint64(2**63),
    "jnp.ones(())": jnp.ones(()),
    "jnp.ones((2, 2))": jnp.ones((2, 2)),
    "jax.random.key(0)": jax.random.key(0),
    "lambda: 0": lambda: 0,
    "fb.SimFBO()": fb.SimFBO(),
    "fb.Ball(1)": fb.Ball(1),
}
ARGUMENTS = (
    *("f", "g", "x0", "y0", "lower", "upper", "algorithm", "rounds", "steps", "batch_size", "clients_per_round", "seed"),
    *("participation", "weights", "x_set", "y_set", "every", "metrics", "chunk_size", "products", "loss_bound", "observe"),
)
LONG = {"steps", "rounds"}


def cases(seed: int, count: int) -> list[Case]:
    """The tests' table, and that many of all others."""
    table = [Case(f"works: {name}", partial(_act, call, True)) for name, call in WORKS.items()]
    table += [Case(f"refused: {row.id}", partial(_act, row.values[0], False)) for row in REFUSED]
    odd = [Case(name, partial(_act, call, None)) for name, call in _odd()]
    return table + random.Random(seed).sample(odd, min(count, len(odd)))


def _act(call: Callable[[], object], works: bool | None, folder: Path) -> str:
    """What is wrong with the call: it must work, or must not, or may do either (None)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except (fb.InputError, fb.Diverged) as error:
            if works:
                return f"it is refused: {error}"
            return "" if "\n" not in str(error) and len(str(error)) < 1000 else f"not one line: {error}"
        except Exception as error:
            return f"it raises {type(error).__name__}: {str(error)[:500]}"
    return "it is accepted" if works is False else ""


def _odd() -> Iterator[tuple[str, Callable[[], object]]]:
    for said, value in ODD.items():
        for argument in ARGUMENTS:
            if not (argument in LONG and said == "2 ** 63"):
                alone: dict[str, Any] = {"steps": None} if argument == "rounds" else {}
                yield f"solve({argument}={said})", partial(solve, **alone, **{argument: value})
        for argument in ("problem", "upper", "lower", "weights", "batch_size"):
            yield f"Population.build({argument}={said})", partial(build, **{argument: value})
        for field in settings(RunOptions):
            needed = {} if field in ("rounds", "steps") else {"rounds": 5}
            yield f"RunOptions({field}={said})", partial(RunOptions, **needed, **{field: value})
        for kind in (fb.Uniform, fb.Bernoulli, fb.Ball, fb.Simplex):
            yield f"{kind.__name__}({said})", partial(kind, value)  # type: ignore[call-arg]
        yield f"Box({said}, 1)", partial(fb.Box, value, 1)
        yield f"Dropouts({said}, 0.5)", partial(fb.Dropouts, value, 0.5)
        yield f"Dropouts(Everyone(), {said})", partial(fb.Dropouts, fb.Everyone(), value)
        yield f"iterate({said}, ...)", partial(fb.iterate, value, lambda k, v: v, 0)
        for table in (ALGORITHMS, TASKS):
            for name, entry in table.items():
                for field in settings(entry.load()):
                    yield f"{name}({field}={said})", partial(entry.configure, name, {field: value})
                    yield f"{entry.name}({field}={said})", partial(entry.load(), **{field: value})
