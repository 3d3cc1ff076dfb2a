"""The rules by which answers are aggregated, by the name they have on the command line, and as text with their settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedbilevel.errors import InputError
from fedbilevel.own_code import is_reference, is_unnamed, label
from fedbilevel.registry import Entry, Registry, find

if TYPE_CHECKING:
    from fedbilevel.core.aggregation import Aggregation

YIN, BLANCHARD = "Yin et al., ICML 2018", "Blanchard et al., NeurIPS 2017"
STICH = "Stich et al., NeurIPS 2018"


def _compressed(cls: str, summary: str, paper: str) -> Entry:
    return Entry("fedbilevel.aggregations.compression", cls, summary, paper)


def _robust(cls: str, summary: str, paper: str) -> Entry:
    return Entry("fedbilevel.aggregations.robust", cls, summary, paper)


BUNDLED = {
    "mean": Entry("fedbilevel.core.aggregation", "Mean", "the weighted mean", "McMahan et al., AISTATS 2017"),
    "median": _robust("Median", "the median of every entry", YIN),
    "trimmed-mean": _robust("TrimmedMean", "the mean of every entry without its extremes", YIN),
    "geometric-median": _robust("GeometricMedian", "the point nearest to all answers", "Pillutla et al., 2022"),
    "krum": _robust("Krum", "the answer whose neighbours are nearest", BLANCHARD),
    "multi-krum": _robust("MultiKrum", "the mean of the answers whose neighbours are nearest", BLANCHARD),
    "centred-clipping": _robust("CentredClipping", "the mean of clipped differences", "Karimireddy et al., ICML 2021"),
    "buffered": Entry(
        "fedbilevel.aggregations.buffered",
        "Buffered",
        "the mean of the first answers, and of late ones by age",
        "Nguyen et al., AISTATS 2022",
    ),
    "secure-sum": Entry(
        "fedbilevel.aggregations.secure",
        "SecureSum",
        "the mean, from a sum whose terms stay hidden",
        "Bonawitz et al., CCS 2017",
    ),
    "private-mean": Entry(
        "fedbilevel.aggregations.private", "PrivateMean", "the mean of clipped changes, with noise", "McMahan et al., ICLR 2018"
    ),
    "private-sum": Entry(
        "fedbilevel.aggregations.private_sum",
        "PrivateSum",
        "the mean of clipped changes, from a hidden sum with the clients' noise",
        "Kairouz et al., ICML 2021",
    ),
    "quantized": _compressed("Quantized", "the mean of changes in 8 or 4 bits, with error feedback", "Seide et al., 2014"),
    "top-k": _compressed("TopK", "the mean of changes' largest entries, with error feedback", STICH),
    "random-k": _compressed("RandomK", "the mean of changes' random entries, with error feedback", STICH),
}

AGGREGATIONS = Registry("aggregation", BUNDLED)
WRITTEN = re.compile(r"([^()]+)(?:\((.*)\))?", re.S)


def written(name: str, values: Mapping[str, Any]) -> str:
    """A rule and its settings as text: NAME, or NAME(SETTING=VALUE, ...)."""
    return f"{name}({', '.join(f'{k}={v}' for k, v in values.items())})" if values else name


def parts(text: str) -> tuple[str, dict[str, str]]:
    """The name and the settings in what `written` returned; `InputError` if it is something else."""
    found, values = WRITTEN.fullmatch(text), dict[str, str]()
    if found is None:
        raise InputError(f"aggregate must be NAME or NAME(SETTING=VALUE, ...); given: {text}")
    for pair in (found[2] or "").split(",") if (found[2] or "").strip() else ():
        setting, equals, value = (part.strip() for part in pair.partition("="))
        if not (setting and equals and value) or setting in values:
            raise InputError(f"aggregate must be NAME or NAME(SETTING=VALUE, ...), each setting once; given: {text}")
        values[setting] = value
    return found[1].strip(), values


def configured(text: str) -> Aggregation:
    """The rule that a text describes."""
    name, values = parts(text)
    return find(AGGREGATIONS, "aggregation", name).configure(label(name), values)


def bundled(text: str) -> Aggregation:
    """The same, if it is one of the package's own: what a site executes."""
    name, values = parts(text)
    return find(AGGREGATIONS.bundled, "aggregation", name).configure(name, values)


def in_full(text: str) -> str:
    """The text with all settings in it; unchanged if the rule is the user's own, whose code is not executed for it."""
    name, _ = parts(text)
    return text if is_reference(name) or is_unnamed(name) else written(name, configured(text).settings())


def in_short(text: str) -> str:
    """The text without the settings that the rule has anyway; unchanged unless it is one of the package's own."""
    name, values = parts(text)
    if name not in AGGREGATIONS.bundled:
        return text
    usual = bundled(name).settings()
    return written(name, {setting: value for setting, value in values.items() if value != str(usual.get(setting))})


def text_of(rule: Aggregation) -> str:
    """The text that describes an instance; its class in angle brackets if no name leads to it."""
    for name, entry in AGGREGATIONS.bundled.items():
        if entry.load() is type(rule):
            return written(name, rule.settings())
    return f"<{type(rule).__name__}>"
