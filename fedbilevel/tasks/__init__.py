"""The tasks, by the name they have on the command line: small ones on bundled data first, then those of the papers' sizes."""

from typing import Any

from fedbilevel.registry import Entry


def _task(module: str, cls: str, summary: str, paper: str, *, run: dict[str, Any] | None = None, **knobs: Any) -> Entry:
    return Entry(f"fedbilevel.tasks.{module}", cls, summary, paper, defaults=knobs, run=run or {})


CLEANING = ("data_cleaning", "DataCleaning")
REPRESENTATION = ("hyper_representation", "HyperRepresentation")
FEW_SHOT = ("few_shot", "FewShot")
LOSS_TUNING = ("loss_tuning", "LossTuning")
TENTH = dict(clients_per_round=10)  # of 100

TASKS = {
    "data-cleaning": _task(*CLEANING, "weigh training samples with noisy labels", "Li et al., NeurIPS 2023, 5.1"),
    "hyper-representation": _task(
        *REPRESENTATION, "features on validation data, a head on training data", "MeFBO, ICLR 2025, 4.1"
    ),
    "few-shot": _task(*FEW_SHOT, "a backbone that learns tasks from few examples", "Li et al., NeurIPS 2023, 5.2"),
    "loss-tuning": _task(*LOSS_TUNING, "a loss that is fair to rare classes", "MeFBO, ICLR 2025, 4.2"),
    "regularisation": _task(
        "regularisation", "Regularisation", "weight decay for each feature, across hospitals", "bundled data"
    ),
    "quadratic": _task("quadratic", "Quadratic", "heterogeneous quadratics with a known solution", "closed form"),
    "valley": _task("valley", "Valley", "a lower level that is not convex, with a known solution", "closed form"),
    "data-cleaning-mnist": _task(
        *CLEANING,
        "data-cleaning with raw weights on 10 x 4500 images",
        "Li et al., NeurIPS 2023, 5.1",
        dataset="mnist",
        weighting="raw",
        train_per_client=4500,
        validation_per_client=50,
        hidden=200,
        scaling="standard",
        batch_size=64,
    ),
    "data-cleaning-sigmoid": _task(
        *CLEANING,
        "data-cleaning with sigmoid weights on 100 x 600 images",
        "MeFBO, ICLR 2025, 4.3",
        run=TENTH,
        dataset="mnist",
        clients=100,
        clean="own",
        corruption=0.7,
        train_per_client=300,
        validation_per_client=300,
        layers=2,
        hidden=200,
        scaling="standard",
        rc=0,
        batch_size=10,
    ),
    "hyper-representation-mnist": _task(
        *REPRESENTATION,
        "hyper-representation on 100 x 600 images",
        "FedMBO; FBO-AggITD; MeFBO, table 2",
        run=TENTH,
        dataset="mnist",
        clients=100,
        train_per_client=300,
        validation_per_client=300,
        hidden=200,
        scaling="standard",
        batch_size=64,
    ),
    "few-shot-omniglot": _task(
        *FEW_SHOT,
        "few-shot on Omniglot, 11 clients with 3 alphabets each",
        "Li et al., NeurIPS 2023, 5.2",
        dataset="omniglot",
        validation_shots=15,
        clients=11,
        train_groups=33,
        spared_groups=5,
        tasks=60,
        filters=64,
    ),
    "few-shot-mini-imagenet": _task(
        *FEW_SHOT,
        "few-shot on MiniImageNet, 4 clients with 16 classes each",
        "Li et al., NeurIPS 2023, 5.2",
        dataset="mini-imagenet",
        validation_shots=15,
        clients=4,
        train_groups=64,
        tasks=60,
        rotations=False,
        filters=64,
        halving="pooling",
    ),
    "loss-tuning-mnist": _task(
        *LOSS_TUNING,
        "loss-tuning on 14,818 images of long-tailed classes",
        "MeFBO, ICLR 2025, 4.2",
        run=TENTH,
        dataset="mnist",
        most=6000,
        ratio=0.01,
        clients=100,
        train_per_client=74,
        validation_per_client=74,
        hidden=200,
        scaling="standard",
        batch_size=64,
    ),
}
