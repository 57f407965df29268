"""Formulas, which need Temml and so the site's own environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from docsite.errors import DocsError
from docsite.maths import Formulas

PAGE = Path("docs/page.md")


def test_a_formula_is_kept_from_markdown_and_put_in_afterwards() -> None:
    formulas = Formulas()
    text = formulas.protected("Of $q_i$ and $k_j'$:\n\n$$\nq_i \\cdot k_j\n$$\n", PAGE)
    assert "_" not in text
    built = formulas.put_in("".join(f"<p>{line}</p>" for line in text.strip().split("\n\n")))
    assert built.count("<math") == 3
    assert built.count('<div class="formula"') == 1
    assert formulas.as_text(f'"{text.splitlines()[0]}"') == '"Of qi and kj\\u2032:"'


@pytest.mark.parametrize("text", ["`$x_1$`", "```sh\necho $A $B\n```", "\\$x$", "a $ b $ c"])
def test_dollars_outside_formulas_stay(text: str) -> None:
    assert Formulas().protected(text, PAGE) == text


def test_a_formula_that_does_not_parse_is_one_line() -> None:
    with pytest.raises(DocsError) as error:
        Formulas().protected("Here: $\\frac{q_i$.", PAGE)
    assert str(error.value).startswith("docs/page.md: the formula '\\\\frac{q_i' does not parse: ")
    assert "\n" not in str(error.value)
