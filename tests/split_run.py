"""Run as a program: the last metrics of some experiments, as JSON, on all devices of all processes.

split_run.py [ADDRESS PROCESSES NUMBER]
"""

import json
import sys

import jax

if len(sys.argv) > 1:
    address, processes, number = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(processes), int(number))

from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions

CASES = (  # cohorts of 3, 5 and 10 clients, whole and in chunks
    ("simfbo", {}, dict(clients_per_round=3)),
    ("fedbio-local", dict(lower_level="local"), dict(clients_per_round=5)),  # values that stay at clients
    ("fedbioacc", {}, dict(chunk_size=3, dropout=0.3)),
)


def main() -> None:
    result = {"devices": jax.device_count()}
    for algorithm, knobs, run in CASES:
        configuration = Configuration.resolve(
            "quadratic", dict(knobs, noise=0.1), algorithm, {}, RunOptions(rounds=20, every=20, **run)
        )
        *_, last = configuration.experiment().run()
        result[algorithm] = {name: value for name, value in last.row().items() if name != "seconds"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
