"""The tasks, by the name they have on the command line."""

from fedbilevel.registry import Entry

TASKS = {
    name: Entry(f"fedbilevel.tasks.{module}", cls, summary, paper)
    for name, module, cls, summary, paper in [
        (
            "data-cleaning",
            "data_cleaning",
            "DataCleaning",
            "weigh training samples with noisy labels",
            "Li et al., NeurIPS 2023, 5.1",
        ),
        ("quadratic", "quadratic", "Quadratic", "heterogeneous quadratics with a known solution", "closed form"),
        ("valley", "valley", "Valley", "a lower level that is not convex, with a known solution", "closed form"),
    ]
}
