"""The built site in headless Chromium: ``make docs-test``. Not part of ``make test``."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from built import PHONE, SITE, visit
from playwright.sync_api import Page

# The page for addresses that are not there is for servers.
PAGES = sorted({str(path.relative_to(SITE)) for path in SITE.rglob("*.html")} - {"404.html"})
WRITTEN = [page for page in PAGES if not page.startswith("source/")]
"""Pages that somebody wrote, or that are generated for reading; the rest are source files."""
ANNOTATED = [page for page in PAGES if page.startswith("annotated/")]
WIDTHS = (1280, 1440, 1920)
HEAVIEST = 250_000
"""Bytes of HTML."""
LONGEST = 0.5
"""Seconds that scripts take until a page has loaded."""
PAPER = 718
"""Width of a sheet of A4 between its margins."""


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


def test_no_page_is_wider_than_the_screen(page: Page) -> None:
    wide = []
    for name in WRITTEN:
        visit(page, name, PHONE)
        # A picture that has to be scrolled looks complete.
        wide += page.eval_on_selector_all(
            ".md-content p:has(> img)",
            "all => all.filter(p => p.scrollWidth > p.clientWidth + 1).map(p => p.innerHTML)",
        )
        for width in (PHONE, 1024, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wide.append(f"{name} at {width}")
    assert not wide


def test_scripts_take_half_a_second_at_most(page: Page) -> None:
    """On a busy machine the best of three visits counts."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def seconds(name: str) -> float:
        visit(page, name)
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(m["value"] for m in metrics if m["name"] == "ScriptDuration")

    slow = [name for name in WRITTEN if seconds(name) > LONGEST]
    slow = [name for name in slow if min(seconds(name) for _ in range(3)) > LONGEST]
    assert not slow


def test_on_a_phone_notes_stand_above_their_code(page: Page) -> None:
    visit(page, ANNOTATED[0], PHONE)
    for passage in page.query_selector_all(".passage"):
        note = passage.query_selector(".note").bounding_box()
        code = passage.query_selector(".listing").bounding_box()
        assert note["y"] + note["height"] <= code["y"]


def test_the_table_of_contents(page: Page) -> None:
    """Beside the text where there is room, behind a button on a phone."""
    for name, width, at_once in (
        (ANNOTATED[0], 1440, True),
        ("which-one.html", 1024, True),
        (ANNOTATED[0], PHONE, False),
    ):
        visit(page, name, width)
        contents = page.locator(".md-sidebar--secondary .md-sidebar__inner")
        assert (contents.evaluate("e => getComputedStyle(e).opacity") == "1") == at_once
        if at_once:
            text = page.locator("article").bounding_box()
            assert text["x"] + text["width"] <= contents.bounding_box()["x"]
        else:
            page.locator(".md-sidebar-button").click()
            page.wait_for_function(
                "getComputedStyle(document.querySelector"
                "('.md-sidebar--secondary .md-sidebar__inner')).opacity == 1"
            )


def test_nothing_is_cut_on_paper(page: Page) -> None:
    page.emulate_media(media="print")
    cut = []
    for name in WRITTEN:
        visit(page, name, PAPER)
        cut += page.evaluate(
            """([name, width]) => [...document.querySelectorAll("article *")]
              .filter(e => !e.closest("svg *") && e.getBoundingClientRect().width
                && e.getBoundingClientRect().right > width + 1)
              .map(e => `${name}: ${e.tagName} ${e.textContent.slice(0, 40)}`)""",
            [name, PAPER],
        )
    assert not cut, "\n".join(cut)


def test_pages_are_light() -> None:
    heavy = {name: size for name in PAGES if (size := (SITE / name).stat().st_size) > HEAVIEST}
    assert not heavy


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("relative shift", "annotated/transformer_xl.html"),
        ("linear attention", "path.html"),
        ("KV cache", "path.html"),
        ("associative recall", "recall.html"),
        ("WY", "annotated/delta_rule.html"),
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


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", PHONE)])
def test_axe_finds_nothing(page: Page, scheme: str, width: int) -> None:
    found = []
    page.emulate_media(color_scheme=scheme)
    for name in WRITTEN:
        visit(page, name, width)
        for violation in Axe().run(page, options={"preload": False}).response["violations"]:
            where = violation["nodes"][0]["html"][:120]
            found.append(f"{name}: {violation['id']} ({len(violation['nodes'])}): {where}")
    assert not found, "\n".join(found)


def test_the_keyboard_reaches_the_text(page: Page) -> None:
    visit(page, "index.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')").startswith("#")
