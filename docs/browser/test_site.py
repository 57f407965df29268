"""The built site in headless Chromium: ``make docs-test``. Not part of ``make test``."""

from __future__ import annotations

import html
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


def test_code_fits_beside_the_contents(page: Page) -> None:
    """A hundred characters in a line, and examples of the reference and of main pages have no more."""
    long = []
    main = {"path.html", "readme.html", "today.html", "tutorial.html", "guides/own-data.html"}
    for name in [name for name in WRITTEN if name in main or name.startswith("reference/")]:
        for width in (1024, 1440):
            visit(page, name, width)
            long += page.eval_on_selector_all(
                "article > :is(.language-python, .language-sh) > pre > code",
                """(all, name) => all.filter(e => e.scrollWidth > e.clientWidth + 1)
                  .map(e => `${name}: ${e.innerText.slice(0, 60)}`)""",
                name,
            )
    assert not long


def test_on_a_phone_lines_of_python_stay_whole(page: Page) -> None:
    visit(page, "path.html", PHONE)
    wraps = "all => all.map(e => getComputedStyle(e).whiteSpace)"
    assert {*page.eval_on_selector_all(".language-python > pre > code", wraps)} == {"pre"}
    visit(page, "guides/own-data.html", PHONE)
    assert {*page.eval_on_selector_all(".language-sh > pre > code", wraps)} == {"pre-wrap"}


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


def test_the_contents_button_covers_no_text(page: Page) -> None:
    """On a phone: it stands in the header, and opens below it."""
    visit(page, "lessons/compressive.html", PHONE)
    header = page.locator(".md-header").bounding_box()
    button = page.locator(".md-sidebar--secondary .md-sidebar-button")
    place = button.bounding_box()
    assert header is not None
    assert place is not None
    bottom = header["y"] + header["height"]
    assert header["y"] <= place["y"] < place["y"] + place["height"] <= bottom
    button.click()
    contents = page.locator(".md-sidebar--secondary .md-sidebar__inner")
    page.wait_for_function(
        "e => getComputedStyle(e).opacity === '1'", arg=contents.element_handle()
    )
    opened = contents.bounding_box()
    assert opened is not None
    assert bottom <= opened["y"] + 1
    assert opened["x"] >= 0
    assert opened["x"] + opened["width"] <= PHONE
    contents.get_by_text("Exercises").click()
    assert page.url.endswith("#exercises")


def test_the_slider_keeps_its_value_beside_it(page: Page) -> None:
    """On a phone the buttons wrap, not the value."""
    visit(page, "lessons/transformer_xl.html", PHONE)
    row = page.locator("figure.moving form div").first
    slider, value, button = (
        row.locator(x).first.bounding_box() for x in ("input", "output", "button")
    )
    assert slider is not None
    assert value is not None
    assert button is not None
    assert abs(slider["y"] + slider["height"] / 2 - value["y"] - value["height"] / 2) < 8
    assert button["y"] > value["y"] + value["height"] / 2


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


@pytest.mark.parametrize(
    "name", [page for page in PAGES if page.startswith(("lessons/", "examples/notebooks/"))]
)
def test_pictures_leave_room_for_text_on_paper(page: Page, name: str) -> None:
    """A picture of at most 11 cm leaves less of a page blank before it."""
    page.emulate_media(media="print")
    visit(page, name, PAPER)
    high = page.evaluate(
        """[...document.querySelectorAll("article :is(img, .picture svg)")]
          .map(e => e.getBoundingClientRect().height)
          .filter(height => height > 11 * 96 / 2.54)"""
    )
    assert not high


def test_pages_are_light() -> None:
    heavy = {name: size for name in PAGES if (size := (SITE / name).stat().st_size) > HEAVIEST}
    assert not heavy


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("relative shift", "annotated/transformer_xl.html"),
        ("linear attention", "path.html"),
        ("KV cache", "path.html"),
        ("backpropagation", "path.html"),
        ("vanishing gradient", "glossary.html"),
        ("associative recall", "recall.html"),
        ("WY", "annotated/delta_rule.html"),
        ("compression", "compressive.html"),
        ("initial_memory", "reference/"),
    ],
)
def test_search(page: Page, words: str, found: str) -> None:
    visit(page, "index.html")
    page.keyboard.press("/")
    wait_in_search(page, "input")
    page.keyboard.type(words, delay=20)
    wait_in_search(page, f"a[href*='{found}']")


def wait_in_search(page: Page, part: str) -> None:
    """Wait for a part of the open search, which zensical keeps in a shadow root."""
    page.wait_for_function(
        """part => [...document.querySelectorAll("*")].some(
            e => e.shadowRoot?.querySelector(`dialog[open] ${part}`))""",
        arg=part,
        timeout=20_000,
    )


def test_the_index_comes_when_search_is_opened(page: Page) -> None:
    fetched = []
    page.on("request", lambda request: fetched.append(request.url.rpartition("/")[2]))
    for key in ("/", "Control+k"):
        fetched.clear()
        visit(page, "learn.html")
        page.wait_for_timeout(500)
        assert "figures.js" in fetched
        assert not {"search.js", "search.json"} & {*fetched}
        with page.expect_request("**/search.js"):
            page.keyboard.press(key)
        wait_in_search(page, "input")
        page.keyboard.type("compression")
        wait_in_search(page, "a[href*=compressive]")


def test_every_page_describes_itself() -> None:
    described = {}
    for name in WRITTEN:
        text = (SITE / name).read_text(encoding="utf-8")
        (about,) = re.findall(r'<meta name="description" content="([^"]*)">', text)
        assert 40 < len(html.unescape(about)) <= 200, name
        assert f'<meta property="og:description" content="{about}">' in text
        assert described.setdefault(about, name) == name


def test_every_page_has_a_tab_and_a_menu() -> None:
    """A page that the navigation does not name has those of the page that it belongs to."""
    without = []
    for name in WRITTEN:
        tabs = _part(name, '<nav class="md-tabs"', "</nav>")
        menu = _part(name, 'data-md-type="navigation"', "md-sidebar--secondary")
        if "md-tabs__item--active" not in tabs or "md-nav__link--active" not in menu:
            without.append(name)
    assert not without


def _part(name: str, begin: str, end: str) -> str:
    text = (SITE / name).read_text(encoding="utf-8")
    return text.partition(begin)[2].partition(end)[0]


def test_pages_share_one_grid(page: Page) -> None:
    """Logo, tabs and search stand in the same place, and pictures in the middle of the text."""
    for width in (1280, 1440, 1920):
        places = set()
        for name in (
            "index.html",
            "path.html",
            ANNOTATED[0],
            "recall.html",
            "reference/models.html",
            "examples/notebooks/tour.html",
        ):
            visit(page, name, width)
            boxes = [
                page.locator(part).first.bounding_box()
                for part in (".md-logo", ".md-tabs__list", ".md-search")
            ]
            places.add(tuple(box["x"] for box in boxes))
            aside = page.eval_on_selector_all(
                "article > figure, article > p > img",
                """all => all.filter(e => e.getBoundingClientRect().width).map(e => {
                  const [own, column] = [e, e.closest("p") ?? document.querySelector("article p")]
                    .map(e => e.getBoundingClientRect())
                  const middle = box => (box.left + box.right) / 2
                  return [Math.abs(middle(own) - middle(column)), own.width / column.width]
                })""",
            )
            for off, share in aside:
                assert off < 2, name
                assert 1 / 3 < share <= 1, name
        assert len(places) == 1, places


def test_indices_hang_equally_low(page: Page) -> None:
    visit(page, "lessons/gated_delta_net.html")
    depth = page.evaluate(
        """async () => {
          await document.fonts.ready
          const formula = base => `<math><msub><mi>${base}</mi><mi>t</mi></msub></math>`
          document.querySelector("article").insertAdjacentHTML(
            "beforeend", `<p id="try">${["k", "q", "y", "β"].map(formula).join(" ")}</p>`)
          await document.fonts.load("16px STIX2")
          return [...document.querySelectorAll("#try msub > :last-child")].map(
            e => Math.round(e.getBoundingClientRect().bottom))
        }"""
    )
    assert len({*depth}) == 1, depth


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


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", PHONE)])
def test_axe_finds_nothing_in_the_open_search(page: Page, scheme: str, width: int) -> None:
    page.emulate_media(color_scheme=scheme)
    visit(page, "lessons/compressive.html", width)
    page.keyboard.press("/")
    wait_in_search(page, "input")
    page.keyboard.type("compression")
    wait_in_search(page, "a mark")
    # Until it has faded in, its colours are paler.
    page.wait_for_timeout(1000)
    # Its results are scrolled by the arrow keys from the box for words.
    rules = {"scrollable-region-focusable": {"enabled": False}}
    found = Axe().run(page, options={"preload": False, "rules": rules}).response["violations"]
    assert not [(each["id"], each["nodes"][0]["html"][:120]) for each in found]
    for _ in range(12):
        page.keyboard.press("ArrowDown")
    page.wait_for_timeout(500)
    chosen = page.locator("dialog [aria-selected=true]").bounding_box()
    assert 0 <= chosen["y"] <= 900 - chosen["height"]


def test_the_keyboard_reaches_the_text(page: Page) -> None:
    visit(page, "index.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')").startswith("#")
