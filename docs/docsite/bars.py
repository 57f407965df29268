"""Tabs and menu of pages that the navigation does not name: those of the page that they belong to.

Such a page names at its top where it belongs: by its first link to a page of the navigation.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

BARS = (
    re.compile(r'<nav class="md-tabs".*?</nav>', re.S),
    re.compile(
        r'(?<=data-md-type="navigation")[^>]*>.*?(?=<div class="md-sidebar md-sidebar--sec)', re.S
    ),
)
LABEL = re.compile(
    r'<label class="md-nav__link md-nav__link--active" for="__toc">.*?</label>', re.S
)
CONTENTS = '<nav class="md-nav md-nav--secondary"'
"""Begins the other page's own headings in its menu, and the button that unfolds them."""


def owner(html: str, name: str, listed: Iterable[str]) -> str | None:
    """The page of the navigation that a built page belongs to.

    Args:
        html: the built page.
        name: its place on the site.
        listed: places of the navigation's pages.
    """
    article = html.partition("<article")[2].partition("</article>")[0]
    links = re.findall(r'<a [^>]*href="([^"#:]+\.html)', article)
    places = (posixpath.normpath(posixpath.join(posixpath.dirname(name), link)) for link in links)
    return next((place for place in places if place in {*listed}), None)


def with_bars(html: str, name: str, owning: str, owning_name: str) -> str:
    """A built page with the tabs and the menu of another.

    Args:
        html: the built page.
        name: its place on the site.
        owning: the other built page.
        owning_name: its place on the site.
    """

    def moved(link: re.Match[str]) -> str:
        place = posixpath.join(posixpath.dirname(owning_name), link[1])
        return f'href="{posixpath.relpath(place, posixpath.dirname(name) or ".")}"'

    for bar in BARS:
        own = bar.search(html)
        theirs = bar.search(owning)
        assert own is not None, name
        assert theirs is not None, owning_name
        shown = re.sub(r'href="([^"#:]+)"', moved, _without_contents(theirs[0]))
        if own[0].startswith(" hidden"):
            shown = re.sub("^[^>]*>", " hidden>", shown)
        html = html[: own.start()] + shown + html[own.end() :]
    return html


def _without_contents(menu: str) -> str:
    """A menu without the headings of the page that it is from, which are lists within lists."""
    before, found, after = LABEL.sub("", menu).partition(CONTENTS)
    depth = 1 if found else 0
    while depth:
        tag = re.search("<nav|</nav>", after)
        assert tag is not None, menu
        depth += 1 if tag[0] == "<nav" else -1
        after = after[tag.end() :]
    return before + after
