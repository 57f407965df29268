"""The built site in headless Chromium: ``make docs-test``. Not part of ``make test``."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from built import PHONE, SITE, visit
from playwright.sync_api import Page

SCREENSHOTS = SITE.parent / "screenshots"
# The page for addresses that are not there is for servers.
PAGES = sorted({str(path.relative_to(SITE)) for path in SITE.rglob("*.html")} - {"404.html"})
WRITTEN = [page for page in PAGES if not page.startswith("source/")]
"""Pages that somebody wrote, or that are generated for reading; the rest are source files."""
ANNOTATED = [page for page in PAGES if page.startswith("annotated/")]
WIDTHS = (1024, 1440, 1920)


@cache
def names(path: Path) -> frozenset[str]:
    """The anchors of a built page."""
    return frozenset(re.findall(r'\sid="?([^"\s>]+)', path.read_text(encoding="utf-8")))


def test_every_page_loads(page: Page) -> None:
    """Its links lead to pages and places that exist, and its formulas are set."""
    broken = []
    for name in PAGES:
        visit(page, name)
        links = page.eval_on_selector_all("a[href], img[src]", "es => es.map(e => e.href || e.src)")
        for link in set(links):
            parts = urlsplit(link)
            path = Path(unquote(parts.path))
            if parts.scheme != "file":
                continue
            anchor = unquote(parts.fragment)
            there = path.is_file() and (
                path.suffix != ".html" or not anchor or anchor in names(path)
            )
            if not there:
                broken.append(f"{name}: {link}")
        assert not page.query_selector(".temml-error, merror")
        assert "\ue000" not in page.content()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("width", WIDTHS)
def test_notes_stand_beside_their_code(page: Page, width: int) -> None:
    for name in ANNOTATED:
        visit(page, name, width)
        assert page.query_selector_all("math"), name
        passages = page.query_selector_all(".passage")
        assert len(passages) > 5
        for passage in passages:
            note = passage.query_selector(".note").bounding_box()
            code = passage.query_selector(".listing").bounding_box()
            assert note["x"] + note["width"] <= code["x"]
            assert abs(note["y"] - code["y"]) < 5
            assert code["x"] + code["width"] <= width


def test_on_a_phone(page: Page) -> None:
    """No page is wider than the screen, and notes stand above their code."""
    wide = []
    for name in WRITTEN:
        visit(page, name, PHONE)
        if page.evaluate("document.documentElement.scrollWidth") > PHONE:
            wide.append(name)
    assert not wide
    visit(page, ANNOTATED[0], PHONE)
    for passage in page.query_selector_all(".passage"):
        note = passage.query_selector(".note").bounding_box()
        code = passage.query_selector(".listing").bounding_box()
        assert note["y"] + note["height"] <= code["y"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("relative shift", "annotated/transformer_xl.html"),
        ("compression", "compressive.html"),
        ("initial_memory", "reference/"),
    ],
)
def test_search(page: Page, words: str, found: str) -> None:
    visit(page, "index.html")
    page.keyboard.press("/")
    page.keyboard.type(words, delay=20)
    # zensical shows results in a shadow root, where the page's own links are not.
    page.wait_for_function(
        """found => [...document.querySelectorAll("*")].filter(e => e.shadowRoot).some(
            e => [...e.shadowRoot.querySelectorAll("a")].some(a => a.href.includes(found)))""",
        arg=found,
        timeout=20_000,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Page, scheme: str) -> None:
    serious = []
    page.emulate_media(color_scheme=scheme)
    for name in WRITTEN:
        visit(page, name)
        for violation in Axe().run(page, options={"preload": False}).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                where = violation["nodes"][0]["html"][:120]
                serious.append(f"{name}: {violation['id']} ({len(violation['nodes'])}): {where}")
    assert not serious, "\n".join(serious)


def test_the_keyboard_reaches_the_text(page: Page) -> None:
    visit(page, "index.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')").startswith("#")


def test_screenshots(page: Page) -> None:
    """For people to look at: every written page, on a desk, on a phone, in the dark."""
    shutil.rmtree(SCREENSHOTS, ignore_errors=True)
    for name in WRITTEN:
        for width, scheme in ((1440, "light"), (PHONE, "dark")):
            page.emulate_media(color_scheme=scheme)
            visit(page, name, width)
            path = SCREENSHOTS / f"{name.removesuffix('.html').replace('/', '-')}-{width}.png"
            page.screenshot(path=path)
            assert path.stat().st_size > 5000
