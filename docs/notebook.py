"""A notebook as a page: its text, its code, and the outputs that are stored in it."""

import json
from pathlib import Path
from typing import Any


def notebook(path: Path) -> str:
    """The notebook as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    texts, shown = [], []
    for output in cell["outputs"]:
        data = {kind: "".join(content) for kind, content in output.get("data", {"text": output.get("text", [])}).items()}
        if "image/png" in data:
            shown.append(f'<img alt="what the code above shows" src="data:image/png;base64,{data["image/png"].strip()}">')
        elif output["output_type"] == "execute_result":
            shown.append(f"<div>{data['text/html']}</div>")
        else:
            texts.append(data.get("text") or data["text/plain"])
    printed = "\n".join(text.rstrip() for text in texts)
    return [f"```py\n{source}\n```", *([f"```text\n{printed}\n```"] if printed else []), *shown]
