"""The tasks, by their names on the command line: small ones on bundled data first, then those at the papers' sizes."""

from collections.abc import Mapping
from typing import Any

from fedbilevel.registry import NOTHING, Entry, Registry


def _task(
    module: str,
    cls: str,
    summary: str,
    paper: str,
    *,
    run: Mapping[str, Any] = NOTHING,
    ours: Mapping[str, Any] = NOTHING,
    **knobs: Any,
) -> Entry:
    return Entry(f"fedbilevel.tasks.{module}", cls, summary, paper, defaults=knobs, ours=ours, run=run)


CLEANING = ("data_cleaning", "DataCleaning")
REPRESENTATION = ("hyper_representation", "HyperRepresentation")
FEW_SHOT = ("few_shot", "FewShot")
LOSS_TUNING = ("loss_tuning", "LossTuning")
TEN = dict(clients_per_round=10)
STANDARD = dict(scaling="standard")  # as in the papers' public code
SIGMOID: dict[str, Any] = dict(clean="own", rho=0.7, layers=2, hidden=200, rc=0)  # MeFBO's data cleaning

BUNDLED = {
    "data-cleaning": _task(*CLEANING, "weigh training samples with noisy labels", "Li et al., NeurIPS 2023, 5.1"),
    "hyper-representation": _task(
        *REPRESENTATION, "features on validation data, a head on training data", "MeFBO, ICLR 2025, 4.1"
    ),
    "few-shot": _task(*FEW_SHOT, "a backbone that learns tasks from few examples", "Li et al., NeurIPS 2023, 5.2"),
    "loss-tuning": _task(*LOSS_TUNING, "a loss that is fair to rare classes", "MeFBO, ICLR 2025, 4.2"),
    "regularisation": _task(
        "regularisation", "Regularisation", "weight decay for each feature, across hospitals", "bundled data"
    ),
    "label-errors": _task("label_errors", "LabelErrors", "how far to trust each row of tables or image folders", "ours"),
    "quadratic": _task("quadratic", "Quadratic", "heterogeneous quadratics with a known solution", "closed form"),
    "valley": _task("valley", "Valley", "a lower level that is not convex, with a known solution", "closed form"),
    "data-cleaning-mnist": _task(
        *CLEANING,
        "data-cleaning with raw weights on 10 x 4500 images",
        "Li et al., NeurIPS 2023, 5.1",
        ours=dict(hidden=200, batch_size=64, **STANDARD),
        dataset="mnist",
        weighting="raw",
        train_per_client=4500,
        validation_per_client=50,
    ),
    "data-cleaning-sigmoid": _task(
        *CLEANING,
        "data-cleaning with sigmoid weights on 100 x 600 images",
        "MeFBO, ICLR 2025, 4.3",
        run=TEN,
        ours=STANDARD,
        dataset="mnist",
        clients=100,
        train_per_client=300,
        validation_per_client=300,
        batch_size=10,
        **SIGMOID,
    ),
    "data-cleaning-fashion-mnist": _task(
        *CLEANING,
        "data-cleaning of clothes on 20 x 3000 images",
        "MeFBO, ICLR 2025, F",
        run=dict(clients_per_round=2),
        ours=STANDARD,
        dataset="fashion-mnist",
        clients=20,
        train_per_client=1500,
        validation_per_client=1500,
        batch_size=256,
        **SIGMOID,
    ),
    "data-cleaning-cifar-10": _task(
        *CLEANING,
        "data-cleaning of photographs on 20 x 2500 images",
        "MeFBO, ICLR 2025, F",
        run=dict(clients_per_round=2),
        ours=STANDARD,
        dataset="cifar-10",
        model="cnn",
        clients=20,
        train_per_client=1250,
        validation_per_client=1250,
        batch_size=256,
        **SIGMOID,
    ),
    "hyper-representation-mnist": _task(
        *REPRESENTATION,
        "hyper-representation on 100 x 600 images",
        "FedMBO; FBO-AggITD; MeFBO, table 2",
        run=TEN,
        ours=STANDARD,
        dataset="mnist",
        clients=100,
        train_per_client=300,
        validation_per_client=300,
        hidden=200,
        batch_size=64,
    ),
    "few-shot-omniglot": _task(
        *FEW_SHOT,
        "few-shot on Omniglot, 11 clients with 3 alphabets each",
        "Li et al., NeurIPS 2023, 5.2",
        ours=dict(tasks=60),
        dataset="omniglot",
        validation_shots=15,
        clients=11,
        train_groups=33,
        spared_groups=5,
        filters=64,
    ),
    "few-shot-mini-imagenet": _task(
        *FEW_SHOT,
        "few-shot on MiniImageNet, 4 clients with 16 classes each",
        "Li et al., NeurIPS 2023, 5.2",
        ours=dict(tasks=60),
        dataset="mini-imagenet",
        validation_shots=15,
        clients=4,
        train_groups=64,
        rotations=False,
        filters=64,
        halving="pooling",
    ),
    "loss-tuning-mnist": _task(
        *LOSS_TUNING,
        "loss-tuning on 14,818 images of long-tailed classes",
        "MeFBO, ICLR 2025, 4.2",
        run=TEN,
        ours=dict(batch_size=64, **STANDARD),
        dataset="mnist",
        most=6000,
        ratio=0.01,
        clients=100,
        train_per_client=74,
        validation_per_client=74,
        hidden=200,
    ),
}

TASKS = Registry("task", BUNDLED)
