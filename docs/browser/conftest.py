"""Chromium, and pages in it that watch for errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright


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
    # A busy machine takes its time.
    context.set_default_timeout(120_000)
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
