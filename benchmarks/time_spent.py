"""Where the time of a step goes on a CPU: per cent of the time of all operations, as XLA reports it.

products      of matrices, with what is fused to them
gathers       of minibatches' rows, and of the clients that take part
random bits   and sorting by them
elementwise   additions, activations, losses, sums, conversions
copies        into and out of vectors, transpositions, concatenations
loops         starting their operations and waiting for them

    python benchmarks/time_spent.py [ALGORITHM ...]
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
from rounds import at_papers_size
from timing import program_of, seconds

from fedbilevel.algorithms import ALGORITHMS

KINDS = {  # the first that an operation has any of
    "products": {"dot", "convolution", "custom-call"},
    "gathers": {"gather", "scatter"},
    "random bits": {"xor", "shift-right-logical", "sort", "rng-bit-generator"},
}
COPIES = {
    "copy",
    "concatenate",
    "transpose",
    "reshape",
    "bitcast",
    "slice",
    "dynamic-slice",
    "dynamic-update-slice",
    "pad",
    "broadcast",
}
BESIDE = {"fusion", "parameter", "constant", "tuple", "get-tuple-element", "iota"}  # that come with any kind
HEADS = [*KINDS, "elementwise", "copies", "loops"]
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*? ([a-z][a-z0-9-]*)\(")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
LOOPS = {"while", "conditional", "call"}  # whose operations have events of their own


def kinds(program: str) -> dict[str, str]:
    """The kind of every operation in a compiled program's text."""
    inside: dict[str, set[str]] = collections.defaultdict(set)
    own: dict[str, tuple[str, str]] = {}
    computation = ""
    for line in program.splitlines():
        if found := COMPUTATION.match(line):
            computation = found[1]
        elif found := INSTRUCTION.match(line):
            called = CALLED.search(line)
            inside[computation].add(found[2])
            own[found[1]] = found[2], called[1] if called else ""
    return {name: _kind(opcode, {opcode} | inside.get(called, set())) for name, (opcode, called) in own.items()}


def _kind(opcode: str, opcodes: set[str]) -> str:
    if opcode in LOOPS:
        return "loops"
    kind = next((kind for kind, members in KINDS.items() if members & opcodes), None)
    return kind or ("copies" if opcodes <= COPIES | BESIDE else "elementwise")


def own_times(events: Iterable[dict]) -> Iterator[tuple[str, float]]:
    """Each event's name and the time in it that no other event within it has."""
    threads: dict[tuple, list[dict]] = collections.defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            threads[event["pid"], event["tid"]].append(event)
    for found in threads.values():
        open_: list[list] = []  # name, end, own time
        for event in sorted(found, key=lambda e: (e["ts"], -e["dur"])):
            while open_ and event["ts"] >= open_[-1][1] - 1e-3:
                name, _, own = open_.pop()
                yield name, own
            if open_:
                open_[-1][2] -= event["dur"]
            open_.append([event["args"]["hlo_op"], event["ts"] + event["dur"], event["dur"]])
        yield from ((name, own) for name, _, own in open_)


def shares(algorithm: str) -> dict[str, float]:
    """Of the time of a step's operations, by kind."""
    of, count = at_papers_size(algorithm)
    program, run = program_of(of, count)
    seconds(run)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            seconds(run)
        (file,) = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))
    known = kinds(program.as_text())
    total = dict.fromkeys(HEADS, 0.0)
    for name, own in own_times(events["traceEvents"] if isinstance(events, dict) else events):
        total[known[name]] += own
    return {kind: time / sum(total.values()) for kind, time in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "algorithms", nargs="*", default=[name for name in ALGORITHMS if not ALGORITHMS[name].load().own_x], metavar="ALGORITHM"
    )
    given = parser.parse_args()
    if jax.default_backend() != "cpu":
        print("what the time goes to is told on CPUs only: set JAX_PLATFORMS=cpu")
        return
    print(f"{'per cent':18}" + "".join(f"{head:>13}" for head in HEADS))
    for name in given.algorithms:
        of = shares(name)
        print(f"{name:18}" + "".join(f"{100 * of[head]:13.0f}" for head in HEADS), flush=True)


if __name__ == "__main__":
    main()
