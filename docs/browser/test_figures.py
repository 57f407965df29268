"""Figures that the reader can move."""

from __future__ import annotations

import json
import math
import re

import pytest
from built import PHONE, SITE, visit
from playwright.sync_api import Browser, Locator, Page

from docsite import figures
from docsite.javascript import engine

PAGES = {
    "transformer-xl": "lessons/transformer_xl.html",
    "compressive": "lessons/compressive.html",
    "feedback": "lessons/feedback.html",
    "fast-weights": "lessons/fast_weights.html",
    "gated-delta-net": "lessons/gated_delta_net.html",
    "delta-rule": "annotated/delta_rule.html",
    "overlap": "lessons/fast_weights.html",
    "span": "recall.html",
    "story": "index.html",
}
"""Figure -> its page."""


def on(page: Page, name: str, width: int = 1440) -> Locator:
    visit(page, PAGES[name], width)
    return page.locator(f"#figure-{name}")


def test_every_figure_has_a_page() -> None:
    # test_asked.py looks at the one with a model in it.
    assert {path.stem for path in (figures.ROOT / figures.FOLDER).glob("*.json")} == {
        *PAGES,
        "asked",
    }


@pytest.mark.parametrize("name", [name for name in PAGES if name != "span"])
def test_a_button_and_a_key_change_what_is_drawn(page: Page, name: str) -> None:
    figure = on(page, name)
    slider = figure.locator("input").first
    picture = figure.locator(".picture")
    told = figure.locator(".told")
    seen = [(picture.inner_html(), told.inner_text(), slider.input_value())]
    figure.get_by_role("button", name="Next").click()
    seen.append((picture.inner_html(), told.inner_text(), slider.input_value()))
    slider.focus()
    page.keyboard.press("ArrowRight")
    seen.append((picture.inner_html(), told.inner_text(), slider.input_value()))
    assert all(len({*kind}) == 3 for kind in zip(*seen, strict=True))
    figure.get_by_role("button", name="Back").click()
    assert (picture.inner_html(), told.inner_text(), slider.input_value()) == seen[1]
    slider.fill("0")
    assert figure.locator("svg rect").count()


@pytest.mark.parametrize("name", ["compressive", "fast-weights"])
def test_a_letter_can_be_tapped(page: Page, name: str) -> None:
    figure = on(page, name, PHONE)
    slider = figure.locator("input").first
    letters = figure.locator(".picture .letter")
    for token in (30, 100, 0):
        letters.nth(token).click()
        assert slider.input_value() == str(token)
    figure.locator("svg").click(position={"x": 2, "y": 2})  # beside the letters
    assert slider.input_value() == "0"


def test_compressed_slots_of_a_neighbour(page: Page) -> None:
    """They are looked at otherwise, and the next letter costs what the file says."""
    figure = on(page, "compressive")
    told = figure.locator(".told")
    before = figure.locator(".picture").inner_html()
    figure.get_by_role("slider", name="Compressed slots").press("ArrowRight")
    assert figure.locator(".picture").inner_html() != before
    assert figure.locator("output").last.inner_text().startswith("a neighbour")
    steps = figures.load("compressive")["steps"]
    own, others = steps[int(figure.locator("input").first.input_value())]["bits"]
    assert f"{own:.2f} bits with its own compressed slots, {others:.2f}" in told.inner_text()


def test_a_finger_finds_the_buttons(browser: Browser) -> None:
    context = browser.new_context(
        has_touch=True, is_mobile=True, viewport={"width": PHONE, "height": 800}
    )
    page = context.new_page()
    for name in PAGES:
        figure = on(page, name, PHONE)
        for part in (
            *figure.locator("button:visible").all(),
            *figure.locator("input:visible").all(),
        ):
            box = part.bounding_box()
            assert min(box["height"], box["width"]) >= 44
    context.close()


@pytest.mark.parametrize(("degrees", "beta"), [(0, 1.0), (60, 0.5), (135, 0.25)])
def test_overlapping_keys_are_the_rules(degrees: int, beta: float) -> None:
    script = engine(*figures.SCRIPTS)
    found = json.loads(
        script.eval(f"JSON.stringify(overlapReads({{angle: {degrees}, beta: {beta}}}))")
    )
    shared = math.cos(math.radians(degrees))
    assert found["sum"] == [pytest.approx([1, shared]), pytest.approx([shared, 1])]
    kept = beta * (1 - beta * shared**2)
    second = beta * shared * (1 - beta)
    assert found["delta"] == [pytest.approx([kept, beta * shared]), pytest.approx([second, beta])]


def test_sliders_move_the_edges(page: Page) -> None:
    figure = on(page, "span")

    def edges() -> list[float]:
        return [float(edge.get_attribute("x1")) for edge in figure.locator(".edge").all()]

    before = edges()
    assert len(before) == 9
    assert not figure.locator(".faded").count()
    moved = {
        "M, slots": [True] * 8 + [False],
        "T, tokens": [False, True, True, False, False, True, True, False, True],
        "L, layers": [False, False, True, False, False, False, True, False, False],
        "C, compressed": [False, False, False, False, True, True, True, False, False],
        "c, tokens": [False, False, False, False, True, True, True, False, False],
    }
    for label, expected in moved.items():
        slider = figure.get_by_label(label)
        slider.press("ArrowRight")
        assert [a != b for a, b in zip(before, edges(), strict=True)] == expected, label
        assert figure.locator(".curve.faded").count()
        slider.press("ArrowLeft")
        assert edges() == before
    figure.get_by_label("M, slots").press("ArrowRight")
    assert (
        "256 to 319 tokens back, through its layers up to 575"
        in figure.locator(".told").inner_text()
    )


@pytest.mark.parametrize(
    ("layers", "slots", "segment"), [(2, 128, 64), (12, 64, 512), (3, 16, 256), (4, 32, 16)]
)
def test_edges_are_where_counting_ends(layers: int, slots: int, segment: int) -> None:
    """From a segment's last token down through the layers: the oldest slot, and its segment's past."""
    first = start = 1000 * segment
    for _ in range(layers):
        first = start - slots
        start = first // segment * segment
    sizes = {"M": slots, "T": segment, "L": layers, "C": 0, "c": 4}
    script = f"JSON.stringify(edges({json.dumps(sizes)}))"
    edges = json.loads(str(engine(*figures.SCRIPTS).eval(script)))
    for name in ("transformer-xl", "compressive-convolution"):
        assert edges[name][-1] == ["layers", 1001 * segment - 1 - first]


@pytest.mark.parametrize("name", PAGES)
def test_without_scripts_it_is_a_picture(browser: Browser, name: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((SITE / PAGES[name]).as_uri())
    figure = page.locator(f"#figure-{name}")
    picture = figure.locator(".picture")
    assert len(picture.get_attribute("aria-label")) > 40
    assert picture.locator("svg").bounding_box()["height"] > 100
    assert figure.locator(".told").inner_text()
    assert not figure.locator("form").is_visible()
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_it_fits_a_phone(page: Page, name: str) -> None:
    figure = on(page, name, PHONE)
    for part in (figure.locator("svg"), *figure.locator("input:visible").all()):
        box = part.bounding_box()
        assert 0 <= box["x"] < box["x"] + 60 < box["x"] + box["width"] <= PHONE


def test_the_chunk_is_the_rule_token_by_token() -> None:
    """The last two steps of the figure, computed in the script from rounded numbers."""
    data = figures.load("delta-rule")
    script = engine(*figures.SCRIPTS)
    steps = json.loads(script.eval(f"JSON.stringify(chunkSteps({json.dumps(data)}))"))
    matrix = data["matrix"]
    outputs = []
    for k, q, v, beta in zip(data["k"], data["q"], data["v"], data["beta"], strict=True):
        written = [beta * (a - b) for a, b in zip(v, times(k, matrix), strict=True)]
        matrix = [
            [x + feature * new for x, new in zip(row, written, strict=True)]
            for feature, row in zip(k, matrix, strict=True)
        ]
        outputs.append(times(q, matrix))
    for step, expected in ((steps[5], matrix), (steps[6], outputs)):
        _, drawn = step[2][-1]
        for row, wanted in zip(drawn, expected, strict=True):
            assert row == pytest.approx(wanted, abs=1e-9)


def test_rows_of_the_chunk_have_the_letters_of_their_tokens() -> None:
    data = figures.load("delta-rule")
    script = engine(*figures.SCRIPTS)
    for step in range(1, 8):
        svg = script.eval(f"drawChunk({json.dumps(data)}, {{step: {step}}})")
        letters = "".join(re.findall(r'class="letter"[^>]*>(.)<', svg))
        # Rows of a memory are features.
        assert letters == ("" if step == 6 else data["text"])


def test_bars_below_zero_leave_room_for_the_names_of_their_keys() -> None:
    script = engine(*figures.SCRIPTS)
    svg = script.eval("drawOverlap({}, {angle: 180, beta: 1})")
    bars = [float(x) for x in re.findall(r'<rect class="(?:first|second)" x="([\d.]+)"', svg)]
    (named,) = {float(x) for x in re.findall(r'x="([\d.]+)"[^>]*>key \d<', svg)}
    assert min(bars) >= named + 45
    assert ">\N{MINUS SIGN}100" in svg


def times(row: list[float], matrix: list[list[float]]) -> list[float]:
    """A row times a matrix."""
    columns = zip(*matrix, strict=True)
    return [sum(a * b for a, b in zip(row, column, strict=True)) for column in columns]
