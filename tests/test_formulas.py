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

spec = importlib.util.spec_from_file_location("formulas", Path(__file__).parent.parent / "docs" / "formulas.py")
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
    assert sum(name.startswith("algorithms") for name in BLOCKS) == 28
    assert sum(name.startswith("tasks") for name in BLOCKS) == 7


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
