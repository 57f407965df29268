"""Maths in Markdown, as on GitHub: ``$inline$``, and ``$$`` around a formula of its own.

Before Markdown sees a page, each formula gives way to a token that Markdown leaves alone; in the
built pages MathML, which Temml makes of it, takes the token's place. So pages need no script for maths,
and a formula that does not parse fails the build. Browsers lay MathML out with the font beside Temml:
STIX Two Math, cut down to the characters of such pages. Its constant SubscriptBaselineDropMin is -10 in
place of 160, with which browsers set the index of a letter with a descender lower than others.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from docsite.errors import DocsError
from docsite.javascript import engine
from docsite.links import outside_fences

TEMML = Path(__file__).parent / "vendor" / "temml" / "temml.min.js"

FORMULA = re.compile(
    r"(?P<code>(?P<ticks>`+).+?(?P=ticks))"
    r"|\$\$(?P<display>.+?)\$\$"
    r"|(?<![\\\w$])\$(?![\s$])(?P<inline>[^$`]+?)(?<!\s)\$(?![\w$])",
    re.S,
)
OPEN = "\ue000"
CLOSE = "\ue001"
"""Around a token's number; no page has these characters."""


@dataclass
class Formulas:
    """The formulas of the site, by the number of their token."""

    rendered: list[str] = field(default_factory=list)
    """As MathML."""

    def protected(self, text: str, page: Path) -> str:
        """A page's Markdown with tokens for formulas.

        Raises:
            DocsError: a formula does not parse.
        """

        def token(match: re.Match[str]) -> str:
            if match["code"]:
                return match[0]
            display = match["display"] is not None
            source = (match["display"] or match["inline"]).strip()
            try:
                self.rendered.append(render(source, display))
            except DocsError as error:
                raise DocsError(f"{page}: {error}") from None
            return f"{OPEN}{len(self.rendered) - 1}{CLOSE}"

        return outside_fences(text, lambda part: FORMULA.sub(token, part))

    def put_in(self, page: str) -> str:
        """A built page with formulas in the place of tokens."""
        page = re.sub(f"<p>{OPEN}(\\d+){CLOSE}</p>", self._display, page)
        return re.sub(f"{OPEN}(\\d+){CLOSE}", lambda match: self.rendered[int(match[1])], page)

    def _display(self, match: re.Match[str]) -> str:
        return f'<div class="formula" tabindex="0">{self.rendered[int(match[1])]}</div>'

    def as_text(self, index: str) -> str:
        """The search index, which is JSON with HTML in it, with the formulas' characters."""

        def characters(match: re.Match[str]) -> str:
            rows = self.rendered[int(match[1])].replace("</mtr>", " ")
            return json.dumps(re.sub("<[^>]+>", "", rows).strip())[1:-1]

        return re.sub(f"{OPEN}(\\d+){CLOSE}", characters, index)


@cache
def render(formula: str, display: bool) -> str:
    """A formula as MathML.

    Raises:
        DocsError: Temml cannot parse it.
    """
    options = {"displayMode": display, "throwOnError": True}
    call = f"temml.renderToString({json.dumps(formula)}, {json.dumps(options)})"
    shown = str(engine(TEMML).eval(f"try {{ {call} }} catch (error) {{ '!' + error.message }}"))
    if shown.startswith("!"):
        reason = " ".join(shown[1:].split())
        raise DocsError(f"the formula {' '.join(formula.split())!r} does not parse: {reason}")
    return shown
