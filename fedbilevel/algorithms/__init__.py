"""The algorithms, by the name they have on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedbilevel.registry import NOTHING, Entry, Registry

if TYPE_CHECKING:
    from fedbilevel.algorithms.base import Algorithm

LI = "Li, Huang and Huang, NeurIPS 2023"
HUANG = "Huang, Zhang and Ji, ICML 2023"
XIAO = "Xiao and Ji, ICML 2023"
YANG = "Yang, Xiao and Ji, NeurIPS 2023"
TARZANAGH = "Tarzanagh et al., ICML 2022"
BAN = "Yang, Ban, Huang, Ma and Ji, ICLR 2025"
HE = "He et al., ICML 2024"
MSA = "Tarzanagh, Li, Sharma and Oymak, 2023"
MEFBO = "anonymous, submitted to ICLR 2025"
FEDMBO, LFEDNEST, BSGVR = ("fedmbo", "FedMBO"), ("lfednest", "LFedNest"), ("local_bsgvr", "LocalBSGVR")


def _entry(module: str, cls: str, summary: str, paper: str, defaults: Mapping[str, Any] = NOTHING, **preset: Any) -> Entry:
    return Entry(f"fedbilevel.algorithms.{module}", cls, summary, paper, preset, defaults)


BUNDLED = {
    "fedpace": _entry("fedpace", "FedPace", "measures its step sizes: needs no tuning", "ours"),
    "fedpace-local": _entry("fedpace_local", "FedPaceLocal", "FedPace for a lower level per client: needs no tuning", "ours"),
    "fedpace-own": _entry("fedpace_own", "FedPaceOwn", "FedPace for an x per client, which it keeps: needs no tuning", "ours"),
    "fedbioacc": _entry("fedbioacc", "FedBiOAcc", "local steps on x, y and u with STORM momenta", LI),
    "fedbio": _entry("fedbio", "FedBiO", "local steps on x, y and u, averaged", LI),
    "fedbioacc-local": _entry("fedbioacc_local", "FedBiOAccLocal", "FedBiO-Local with STORM momenta", LI),
    "fedbio-local": _entry("fedbio_local", "FedBiOLocal", "a lower level per client, Neumann hypergradients", LI),
    "distbioacc": _entry("fedbioacc_local", "FedBiOAccLocal", "FedBiOAcc-Local without local steps", LI, local_steps=1),
    "distbio": _entry("fedbio_local", "FedBiOLocal", "FedBiO-Local without local steps", LI, local_steps=1),
    "fedmbo": _entry(*FEDMBO, "minibatch SGD on y, parallel Neumann chains (PHE)", HUANG, local_upper=False),
    "fbo-aggitd": _entry("fbo_aggitd", "FBOAggITD", "y and the hypergradient in one loop of rounds", XIAO, {"lower_rounds": 5}),
    "mefbo": _entry("mefbo", "MeFBO", "first order only; the lower level may be non-convex", MEFBO),
    "fednest": _entry(
        *FEDMBO,
        "FedSVRG on y, one shared Neumann chain (IHGP)",
        TARZANAGH,
        {"lower_solver": "fedsvrg"},
        estimator="ihgp",
        local_upper=True,
    ),
    "lfednest": _entry(*LFEDNEST, "FedNest with local, biased hypergradients", TARZANAGH, pooled=False),
    "simfbo": _entry("simfbo", "SimFBO", "one loop, one round per step", YANG, rescale=False),
    "shrofbo": _entry("simfbo", "SimFBO", "SimFBO for unequal numbers of local steps", YANG, rescale=True),
    "commfedbio": _entry("commfedbio", "CommFedBiO", "compressed rounds on the linear system", "Li, Pei and Huang, KDD 2022"),
    "s-tfbo": _entry("s_tfbo", "STFBO", "one loop, steps from cumulative gradient lengths: needs no tuning", BAN),
    "d-tfbo": _entry("d_tfbo", "DTFBO", "rounds on y, on u and on x, steps as S-TFBO's: needs no tuning", BAN),
    "fedmsa": _entry("fedmsa", "FedMSA", "local steps along the server's STORM momenta, corrected for drift", MSA),
    "cm-soba": _entry("cm_soba", "CMSOBA", "one loop, compressed rounds, a moving average for x", HE),
    "ef-soba": _entry("ef_soba", "EFSOBA", "CM-SOBA with error feedback in place of unbiased compression", HE),
    "local-bsgvr": _entry(
        *BSGVR, "STORM on local hypergradients, for homogeneous clients", "Gao, 2022", adaptive=False, pooled=False
    ),
    "adafbio": _entry(*BSGVR, "Local-BSGVR with adaptive steps", "Huang, 2022", adaptive=True, pooled=False),
    "stocbio": _entry(
        *LFEDNEST,
        "one client with all data: SGD, Neumann",
        "Ji, Yang and Liang, ICML 2021",
        pooled=True,
        lower_solver="sgd",
        local_steps=1,
    ),
    "mrbo": _entry(
        *BSGVR,
        "one client with all data: STORM, Neumann",
        "Yang, Ji and Liang, NeurIPS 2021",
        pooled=True,
        adaptive=False,
        local_steps=1,
    ),
    "fedavg": _entry("fedavg", "FedAvg", "trains y alone: a baseline without the upper level", "McMahan et al., AISTATS 2017"),
}

ALGORITHMS = Registry("algorithm", BUNDLED)
DEFAULTS = {"global": "fedpace", "local": "fedpace-local", "own x": "fedpace-own"}  # kind of task -> where none is named


def called(algorithm: Algorithm) -> str:
    """What messages call an algorithm: its class, or the name of a variant if the class is named after another one."""
    variants = (name for name, entry in BUNDLED.items() if _is_variant(algorithm, name, entry))
    return next(variants, type(algorithm).__name__)


def _is_variant(algorithm: Algorithm, name: str, entry: Entry) -> bool:
    cls = type(algorithm)
    own = (entry.module, entry.name) == (cls.__module__, cls.__name__) and entry.name.lower() != name.replace("-", "")
    return own and all(getattr(algorithm, setting) == value for setting, value in entry.preset.items())
