"""The reference of the library: every public name with its signature, its types and its docstring."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import fedbilevel
from fedbilevel.algorithms import ALGORITHMS

ROOMS = {
    "library": "Solving",
    "report": "Logging",
    "tasks": "Tasks and data",
    "core": "Problems, and who takes part",
    "algorithms": "Writing an algorithm",
    "settings": "Settings",
    "errors": "Errors",
}
WIDTH = 100  # characters in a line of a signature
Prose = Callable[[str], str]


def reference(prose: Prose) -> str:
    """The page; `prose` makes Markdown of a docstring's text."""
    classes = sorted({entry.name for entry in ALGORITHMS.bundled.values()})
    by_room: dict[str, list[str]] = {room: [] for room in ROOMS}
    for name in fedbilevel.__all__:
        if name != "ALGORITHMS" and name not in classes:
            by_room[getattr(fedbilevel, name).__module__.split(".")[1]].append(name)
    parts = ["# API reference", "Each is a name in `fedbilevel`, which the examples import as `fb`."]
    for room, names in by_room.items():
        parts.append(f"## {ROOMS[room]}")
        for name in names:
            parts += _entry(name, getattr(fedbilevel, name), prose)
    parts.append("## Algorithms")
    parts.append(
        "`ALGORITHMS` is the table of algorithms by name. Their [pages](algorithms/index.md) list the hyperparameters, which "
        f"are the arguments of the classes {', '.join(f'`{name}`' for name in classes)}."
    )
    return "\n\n".join(parts) + "\n"


def _entry(name: str, value: Any, prose: Prose) -> list[str]:
    parts = [f"### {name}", *_signature(name, value), *_described(value, prose)]
    for member, defined in _members(value).items() if inspect.isclass(value) else ():
        called = getattr(value, member) if not isinstance(defined, property) else None
        parts += [f"#### {name}.{member}", *_signature(f"{name}.{member}", called), *_described(defined, prose)]
    return parts


def _members(cls: type) -> dict[str, Any]:
    """The public methods and properties that the class, or a base class of ours, defines."""
    ours = [vars(owner) for owner in reversed(cls.__mro__) if owner.__module__.startswith("fedbilevel.")]
    found = {name: value for defined in ours for name, value in defined.items() if not name.startswith("_")}
    kinds = property | classmethod | staticmethod
    own = {name: value for name, value in found.items() if name not in getattr(cls, "__dataclass_fields__", ())}
    return {name: value for name, value in own.items() if isinstance(value, kinds) or inspect.isfunction(value)}


def _signature(name: str, called: Any) -> list[str]:
    """What a call looks like, in a block of code; nothing for what is not called by its arguments."""
    if called is None or inspect.isabstract(called) or (inspect.isclass(called) and issubclass(called, Exception)):
        return []
    signature = inspect.signature(called)
    texts, kinds = [], inspect.Parameter
    for parameter in signature.parameters.values():
        if parameter.kind is kinds.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        if parameter.name != "self":
            texts.append(_parameter(parameter))
    returned = (
        "" if signature.return_annotation in (signature.empty, None, "None") else f" -> {_type(signature.return_annotation)}"
    )
    line = f"{name}({', '.join(texts)}){returned}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in texts), f"){returned}"])
    return [f"```py\n{line}\n```"]


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotated = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
    default = (
        "" if parameter.default is parameter.empty else f" = {re.sub(r'<(.*?)( at 0x.*)?>', r'...', repr(parameter.default))}"
    )
    return f"{stars}{parameter.name}{annotated}{default}"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _described(value: Any, prose: Prose) -> list[str]:
    """The docstring: its text, and each of its sections as a list."""
    text, *sections = re.split(r"^(Args|Returns|Raises):\n", inspect.getdoc(value) or "", flags=re.M)
    parts = [prose(text)] if text.strip() else []
    for heading, content in zip(sections[::2], sections[1::2], strict=True):
        body, *rest = re.split(r"\n(?=\S)", content, maxsplit=1)
        items = re.split(r"\n(?=    \S)", body.rstrip())
        lines = [" ".join(item.split()) for item in items]
        parts.append({"Args": "Arguments:", "Returns": "Returns:", "Raises": "Raises:"}[heading])
        parts.append("\n".join(f"- {_item(line, prose)}" for line in lines) if heading != "Returns" else prose(" ".join(lines)))
        parts += [prose(after) for after in rest]
    return parts


def _item(line: str, prose: Prose) -> str:
    names, colon, meaning = line.partition(": ")
    return f"{', '.join(f'`{name}`' for name in names.split(', '))}: {prose(meaning)}" if colon else prose(line)
