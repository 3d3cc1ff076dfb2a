"""A tuning by successive halving against its candidates one after another, and many runs together against one alone.

Compiling is not timed: a tuning of a few rounds has the same programs, and comes first. The runs one after another reuse one
compiled program; a sample of the candidates is timed, of which each makes all rounds unless it diverges, and stands for all
candidates with all seeds.

    python benchmarks/tuning.py                                                       # two cores: the bundled digits
    python benchmarks/tuning.py --task hyper-representation-mnist --together 128      # a GPU: as the target is stated
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from timing import seconds

from fedbilevel.errors import Diverged
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.sweeps.batched_runs import run_together
from fedbilevel.runs.tuning.folder import TuningFolder
from fedbilevel.runs.tuning.tuning import Tuning


def alone(experiment: Experiment) -> None:
    try:
        for _ in experiment.run():
            pass
    except Diverged:
        pass


def tuned(tuning: Tuning) -> tuple[float, TuningFolder]:
    """The seconds of a tuning from its beginning, and its folder."""
    folder = TuningFolder.create(Path(tempfile.mkdtemp()), tuning)
    return seconds(folder.execute), folder


def halving(tuning: Tuning, sample: int) -> None:
    short = tuning.keep ** (tuning.rungs - 1)
    compiling, _ = tuned(replace(tuning, options=replace(tuning.options, rounds=short, every=short)))
    halved, folder = tuned(tuning)
    candidates = folder.passes()[0].candidates
    chosen = [candidates[0], *random.Random(0).sample(list(candidates[1:]), sample - 1)]
    experiments = [tuning.configuration(values, 0, tuning.rungs - 1).experiment() for values in chosen]
    alone(experiments[0])  # compiles
    one_by_one = sum(seconds(lambda e=e: alone(e)) for e in experiments) / sample * len(candidates) * tuning.seeds
    made = tuning.pass_rounds() / (len(candidates) * tuning.seeds * tuning.rounds(tuning.rungs - 1))
    print(f"{tuning.title()}, {len(candidates)} candidates x {tuning.seeds} seeds to round {tuning.options.rounds}:")
    print(f"  halving, as programs     {halved:9.1f} s for {made:.1%} of the rounds; before that, to compile {compiling:.1f} s")
    print(f"  all, one after another   {one_by_one:9.1f} s, from {sample} of the candidates")
    print(f"  ratio                    {one_by_one / halved:9.1f}", flush=True)


def rate(tuning: Tuning, together: int) -> None:
    """Equal runs that differ in their seeds, against one alone, in rounds a second."""
    last = tuning.rungs - 1
    experiments = [tuning.configuration({}, seed, last).experiment() for seed in range(together)]
    rounds = tuning.rounds(last)
    alone(experiments[0])
    run_together(experiments)
    one = min(seconds(lambda: alone(experiments[0])) for _ in range(3))
    many = min(seconds(lambda: run_together(experiments)) for _ in range(3))
    per_round = 1000 * many / rounds / together
    print(f"{together} equal runs together {per_round:9.4f} ms a round of each; one alone {1000 * one / rounds:.4f} ms")
    print(f"  ratio                    {together * one / many:9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="hyper-representation")
    parser.add_argument("--algorithm", default="simfbo")
    parser.add_argument("--data", default="")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sample", type=int, default=8, help="candidates that are timed one after another")
    parser.add_argument("--together", type=int, default=0, help="equal runs to time together; none unless given")
    given = parser.parse_args()
    options = RunOptions(rounds=given.rounds, every=given.rounds)
    tuning, _ = Tuning.prepared(
        given.task,
        {},
        given.algorithm,
        {},
        {},
        options,
        data=given.data,
        candidates=given.candidates,
        seeds=given.seeds,
        passes=1,
    )
    halving(tuning, given.sample)
    if given.together:
        rate(tuning, given.together)


if __name__ == "__main__":
    main()
