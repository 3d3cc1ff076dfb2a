"""The file of settings that a sweep or a tuning leaves for `fedbilevel run --settings`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.registry import Entry, find
from fedbilevel.settings import parsed, settings
from fedbilevel.tasks import TASKS


def settings_text(comment: str, task: str, knobs: Mapping[str, Any], hyperparameters: Mapping[str, Mapping[str, Any]]) -> str:
    """The content of the file, with the hyperparameters of each algorithm and lines of comment above them."""

    def table(entry: Entry, owner: str, values: Mapping[str, Any]) -> str:
        known = settings(entry.load())
        return "".join(f"{name} = {json.dumps(parsed(owner, name, known[name], v))}\n" for name, v in values.items())

    def quoted(name: str) -> str:
        return json.dumps(name, ensure_ascii=False)

    tables = [
        f"[hyperparameters.{name if name in ALGORITHMS else quoted(name)}]\n"
        + table(find(ALGORITHMS, "algorithm", name), name, values)
        for name, values in hyperparameters.items()
    ]
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return f"{head}task = {quoted(task)}\n\n[knobs]\n{table(find(TASKS, 'task', task), task, knobs)}\n" + "\n".join(tables)
