"""Figures that can be moved: ``docs/figures/NAME.json``, drawn by ``style/figures.js``.

A page shows one as a picture in a line of its own, ``![what it shows](figures/NAME.svg)``: a file that
``python -m docsite figures`` writes, for GitHub. On the site the same drawing stands in the page, its
numbers lie beside it in a script, and ``style/figures.js`` gives it controls.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docsite import colours
from docsite.code import ROOT
from docsite.errors import DocsError
from docsite.weights import model_of

FOLDER = Path("docs/figures")
STYLE = Path(__file__).parent / "style"
SCRIPTS = (STYLE / "story.js", STYLE / "asked.js", STYLE / "figures.js")
FORM = 2
"""Names of the files that benchmarks/figures.py writes."""
AGAIN = "write and draw it anew: make figures"


@dataclass
class Figures:
    """The figures of the site."""

    root: Path = ROOT
    numbers: dict[str, str] = field(default_factory=dict)
    """Scripts of the site, by their place in ``figures/``. Pages from the disk may not load JSON."""

    def protected(self, text: str, folder: str, later: Callable[[str], str]) -> str:
        """A page's Markdown with a place for each figure.

        Args:
            text: the page.
            folder: where the site's ``figures/`` is, seen from the page.
            later: gives the place of HTML.

        Raises:
            DocsError: its numbers are missing or of another form, or its picture is an older one.
        """

        def place(match: re.Match[str]) -> str:
            return later(self._html(match[2], match[1], folder))

        return re.sub(r"^!\[([^\]]*)\]\([./]*figures/([\w-]+)\.svg\)$", place, text, flags=re.M)

    def _html(self, name: str, alt: str, folder: str) -> str:
        data = with_model(load(name, self.root), self.root)
        svg, told = drawn(name, data)
        path = self.root / FOLDER / f"{name}.svg"
        if not path.is_file() or path.read_text(encoding="utf-8") != alone(svg):
            raise DocsError(f"{FOLDER}/{name}.svg is not what {name}.json shows: {AGAIN}")
        numbers = json.dumps(data, separators=(",", ":"))
        self.numbers[f"{name}.js"] = f'(globalThis.FIGURES ??= {{}})["figure-{name}"] = {numbers}\n'
        return (
            f'<figure class="moving" id="figure-{name}"><form hidden></form>'
            f'<div class="picture" role="img" aria-label="{html.escape(alt)}">{svg}</div>'
            f'<p class="told" aria-live="polite">{html.escape(told)}</p>'
            f'<script src="{folder}/{name}.js"></script></figure>'
        )


def load(name: str, root: Path = ROOT) -> dict[str, Any]:
    """A figure's numbers.

    Raises:
        DocsError: they are missing or of another form.
    """
    path = root / FOLDER / f"{name}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DocsError(f"{FOLDER}/{name}.json is missing or no JSON: {AGAIN}") from None
    form = data.get("form") if isinstance(data, dict) else None
    if form != FORM:
        raise DocsError(f"{FOLDER}/{name}.json is of form {form}, not {FORM}: {AGAIN}")
    return data


def with_model(data: dict[str, Any], root: Path = ROOT) -> dict[str, Any]:
    """A figure's numbers, and those of the model that it computes with, if it names one.

    Raises:
        DocsError: there is no such model.
    """
    return data | {"model": model_of(data["model"], root)} if "model" in data else data


def drawn(name: str, data: dict[str, Any]) -> tuple[str, str]:
    """A figure as it stands before anybody has moved it, and the sentence below it.

    Raises:
        DocsError: the script cannot draw these numbers.
    """
    # Only what draws needs the package mini-racer.
    from docsite.javascript import engine

    call = (
        f"try {{ const data = {json.dumps(data)}, kind = KINDS[data.kind];"
        " JSON.stringify([kind.draw(data, data.shown), kind.tell(data, data.shown)])"
        " } catch (error) { JSON.stringify(String(error)) }"
    )
    result = json.loads(str(engine(*SCRIPTS).eval(call)))
    if isinstance(result, str):
        raise DocsError(f"{FOLDER}/{name}.json cannot be drawn ({result}): {AGAIN}")
    svg, told = result
    return svg, told


def alone(svg: str) -> str:
    """The drawing as a file of its own, in the colours that the reader's system asks for."""
    style = (STYLE / "figures.css").read_text(encoding="utf-8")
    svg = svg.replace(">", f">\n<style>\n{colours.block(set())}{style}</style>", 1) + "\n"
    return colours.coloured(svg)


def moving(name: str, frames: list[dict[str, Any]], root: Path = ROOT, seconds: float = 1.8) -> str:
    """A figure as a file that plays by itself, where a README may show no more than a picture.

    Args:
        name: of the figure.
        frames: what is shown, one after another, in place of the figure's ``shown``.
        root: the repository.
        seconds: each is shown.
    """
    data = load(name, root)
    drawings = [drawn(name, data | {"shown": data["shown"] | frame})[0] for frame in frames]
    opening = re.match("<svg[^>]*>", drawings[0])
    assert opening
    whole = seconds * len(frames)
    rules = (
        f".shot{{visibility:hidden;animation:shown {whole:g}s step-end infinite}}"
        f"@keyframes shown{{0%{{visibility:visible}}{100 / len(frames):.3f}%{{visibility:hidden}}}}"
        "@media (prefers-reduced-motion:reduce){.shot{animation:none}"
        ".shot:last-child{visibility:visible}}"
    )
    groups = [
        f'<g class="shot" style="animation-delay:{seconds * i:g}s">'
        f"{re.sub('^<svg[^>]*>|</svg>$', '', drawing)}</g>"
        for i, drawing in enumerate(drawings)
    ]
    return alone(f"{opening[0]}{''.join(groups)}</svg>").replace("</style>", f"{rules}</style>", 1)


def draw_all(root: Path = ROOT) -> None:
    """Write the picture of every figure, and give those that were drawn by hand today's colours.

    Raises:
        DocsError: as :func:`load` and :func:`drawn`.
    """
    for path in sorted((root / FOLDER).glob("*.json")):
        svg, _ = drawn(path.stem, with_model(load(path.stem, root), root))
        path.with_suffix(".svg").write_text(alone(svg), encoding="utf-8")
    story = load("story", root)["shown"]["story"]
    steps = [{"step": i, "asked": "Kate"} for i in range(story.count("."))]
    path = root / FOLDER / "story-moving.svg"
    path.write_text(moving("story", steps, root), encoding="utf-8")
    colours.write_pictures(root)
