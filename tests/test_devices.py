"""Clients split over devices, and over processes: the same numbers as on one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = str(Path(__file__).with_name("split_run.py"))


def started(*arguments, devices=1):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(processes):
    outputs = [process.communicate(timeout=600) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.fixture(scope="module")
def on_one_device():
    (result,) = results([started()])
    return result


def check(result, expected, devices):
    assert result.pop("devices") == devices
    for algorithm, numbers in result.items():
        for name, value in numbers.items():
            np.testing.assert_allclose(value, expected[algorithm][name], rtol=1e-9, err_msg=f"{algorithm}: {name}")


@pytest.mark.slow
def test_four_devices_give_what_one_gives(on_one_device):
    (result,) = results([started(devices=4)])
    check(result, on_one_device, 4)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(on_one_device):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = results([started(address, 2, number) for number in range(2)])
    assert both[0] == both[1]
    check(both[0], on_one_device, 2)
