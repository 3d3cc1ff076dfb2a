"""The formulas of the docstrings are shown as MathML, with nothing lost."""

import importlib
import importlib.util
import pkgutil
import re
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest

import fedbilevel.algorithms
import fedbilevel.tasks

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("formulas", ROOT / "docs" / "formulas.py")
formulas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(formulas)


def blocks():
    for package in (fedbilevel.algorithms, fedbilevel.tasks):
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            docstring = importlib.import_module(info.name).__doc__.strip()
            indented = [part for part in re.split(r"\n\s*\n", docstring) if part.startswith("    ")]
            yield from ((f"{info.name.removeprefix('fedbilevel.')}-{k}", part) for k, part in enumerate(indented))


BLOCKS = dict(blocks())


def math(inner):
    return f'<math displaystyle="true">{inner}</math>'


def block(*lines):
    return f'<div class="formulas">{"".join(f"<div>{line}</div>" for line in lines)}</div>'


@pytest.mark.parametrize(
    "source, expected",
    [
        ("γ_x", "<msub><mi>γ</mi><mrow><mi>x</mi></mrow></msub>"),
        ("ω^{t+1}", "<msup><mi>ω</mi><mrow><mi>t</mi><mo>+</mo><mn>1</mn></mrow></msup>"),
        ("τ⁻¹", "<msup><mi>τ</mi><mrow><mo>−</mo><mn>1</mn></mrow></msup>"),
        ("∇²_xy", '<msubsup><mi mathvariant="normal">∇</mi><mrow><mi>x</mi><mi>y</mi></mrow><mrow><mn>2</mn></mrow></msubsup>'),
        (
            "Σ_{q=-1}^{Q} z_q",
            '<munderover><mo>∑</mo><mrow><mi>q</mi><mo>=</mo><mo form="prefix">−</mo><mn>1</mn></mrow><mrow><mi>Q</mi></mrow>'
            '</munderover><mspace width="0.2em"/><msub><mi>z</mi><mrow><mi>q</mi></mrow></msub>',
        ),
        (
            "λ |y|²",
            '<mi>λ</mi><mspace width="0.2em"/><msup><mrow><mo>|</mo><mi>y</mi><mo>|</mo></mrow><mrow><mn>2</mn></mrow></msup>',
        ),
        (
            "ℓ(y; data)",
            '<mi>ℓ</mi><mrow><mo>(</mo><mi>y</mi><mo>;</mo><mspace width="0.2em"/><mtext>data</mtext><mo>)</mo></mrow>',
        ),
    ],
)
def test_a_formula(source, expected):
    assert formulas.rendered("    " + source) == block(f"<span>{math(expected)}</span>")


def test_words_are_text_wide_gaps_part_a_line_and_deeper_lines_go_on():
    i, eta, x = (f"<mi>{letter}</mi>" for letter in "Iηx")
    comma, semicolon = (f"<mtext>{mark}</mtext>" for mark in ",;")
    assert formulas.rendered("    x,    averaged if I divides η;\n    η    (Anna's\n         own <) x") == block(
        f"<span>{math(x + comma)}</span> <span>averaged if {math(i)} divides {math(eta + semicolon)}</span>",
        f"<span>{math(eta)}</span> <span>(Anna's own &lt;) {math(x)}</span>",
    )


@pytest.mark.parametrize("source", ["fedbilevel run quadratic --step eta=1", "η (x", "η x)", "η $x$", "η_", "η ^"])
def test_code_and_what_is_not_understood_stay_as_they_are(source):
    assert formulas.rendered("    " + source) is None


def test_there_are_formulas_to_look_at():
    assert sum(name.startswith("algorithms") for name in BLOCKS) == 29
    assert sum(name.startswith("tasks") for name in BLOCKS) == 8


@pytest.mark.parametrize("source", BLOCKS.values(), ids=BLOCKS)
def test_every_block_of_a_docstring_is_rendered_and_nothing_is_lost(source):
    tree = ElementTree.fromstring(formulas.rendered(source))
    assert tree.find(".//math") is not None
    below_first = re.sub(r"([²³])(_[a-z]+)", r"\2\1", source)
    assert characters("".join(tree.itertext())) == characters(re.sub(r"[_^{}]", "", below_first))
    for scripts, count in {"sub": 2, "sup": 2, "subsup": 3, "under": 2, "over": 2, "underover": 3}.items():
        assert all(len(element) == count for element in tree.iter(f"m{scripts}"))


def characters(text):
    plain = unicodedata.normalize("NFKC", text).translate(str.maketrans("∑∏−", "ΣΠ-"))
    return "".join(plain.split())


def test_formulas_within_text_are_found_and_words_are_left_alone(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    typeset = importlib.import_module("inline_mathematics").typeset

    def told(html):
        """The page with its formulas in double brackets, as their characters."""
        return re.sub(r"<math>(.*?)</math>", lambda found: f"[[{re.sub('<[^>]+>', '', found[1])}]]", typeset(html))

    cases = {
        "<p>With α_t = δ / (u_0 + t) iteration t is</p>": "<p>With [[αt=δ/(u0+t)]] iteration [[t]] is</p>",
        "<td>2 |x| + 4 |y|</td>": "<td>[[2|x|+4|y|]]</td>",
        "<p>local steps on x, y and u.</p>": "<p>local steps on [[x,]] [[y]] and [[u.]]</p>",
        "<p>x's step (with β = 0.9) takes 10/L.</p>": "<p>[[x]]'s step (with [[β=0.9]]) takes [[10/L.]]</p>",
        "<p>J. Li and K. Ji, Eq. (7)-(8), i.e. a round in 3 s on an H200.</p>": None,
        "<p>I need <code>x_t</code> &amp; gamma_x, 0.57 -&gt; 0.93 in 784-200-10.</p>": None,
        "<h2>Steps of x</h2><pre><code>y = a*x</code></pre>": None,
    }
    for html, expected in cases.items():
        assert told(html) == (expected or html)
    block = '<div class="highlight"><pre><span></span><code>D_y = ∇_y g,   δ = √min(1, p)\n</code></pre></div>'
    assert typeset(block).startswith('<div class="formulas">') and "<msqrt><mi>min</mi><mrow>" in typeset(block)
