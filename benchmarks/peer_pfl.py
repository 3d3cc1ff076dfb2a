"""FedAvg in pfl-research, with PyTorch, for `peers.py`."""

from collections.abc import Callable

import torch
from peer import BATCH, STEP, Data, answer
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel


class Network(torch.nn.Sequential):
    """The network as pfl wants it."""

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(images), labels)

    def metrics(self, images: torch.Tensor, labels: torch.Tensor) -> dict:
        return {}


def run(data: Data, rounds: int, begin: Callable[[], None]) -> tuple:
    network = Network(torch.nn.Linear(784, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    starts = (data.w1.T, data.b1, data.w2.T, data.b2)
    with torch.no_grad():
        for parameter, start in zip(network.parameters(), starts, strict=True):
            parameter.copy_(torch.as_tensor(start))
    rows = [Dataset((torch.as_tensor(x), torch.as_tensor(y).long())) for x, y in zip(data.images, data.labels, strict=True)]
    cohorts = iter(data.cohorts[:rounds].reshape(-1).tolist())
    training = FederatedDataset(lambda user: rows[user], lambda: next(cohorts))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    begin()
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, 10**9, data.cohorts.shape[1], None),
        SimulatedBackend(training, training),
        model,
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=STEP),
        NNEvalHyperParams(local_batch_size=BATCH),
        send_metrics_to_platform=False,
    )
    w1, b1, w2, b2 = (parameter.detach().numpy() for parameter in network.parameters())
    return w1.T, b1, w2.T, b2


answer(run)
