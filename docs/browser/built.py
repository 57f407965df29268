"""The built site, and a browser for its pages."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page

SITE = Path(__file__).parents[2] / ".docs-build" / "site"
PHONE = 390
"""Width of a screen, pixels."""


def visit(page: Page, name: str, width: int = 1440) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((SITE / name).as_uri())
    page.wait_for_load_state("load")
