"""Pages that mkdocs makes from the code: algorithms and what a step of each costs, tasks, examples, the API, results."""

import ast
import html
import re
import sys
from pathlib import Path

from api import reference
from costs import Cost, cost
from formulas import rendered
from inline_mathematics import typeset
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from notebook import notebook

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.command.explain import Explained, explained
from fedbilevel.registry import Entry
from fedbilevel.tasks import TASKS

ROOT = Path(__file__).parent.parent
EXAMPLES, REPRODUCTIONS = ROOT / "examples", ROOT / "reproductions"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the algorithms' pages below their overview."""
    places = [place for section in config.nav or () for pages in section.values() if isinstance(pages, list) for place in pages]
    (algorithms,) = (place for place in places if place.get("Algorithms") == "algorithms/index.md")
    algorithms["Algorithms"] = ["algorithms/index.md", *({name: f"algorithms/{name}.md"} for name in ALGORITHMS)]
    return config


def on_page_content(html: str, **given: object) -> str:
    """Typeset the formulas of every page."""
    return typeset(html)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    costs = {name: cost(name) for name in ALGORITHMS}
    pages = {
        "algorithms/index.md": overview(costs),
        **{f"algorithms/{name}.md": algorithm(name, entry, costs[name]) for name, entry in ALGORITHMS.items()},
        "tasks.md": tasks(),
        "examples.md": examples(),
        "first-problem.md": notebook(EXAMPLES / "first_problem.ipynb"),
        "api.md": reference(prose),
        "results.md": (REPRODUCTIONS / "RESULTS.md").read_text().replace("<details>", '<details markdown="1">'),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    for picture in sorted((REPRODUCTIONS / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def overview(costs: dict[str, Cost]) -> str:
    """What all algorithms cost, side by side."""
    lines = [
        "# Algorithms",
        "",
        "What an outer step costs with the default hyperparameters, counted by the simulated engine: round trips; numbers that",
        "each client that takes part sends and receives, with |x| and |y| the lengths of x and y; minibatch gradients and",
        "second-order products of each client. Where a step is random, these are means over many steps.",
        "",
        "| name | what | rounds | floats up | floats down | gradients | second-order products |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| [`{name}`]({name}.md) | {entry.summary} | " + " | ".join(_escaped(text) for text in costs[name].texts()) + " |"
        for name, entry in ALGORITHMS.items()
    ]
    return "\n".join(lines) + "\n"


def algorithm(name: str, entry: Entry, of_step: Cost) -> str:
    """An algorithm's page, from its docstring and its fields."""
    kind = entry.load()
    traits = [
        f"for a {kind.lower_level} lower level",
        "needs strong convexity of g in y" if kind.needs_strong_convexity else "g need not be strongly convex in y",
        "keeps x and y in given sets" if kind.constrained else "without constraints on x and y",
    ]
    if kind.rounds_to_start:
        traits.append(f"{kind.rounds_to_start} round to start")
    costs = "\n".join(f"| {what} | {_escaped(text)} |" for what, text in zip(Cost.NAMES, of_step.texts(), strict=True))
    return (
        f"# {name}\n\n*{entry.summary}* — {entry.paper}. In Python: `{_constructor(entry)}`; {'; '.join(traits)}.\n\n"
        f"{prose(sys.modules[kind.__module__].__doc__ or '')}\n\n"
        f"## Hyperparameters\n\n{_settings(name, entry)}\n\n"
        f"## Cost of a step\n\nWith these defaults, for each client that takes part, as the engine counts it"
        f" ([all algorithms](index.md)):\n\n| | |\n|---|---|\n{costs}\n"
    )


def tasks() -> str:
    """All tasks: those of one class under one heading."""
    parts = ["# Tasks\n\n`fedbilevel run TASK ALGORITHM...` runs them; `--knob NAME=VALUE` sets a knob.\n"]
    for kind in dict.fromkeys(entry.load() for entry in TASKS.values()):
        names = [name for name, entry in TASKS.items() if entry.load() is kind]
        listed = "\n".join(f"| `{name}` | {TASKS[name].summary} | {TASKS[name].paper} |" for name in names)
        parts.append(
            f"## {names[0]}\n\n{prose(sys.modules[kind.__module__].__doc__ or '')}\n\n"
            f"Compared by {kind.headline.replace('_', ' ')}: {kind.better[kind.headline]} is better.\n\n"
            f"| name | what | from |\n|---|---|---|\n{listed}\n\n"
            f"Knobs of `{names[0]}`:\n\n{_settings(names[0], TASKS[names[0]])}\n"
        )
    return "\n".join(parts)


def examples() -> str:
    """The examples with what they say of themselves."""
    intro = "Each runs in a minute on bundled data, and the tests run them all, and [a notebook](first-problem.md) too."
    parts = [f"# Examples\n\n{intro}\n"]
    for path in sorted(EXAMPLES.glob("*.py")):
        source = path.read_text()
        title, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
        code = source.split('"""', 2)[2].strip()
        parts.append(f"## {title.rstrip('.')}\n\n{prose(rest.strip())}\n\n```py\n{code}\n```\n")
    return "\n".join(parts)


def prose(docstring: str) -> str:
    """A docstring as Markdown: its indented formulas as MathML, and nothing in its text taken for markup."""
    blocks = re.split(r"\n\s*\n", docstring.strip())
    return "\n\n".join(rendered(block) or block if block.startswith("    ") else _escaped(block) for block in blocks)


def _escaped(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_|\\\[\]])", r"\\\1", html.escape(p, quote=False)) for p in parts)


def _settings(name: str, entry: Entry) -> str:
    head = [field.replace("_", " ") for field in Explained._fields]
    rows = [head, ["---"] * len(head)]
    rows += [[f"`{row.setting}`", *map(_escaped, map(str, row[1:]))] for row in explained(name, entry)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _constructor(entry: Entry) -> str:
    own = {**entry.defaults, **entry.preset}
    given = ", ".join(f"{name}={value!r}" for name, value in own.items() if value != getattr(entry.load(), name))
    return f"fedbilevel.{entry.name}({given})"
