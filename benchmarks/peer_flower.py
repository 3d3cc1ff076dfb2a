"""FedAvg in Flower's simulation, with PyTorch, for `peers.py`: one client for each core at a time.

Its processes start in a first round, of which nothing is kept, before the clock does.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import flwr
import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from peer import BATCH, STEP, Data, answer

logging.getLogger("flwr").setLevel(logging.ERROR)


class Site(NumPyClient):
    """One client."""

    def __init__(self, file: str):
        self._file = file

    def fit(self, parameters: list[np.ndarray], config: dict) -> tuple:
        data, number = _data(self._file), config["client"]
        rows = torch.as_tensor(data.images[number]), torch.as_tensor(data.labels[number]).long()
        w1, b1, w2, b2 = own = [torch.tensor(p, requires_grad=True) for p in parameters]
        optimizer = torch.optim.SGD(own, lr=STEP)
        for x, y in zip(*(a.split(BATCH) for a in rows), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(torch.relu(x @ w1 + b1) @ w2 + b2, y).backward()
            optimizer.step()
        return [p.detach().numpy() for p in own], len(rows[1]), {}


_loaded: dict[str, Data] = {}


def _data(file: str) -> Data:
    if file not in _loaded:
        torch.set_num_threads(1)
        _loaded[file] = Data(**np.load(file))
    return _loaded[file]


def run(data: Data, rounds: int, begin: Callable[[], None]) -> tuple:
    file, last = os.path.abspath(sys.argv[1]), []

    class Kept(FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list:
            if server_round == 2:
                begin()
            cohort = data.cohorts[max(server_round - 2, 0)].tolist()
            clients = client_manager.sample(len(cohort), min_num_clients=len(data.images))
            return [(c, flwr.common.FitIns(parameters, {"client": m})) for c, m in zip(clients, cohort, strict=True)]

        def aggregate_fit(self, server_round: int, results: list, failures: list) -> tuple:
            assert not failures, failures[0]
            parameters, metrics = super().aggregate_fit(server_round, results, failures)
            last[:] = [start if server_round == 1 else parameters]
            return last[0], metrics

    start = ndarrays_to_parameters([data.w1, data.b1, data.w2, data.b2])
    strategy = Kept(fraction_evaluate=0.0, initial_parameters=start)
    server = ServerApp(server_fn=lambda context: ServerAppComponents(strategy=strategy, config=ServerConfig(rounds + 1)))

    def client(context: Context) -> Any:
        return Site(file).to_client()

    flwr.simulation.run_simulation(
        server, ClientApp(client_fn=client), len(data.images), backend_config={"client_resources": {"num_cpus": 1}}
    )
    return tuple(parameters_to_ndarrays(last[0]))


answer(run)
