"""Formulas within the text of a page, which authors write as plain characters, as MathML: x_t, |y| or ∇²_yy g u."""

import html
import re

from formulas import inline, rendered

CODE_BLOCK = re.compile(r'<div class="highlight"><pre><span></span><code>([^<]*)</code></pre></div>')
UNTOUCHED = ("code", "pre", "math", "script", "style", "svg", "h1", "h2", "h3", "h4", "h5", "h6")
FUNCTIONS = ("min", "max", "argmin", "argmax", "exp", "log", "mean")
WORDS = ("a", "A", "I")  # words of English that could be symbols
CHARACTERS = re.compile(r"[\w\s()\[\]{}|,;:.=+\-/*<>^∇∂Σ∏∈≤≥≠≈←→±×·√∞ℓ⁺⁻]+")
OTHER = re.compile(r"\(*([A-Za-z]\d+|\d+[A-Za-z])\W*|.*(--|->|[A-Za-z]\.\w).*")  # H200, 3D; ranges, arrows, i.e.
TELLING = re.compile(r"[_^∇∂Σ∈≤≥≠≈←→√Ͱ-Ͽ⁺⁻²³¹₀-₉=+<>|]|[A-Za-z]\*?\(|\d/[A-Za-z]|[A-Za-z]/\d")
SYMBOLS = re.compile(r"\(?[B-HJ-Zb-rt-z]\)?(, [B-HJ-Zb-rt-z])*[.,;:]?")  # without s, for seconds
INITIAL = re.compile(r"[A-Z]\.")
POSSESSIVE = re.compile(r"(\(?)([B-HJ-Zb-zͰ-Ͽ](?:_\w{1,2})?)('s.*)")


def typeset(page: str) -> str:
    """The page's HTML with its formulas as MathML: indented ones, and those within the text."""

    def block(found: re.Match[str]) -> str:
        return rendered(html.unescape(found[1])) or found[0]

    parts, inside = re.split(r"(<[^>]+>)", CODE_BLOCK.sub(block, page)), list[str]()
    for k, part in enumerate(parts):
        if not part.startswith("<"):
            if not inside:
                parts[k] = _in_text(html.unescape(part))
        elif (tag := re.match(r"</?(\w+)", part)) and tag[1] in UNTOUCHED:
            if part.startswith("</"):
                inside.pop()
            else:
                inside.append(tag[1])
    return "".join(parts)


def _in_text(text: str) -> str:
    """A stretch of text as HTML: words that are symbols, with what connects them, become formulas."""
    out, formula = "", ""
    for word in re.findall(r"\s+|\S+", text):
        if word.isspace() and not formula:
            out += word
        elif word.isspace() or (_is_symbolic(word) and (formula or not INITIAL.fullmatch(word))):
            formula += word
        else:
            out += _formula(formula) + _word(word)
            formula = ""
    return out + _formula(formula)


def _is_symbolic(word: str) -> bool:
    """Whether a word could be part of a formula: every letter in it is a symbol by itself, or a function's name."""
    letters = re.findall(r"_?[A-Za-z]+", word)
    return (
        word not in WORDS
        and CHARACTERS.fullmatch(word) is not None
        and all(len(run) == 1 or run in FUNCTIONS or (run[0] == "_" and len(run) <= 3) for run in letters)
        and not OTHER.fullmatch(word)
    )


def _formula(text: str) -> str:
    """What was gathered as a formula, or as it is if it turns out to be none."""
    before, core, after = re.fullmatch(r"((?:-\s)?)(.*?)(\s*)", text, re.DOTALL).groups()
    while core and (extra := _unpaired(core)):
        if extra == "(":
            before, core = before + core[0], core[1:]
        else:
            core, after = core[:-1], core[-1] + after
    is_formula = re.search(r"[A-Za-zͰ-Ͽ∇]", core) and (TELLING.search(core) or SYMBOLS.fullmatch(core))
    drawn = inline(core) if is_formula else None
    return _escaped(before) + (drawn or _escaped(core)) + _escaped(after)


def _unpaired(text: str) -> str:
    """A bracket at an end of the text that has no partner in it; empty if there is none."""
    depth = [text[: k + 1].count("(") - text[: k + 1].count(")") for k in range(len(text))]
    if depth[-1] < 0 and re.search(r"\)[.,;:]*$", text):
        return ")"
    return "(" if depth[-1] > 0 and text[0] == "(" else ""


def _word(word: str) -> str:
    """A word, in which a symbol may be an owner: x's."""
    owner = POSSESSIVE.fullmatch(word)
    return _escaped(word) if owner is None else _escaped(owner[1]) + (inline(owner[2]) or owner[2]) + _escaped(owner[3])


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)
