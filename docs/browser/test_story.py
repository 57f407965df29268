"""The figure of the home page: its memories are those of the rules, computed here once more."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from built import SITE, visit
from playwright.sync_api import Page

from docsite import figures
from docsite.javascript import engine

STORY = (
    "Kate is in Padua. Tom lives in Rome. It rains! Bob goes to the market.\n"
    "Kate moves to Rome. Eve was at sea. A new scene. Max is in Milan. Kate is in Bath"
)
SAID = [
    ("Kate", "Padua"),
    ("Tom", "Rome"),
    None,
    ("Bob", "market"),
    ("Kate", "Rome"),
    ("Eve", "sea"),
    "scene",
    ("Max", "Milan"),
    ("Kate", "Bath"),
]
"""Its sentences, by hand."""
PLACES = ["Padua", "Rome", "market", "sea", "Milan", "Bath"]
SIZES = {"M": 4, "C": 2, "c": 2, "K": 6, "beta": 0.75, "alpha": 0.9, "sceneAlpha": 0.2}


def run(call: str) -> Any:
    return json.loads(str(engine(*figures.SCRIPTS).eval(f"JSON.stringify({call})")))


def key(name: str) -> list[float]:
    word = 0xFFFFFFFF
    state = 2166136261
    for character in name.lower():
        state = (state ^ ord(character)) * 16777619 & word
    numbers = []
    for _ in range(int(SIZES["K"])):
        state = state + 0x6D2B79F5 & word
        x = (state ^ state >> 15) * (state | 1) & word
        x ^= x + (x ^ x >> 7) * (x | 61) & word
        numbers.append((x ^ x >> 14) / 2**31 - 1)
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def matrix(rule: str, step: int) -> list[list[float]]:
    """Token by token, as on the lessons' pages: decay, read, write."""
    rows = [[0.0] * int(SIZES["K"]) for _ in PLACES]
    for said in SAID[: step + 1]:
        left = SIZES["sceneAlpha"] if said == "scene" else SIZES["alpha"]
        if rule == "gated":
            rows = [[left * x for x in row] for row in rows]
        if said in (None, "scene"):
            continue
        name, place = said
        k = key(name)
        for row, at in zip(rows, PLACES, strict=True):
            value = float(at == place)
            held = sum(x * y for x, y in zip(row, k, strict=True))
            write = value if rule == "sum" else SIZES["beta"] * (value - held)
            row[:] = [x + write * y for x, y in zip(row, k, strict=True)]
    return rows


def test_a_story_is_taken_apart() -> None:
    expected = [
        {"scene": True}
        if said == "scene"
        else said and dict(zip(("name", "place"), said, strict=True))
        for said in SAID
    ]
    expected[2] = {"words": "It rains"}
    assert run(f"sentences({json.dumps(STORY)})") == expected


@pytest.mark.parametrize("rule", ["sum", "delta", "gated"])
@pytest.mark.parametrize("step", range(len(SAID)))
def test_matrices_follow_the_rules(rule: str, step: int) -> None:
    sizes = json.dumps(SIZES | {"rule": rule})
    found = run(f"matrixOf(sentences({json.dumps(STORY)}), {step}, {sizes})")
    for row, expected in zip(found, matrix(rule, step), strict=True):
        assert row == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "compressed", "memory", "segment"),
    [
        (2, [], [], [[0], [1], [2]]),
        (4, [], [[0], [1], [2], [3]], [[4]]),
        (8, [[0, 1], [2, 3]], [[4], [5], [6], [7]], [[8]]),
    ],
)
def test_slots_move_at_the_segments_end(
    step: int, compressed: list[list[int]], memory: list[list[int]], segment: list[list[int]]
) -> None:
    story = run(f"sentences({json.dumps(STORY)})")
    found = run(f"slotsOf({json.dumps(story)}, {step}, {json.dumps(SIZES)})")
    for kind, slots in (("compressed", compressed), ("memory", memory), ("segment", segment)):
        assert found[kind] == [[story[i] for i in slot] for slot in slots]


def test_verdicts_are_those_of_closed_forms() -> None:
    """A merged slot says two places; after a scene nobody is where they were said to be before it."""

    def verdicts(step: int, name: str) -> dict[str, Any]:
        state = json.dumps({"story": STORY, "step": step, **SIZES})
        return {
            one["title"]: (one["answer"], one["verdict"])
            for one in run(f"answers({state}, {json.dumps(name)})")
        }

    first = verdicts(3, "Kate")
    assert {*map(str, first.values())} == {"(['Padua'], 'right')"}
    assert verdicts(4, "Tom")["window"] == ([], "wrong")
    assert verdicts(5, "Kate")["sum"] == (["Padua", "Rome"], "unsure")
    assert verdicts(5, "Kate")["delta rule"] == (["Rome"], "right")
    scene = verdicts(6, "Kate")
    assert scene["delta rule"] == (["Rome"], "wrong")
    assert scene["gated delta"] == ([], "right")
    assert verdicts(8, "Tom")["Compressive"] == (["Padua", "Rome"], "unsure")


def test_it_plays_and_its_address_brings_it_back(page: Page) -> None:
    visit(page, "index.html")
    figure = page.locator("#figure-story")
    step = figure.get_by_label("Sentence", exact=True)
    told = figure.locator(".told")
    figure.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelector('#figure-story [name=step]').value == '9'")
    figure.get_by_role("button", name="Stop").click()
    step.fill("4")
    figure.get_by_label("Where is").select_option("Kate")
    figure.get_by_label("The story").fill(STORY)
    assert figure.get_by_label("Where is").locator("option").all_inner_texts() == [
        "Kate", "Tom", "Bob", "Eve", "Max",
    ]  # fmt: skip
    page.wait_for_function("location.hash.includes('Bath')")
    said = told.inner_text()
    assert "where is Kate? In Rome" in said
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_load_state("load")
    assert told.inner_text() == said
    assert figure.get_by_label("The story").input_value() == STORY


def test_a_pressed_pointer_is_followed(page: Page) -> None:
    visit(page, "index.html")
    figure = page.locator("#figure-story")
    box = figure.locator("svg").bounding_box()
    scale = box["width"] / 480
    page.mouse.move(box["x"] + 40 * scale, box["y"] + 20 * scale)
    page.mouse.down()
    assert figure.get_by_label("Sentence", exact=True).input_value() == "0"
    page.mouse.move(box["x"] + 200 * scale, box["y"] + 20 * scale)
    assert figure.get_by_label("Sentence", exact=True).input_value() == "1"
    page.mouse.up()
    page.mouse.move(box["x"] + 360 * scale, box["y"] + 20 * scale)
    assert figure.get_by_label("Sentence", exact=True).input_value() == "1"


def test_a_story_of_nothing_is_drawn(page: Page) -> None:
    visit(page, "index.html")
    figure = page.locator("#figure-story")
    for text in ("", "It rains.", "A new scene.", "<b> is in <i>. " * 40):
        figure.get_by_label("The story").fill(text)
        assert figure.locator("svg .panel").count() == 6
    assert figure.get_by_label("Sentence", exact=True).get_attribute("max") == "23"


def test_the_script_is_small() -> None:
    sizes = [path.stat().st_size for path in figures.SCRIPTS]
    assert sum(sizes) < 50_000
    assert max(sizes[:-1]) < 15_000


def test_the_moving_picture_is_of_today() -> None:
    """It has a frame for each sentence, the last of which stands still for who wants no motion."""
    kept = (figures.ROOT / figures.FOLDER / "story-moving.svg").read_text(encoding="utf-8")
    n = figures.load("story")["shown"]["story"].count(".")
    steps = [{"step": i, "asked": "Kate"} for i in range(n)]
    assert kept == figures.moving("story", steps)
    assert len(re.findall('<g class="shot"', kept)) == n
    assert (SITE / "index.html").is_file()
