"""The annotated pages name code that exists, and leave nothing public without a note."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docsite import annotated, code, coverage, read_state
from docsite.code import ROOT, find, parse_place
from docsite.errors import DocsError
from docsite.folds import Run, shown
from docsite.highlighting import listing, rest

SOURCE = '''"""A module."""

LIMIT = 3


class Layer:
    """It doubles."""

    def forward(self, x: int) -> int:
        """Twice.

        Nothing else.
        """
        y = x
        return y + x

    def extra(self) -> None:
        pass

    def _private(self) -> None:
        pass
'''
LONG = SOURCE.replace("return y + x", "y = y + 1\n        " * 4 + "return x")
"""With a longer function."""
PAGE = """# A page

Before.

```code
model.py: Layer.forward
from: y = x
to: return
```

A note with `code` and

    an indented line.

## A heading

```covers
model.py
```

```left-out
model.py: Layer.extra: it does nothing
```
"""
PAGES = annotated.pages()
"""The pages of this repository."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one model and a page about it."""
    monkeypatch.setattr(coverage, "COVERED", ("model.py",))
    (tmp_path / annotated.FOLDER).mkdir(parents=True)
    (tmp_path / "model.py").write_text(SOURCE)
    return tmp_path


def read(root: Path, old: str = "", new: str = "") -> annotated.Page:
    """The page, with one text replaced, and the model as it is now."""
    for cached in (code.read, code._tree, code.symbols):
        cached.cache_clear()
    path = annotated.FOLDER / "page.md"
    (root / path).write_text(PAGE.replace(old, new))
    return annotated.read_page(path, root)


def test_annotated_pages_cover_their_files() -> None:
    """A symbol that was renamed, or a new public method without a note, fails here first."""
    coverage.check(PAGES)
    keys = {(page.path.stem, lines.place.key) for page in PAGES for lines in page.places}
    assert not read_state.recorded() - keys, f"make docs-read rewrites {read_state.FILE}"
    assert (ROOT / read_state.FILE).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.stem)
def test_every_line_of_a_covered_file_is_on_its_page(page: annotated.Page) -> None:
    code = shown(page.places, page.covers, page.left_out)
    for path in page.covers:
        there = {n for run in [*code.of(path), *code.rest[path]] for n in run.numbers}
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        assert not [n for n, line in enumerate(lines, 1) if line.strip() and n not in there]


@pytest.mark.parametrize(
    ("place", "ranges"),
    {
        "model.py": [(1, 21)],
        "model.py: LIMIT": [(3, 3)],
        "model.py: Layer\nfrom: class Layer\nto: doubles": [(6, 7)],
        "model.py: Layer\nfrom: def forward\nfrom: y = x\nto: return": [(9, 9), (14, 15)],
    }.items(),
)
def test_places(root: Path, place: str, ranges: list[tuple[int, int]]) -> None:
    assert find(parse_place(place), root).ranges == tuple(ranges)


def test_a_listing_counts_its_lines(root: Path) -> None:
    html = listing(Path("model.py"), [Run(9, 9, True), Run(10, 13, False), Run(14, 15, True)], root)
    assert "<span><i class=k>def</i> " in html
    assert html.count("<span>") == 7
    assert re.findall(r"counter-reset:n (\d+)", html) == ["8", "9", "13"]
    (folded,) = re.findall(r"<details>.*?</details>", html, re.S)
    assert folded.count("<span>") == 4


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Layer.forward", "Layer.backward", "page.md: model.py has no Layer.backward"),
        ("from: y = x", "from: z = x", "no line from 9 to 15 has 'z = x'"),
        (": it does nothing", "", "is not 'PATH: Symbol: why'"),
        ("nothing\n```", "nothing", "does not end"),
        # A passage counts for the function that it names, or whose ``def`` it shows.
        ("Layer.forward\n", "Layer\n", "Layer.forward has no note"),
        ("model.py: Layer.extra: it does nothing\n", "", "Layer.extra has no note"),
        ("covers\nmodel.py\n", "covers\n", "no page in docs/annotated covers model.py"),
    ],
)
def test_a_mistake_in_a_page_is_reported_in_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, words: str
) -> None:
    monkeypatch.setattr(coverage, "MOST_FOLDED", 1)
    coverage.check([read(root)], root)
    with pytest.raises(DocsError) as error:
        coverage.check([read(root, old, new)], root)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_no_line_is_absent(root: Path) -> None:
    """A passage shows its function whole, with the signature and the docstring open, and folds what it
    does not name; the rest of the file is folded at the page's end."""
    (root / "model.py").write_text(LONG)
    page = read(root, "from: y = x\nto: return", "from: return x")
    code = shown(page.places, page.covers, page.left_out, root)
    assert code.passages == [[Run(9, 13, True), Run(14, 18, False), Run(19, 19, True)]]
    assert code.rest == {"model.py": [Run(1, 8, False), Run(20, 25, False)]}
    assert "14 of its 25 lines" in rest("model.py", code.rest["model.py"], root)
    with pytest.raises(DocsError, match=r"19 of 25 lines are folded.* model\.py:1-8"):
        coverage.check([page], root)


def test_columns(root: Path) -> None:
    text = annotated.in_columns(
        read(root),
        lambda lines, runs: f"<pre>{lines.place}</pre>",
        lambda path, runs: f"<pre>rest of {path}</pre>",
        str,
        root,
    )
    before, _, passage = text.partition('<div class="passage"')
    assert "Before." in before
    note, _, rest = passage.partition("</div>")
    assert '<div class="note"' in note
    assert "    an indented line." in note
    code, _, end = rest.partition("## A heading")
    assert "<pre>model.py: Layer.forward</pre>" in code
    assert "<pre>rest of model.py</pre>" in end
    assert "- `Layer.extra`: it does nothing" in end


def test_code_that_changed_since_its_note_was_read(root: Path) -> None:
    assert len(read_state.changed([read(root)], root)) == 1
    read_state.accept([read(root)], root)
    assert not read_state.changed([read(root)], root)
    # Other lines of the file may change, and these may move.
    (root / "model.py").write_text(SOURCE.replace("LIMIT = 3", "LIMIT = 4\n\n"))
    assert not read_state.changed([read(root)], root)
    (root / "model.py").write_text(SOURCE.replace("y + x", "y + y"))
    (changed,) = read_state.changed([read(root)], root)
    assert "model.py: Layer.forward has changed" in changed
