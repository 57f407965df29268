"""The model in the page computes what Python's does, and can be used by keyboard and on a phone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from built import PHONE, visit
from playwright.sync_api import Page

RECORDED = json.loads(Path(__file__).with_name("asked.json").read_text(encoding="utf-8"))
"""Written by benchmarks/asked.py; tests/docs compares it with the model."""


def asked(page: Page, story: str, name: str, step: int = 99) -> dict[str, Any]:
    state = {"story": story, "asked": name, "step": step}
    return page.evaluate("state => asked(FIGURES['figure-asked'], state)", state)


def test_it_computes_what_python_computes(page: Page) -> None:
    visit(page, "ask.html")
    assert len(RECORDED[-1]["words"]) == 40 * 4 + 3
    for row in RECORDED:
        found = asked(page, row["story"], row["asked"])
        assert found["words"] == row["words"]
        assert found["logits"] == pytest.approx(row["logits"], abs=1e-3)
        assert [*found["from"], found["own"]] == pytest.approx(row["shares"], abs=1e-3)
        assert sum(found["from"]) + found["own"] == pytest.approx(1, abs=1e-6)


def test_it_reads_what_people_type(page: Page) -> None:
    visit(page, "ask.html")
    found = asked(page, "kate moved to the rome!\ntom is in Paris. Where is kate?\nRome", "Tom")
    assert found["words"] == [
        "Kate", "is", "in", "Rome.", "Tom", "is", "in", "<unk>", "Where", "is", "Kate?", "Rome.",
        "Where", "is", "Tom?",
    ]  # fmt: skip
    assert found["truth"] == "Paris"


def test_an_overwritten_fact_gives_little_to_the_answer(page: Page) -> None:
    visit(page, "ask.html")
    figure = page.locator("#figure-asked")
    step = figure.get_by_label("Ask after sentence")
    told = figure.locator(".told")
    figure.get_by_label("The text").fill("Kate is in Padua. Tom is in Rome. Kate is in Rome.")
    step.fill("1")
    assert "The model says Padua" in told.inner_text()
    step.press("ArrowRight")
    assert "The model says Rome" in told.inner_text()
    first, _, last = asked(page, "Kate is in Padua. Tom is in Rome. Kate is in Rome.", "Kate")[
        "from"
    ]
    assert last > max(0.4, 4 * abs(first))
    figure.get_by_label("Where is").select_option("Tom")
    assert "Where is Tom? The model says Rome" in told.inner_text()
    figure.get_by_label("The text").fill("Kate is in Paris.")
    assert "Unknown words: Paris" in told.inner_text()


def test_it_fits_a_phone_and_answers_a_tap(page: Page) -> None:
    visit(page, "ask.html", PHONE)
    figure = page.locator("#figure-asked")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    box = figure.locator("svg").bounding_box()
    assert box is not None
    figure.locator("svg").click(position={"x": box["width"] * 0.25, "y": 24 * box["width"] / 480})
    assert "The model says Padua" in figure.locator(".told").inner_text()
    for text in ("", "...", "Where is Kate? " * 90):
        figure.get_by_label("The text").fill(text)
        assert "The model says" in figure.locator(".told").inner_text()
