"""The algorithms, by the name they have on the command line."""

from fedbilevel.registry import Entry

LI = "Li, Huang and Huang, NeurIPS 2023"
HUANG = "Huang, Zhang and Ji, ICML 2023"
YANG = "Yang, Xiao and Ji, NeurIPS 2023"
MEFBO = "anonymous, submitted to ICLR 2025"
MCMAHAN = "McMahan et al., AISTATS 2017"

ALGORITHMS = {
    name: Entry(f"fedbilevel.algorithms.{module}", cls, summary, paper)
    for name, module, cls, summary, paper in [
        ("fedbioacc", "fedbioacc", "FedBiOAcc", "local steps on x, y and u with STORM momenta", LI),
        ("fedbio", "fedbio", "FedBiO", "local steps on x, y and u, averaged", LI),
        ("fedbio-local", "fedbio_local", "FedBiOLocal", "a lower level per client, Neumann hypergradients", LI),
        ("fedmbo", "fedmbo", "FedMBO", "minibatch SGD on y, parallel Neumann chains (PHE)", HUANG),
        ("simfbo", "simfbo", "SimFBO", "one loop, one round per step", YANG),
        ("mefbo", "mefbo", "MeFBO", "first order only; the lower level may be non-convex", MEFBO),
        ("fedavg", "fedavg", "FedAvg", "trains y alone: what the upper level gains", MCMAHAN),
    ]
}
