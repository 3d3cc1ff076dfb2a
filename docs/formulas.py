"""A formula of a docstring as MathML, which browsers draw without scripts or fonts to fetch."""

import html
import re
import textwrap
import unicodedata
from collections import deque
from typing import NamedTuple

WORD = r"[A-Za-z]{2,}(?:['-][A-Za-z]+)*"
TOKEN = re.compile(
    rf"""(?P<gap>\ *)(?:
      (?P<text>(?!rc\b){WORD}(?:\ {WORD})*(?![\w^(])[.,:;]?|\([A-Z][a-z][^()]*\))
    | (?P<mark>[.,:;])
    | _(?P<letters>[A-Za-zͰ-Ͽ]+)
    | (?P<script>[_^]{{?)
    | (?P<raised>[²³¹⁰-⁹⁺⁻ᵀ]+|(?<=\w)\*)
    | (?P<lowered>[₀-₉]+)
    | (?P<number>\d+(?:,\d{{3}})*(?:\.\d+)?|[½¼⅓])
    | (?P<large>[ΣΠ]|(?:arg)?(?:min|max)|mean)
    | (?P<name>[A-Za-z]{{2,}}|[A-Za-zͰ-Ͽℓ∇∂·∞])
    | (?P<open>[(\[|])
    | (?P<close>[)\]}}])
    | (?P<root>√)
    | (?P<operator>[-+=<>≤≥≠≈←⟵→∈±×/])
    )""",
    re.VERBOSE,
)
CLOSING = {"(": ")", "[": "]", "|": "|"}
DRAWN = str.maketrans("ΣΠ-", "∑∏−")


class Token(NamedTuple):
    """A word or a symbol, and how many spaces are before it."""

    kind: str
    value: str
    gap: int


def rendered(block: str) -> str | None:
    """An indented block as HTML with MathML; None for code, which is ASCII, and for what is not understood."""
    if block.isascii():
        return None
    unfolded = re.sub(r"\n +", " ", textwrap.dedent(block))
    lines = [re.split(r" {3,}", line.strip()) for line in unfolded.splitlines()]
    try:
        return '<div class="formulas">' + "".join(f"<div>{_line(parts)}</div>" for parts in lines) + "</div>"
    except ValueError:
        return None


def inline(text: str) -> str | None:
    """A formula within a sentence as MathML; None for what is not understood."""
    try:
        return _sentence(_tokens(text), display="")
    except ValueError:
        return None


def _line(parts: list[str]) -> str:
    return " ".join(f"<span>{_sentence(_tokens(part))}</span>" for part in parts)


def _tokens(part: str) -> deque[Token]:
    tokens: deque[Token] = deque()
    at = 0
    while at < len(part):
        found = TOKEN.match(part, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"{part[at:]!r} in {part!r}")
        tokens.append(Token(found.lastgroup, found[found.lastgroup], len(found["gap"])))
        at = found.end()
    return tokens


def _sentence(tokens: deque[Token], display: str = ' displaystyle="true"') -> str:
    """Words as text, and what is between them as formulas, each with the mark after it so that no line breaks there."""
    out = ""
    while tokens:
        out += " " * bool(tokens[0].gap)
        if tokens[0].kind in ("text", "mark"):
            out += html.escape(tokens.popleft().value, quote=False)
        else:
            formula = _row(tokens)
            if tokens and tokens[0].kind == "mark":
                formula += _tagged("mtext", tokens.popleft().value)
            out += f"<math{display}>{formula}</math>"
    return out


def _row(tokens: deque[Token], closing: str = "") -> str:
    """The elements up to a closing bracket, which is taken too; without one, up to a word or a mark."""
    out, after_operator = "", True
    while tokens and tokens[0].value != closing and (closing or tokens[0].kind not in ("text", "mark")):
        kind, _, gap = tokens[0]
        operator = kind in ("operator", "mark")
        if gap and (kind == "text" or not (operator or after_operator)):
            out += f'<mspace width="{0.2 * gap:.1f}em"/>'
        out += _scripted(tokens, after_operator)
        after_operator = operator
    if closing and (not tokens or tokens.popleft().value != closing):
        raise ValueError(f"a bracket without {closing}")
    return out


def _scripted(tokens: deque[Token], first: bool) -> str:
    """An element with what is below and above it: right there for sums and the like, else beside it."""
    places = ("under", "over") if tokens[0].kind == "large" else ("sub", "sup")
    base, scripts = _element(tokens, first), ["", ""]
    while tokens and tokens[0].kind in ("script", "letters", "lowered", "raised") and not tokens[0].gap:
        kind, value, _ = tokens.popleft()
        above = kind == "raised" or value.startswith("^")
        if kind != "script":
            scripts[above] += _symbols(value)
        else:
            scripts[above] += _row(tokens, "}") if value.endswith("{") else _element(tokens, first=True)
    tag = "".join(place for place, script in zip(places, scripts, strict=True) if script)
    return f"<m{tag}>{base}{''.join(f'<mrow>{script}</mrow>' for script in scripts if script)}</m{tag}>" if tag else base


def _element(tokens: deque[Token], first: bool) -> str:
    kind, value, _ = tokens.popleft() if tokens else Token("end", "", 0)
    match kind:
        case "open":
            return f"<mrow>{_tagged('mo', value)}{_row(tokens, CLOSING[value])}{_tagged('mo', CLOSING[value])}</mrow>"
        case "root":
            argument = _element(tokens, first=True)
            while tokens and tokens[0].kind == "open" and not tokens[0].gap:
                argument += _element(tokens, first=True)
            return f"<msqrt>{argument}</msqrt>"
        case "operator" | "mark":
            form = ' form="prefix"' * (first and value in "+-") + ' lspace="0" rspace="0"' * (value == "/")
            return _tagged("mo", value, form)
        case "text" | "number":
            return _tagged("mtext" if kind == "text" else "mn", value)
        case "large" | "name":
            return _tagged("mo" if value in "ΣΠ" else "mi", value, ' mathvariant="normal"' * (value == "∇"))
    raise ValueError(f"{value!r} is out of place")


def _symbols(script: str) -> str:
    """Each character of mn in x_mn, or of ⁻¹ in x⁻¹, by itself."""
    plain = unicodedata.normalize("NFKC", script)
    return "".join(_tagged("mi" if c.isalpha() else "mn" if c.isdigit() else "mo", c) for c in plain)


def _tagged(tag: str, value: str, attributes: str = "") -> str:
    drawn = value if tag == "mtext" else value.translate(DRAWN)
    return f"<{tag}{attributes}>{html.escape(drawn, quote=False)}</{tag}>"
