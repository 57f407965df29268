"""The built site in headless Chromium: ``make docs-test``. Not part of ``make test``."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

SITE = Path(__file__).parents[2] / ".docs-build" / "site"
SCREENSHOTS = SITE.parent / "screenshots"
# The page for addresses that are not there is for servers.
PAGES = sorted({str(path.relative_to(SITE)) for path in SITE.rglob("*.html")} - {"404.html"})
WRITTEN = [page for page in PAGES if not page.startswith("source/")]
"""Pages that somebody wrote, or that are generated for reading; the rest are source files."""
ANNOTATED = [page for page in PAGES if page.startswith("annotated/")]
PHONE, WIDTHS = 390, (1024, 1440, 1920)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium as the system has it."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.exit("no Chromium: apt-get install chromium, or set CHROMIUM to its path", 2)
    with sync_playwright() as playwright:
        # Where the tests run as root, as in a container, its sandbox cannot start.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that notes requests to other places and errors, and is asked for both at the end."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.on(
        "request",
        lambda r: (
            urlsplit(r.url).scheme in ("file", "data", "blob", "about") or wrong.append(r.url)
        ),
    )
    # A request is given up where the next page is opened before the icon has come.
    page.on(
        "requestfailed",
        lambda r: "ABORTED" in str(r.failure) or wrong.append(f"{page.url}: {r.url}"),
    )
    page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(m.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert not wrong, "\n".join(wrong)


def visit(page: Page, name: str, width: int = 1440) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((SITE / name).as_uri())
    page.wait_for_load_state("load")


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
        assert not page.query_selector(".katex-error")
        assert "\ue000" not in page.content()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("width", WIDTHS)
def test_notes_stand_beside_their_code(page: Page, width: int) -> None:
    for name in ANNOTATED:
        visit(page, name, width)
        assert page.query_selector_all(".katex"), name
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
