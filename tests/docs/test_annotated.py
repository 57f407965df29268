"""The annotated pages name code that exists, and leave nothing public without a note."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docsite import annotated, coverage, read_state
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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A page about one model, in a folder of its own."""
    (tmp_path / "docs" / "annotated").mkdir(parents=True)
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "docs" / "annotated" / "page.md").write_text(PAGE)
    return tmp_path


def read(repository: Path, replace: tuple[str, str] = ("", "")) -> annotated.Page:
    path = repository / "docs" / "annotated" / "page.md"
    path.write_text(PAGE.replace(*replace))
    return annotated.read_page(path.relative_to(repository), repository)


def test_the_pages_of_this_repository() -> None:
    """A symbol that was renamed, or a new public method without a note, fails here first."""
    coverage.check(annotated.pages())


@pytest.mark.parametrize(
    ("place", "ranges"),
    [
        ("model.py", [(1, 21)]),
        ("model.py: LIMIT", [(3, 3)]),
        ("model.py: Layer\nfrom: class Layer\nto: doubles", [(6, 7)]),
        ("model.py: Layer\nfrom: def forward\nfrom: y = x\nto: return", [(9, 9), (14, 15)]),
    ],
)
def test_places(repository: Path, place: str, ranges: list[tuple[int, int]]) -> None:
    assert find(parse_place(place), repository).ranges == tuple(ranges)


def test_a_listing_counts_its_lines(repository: Path) -> None:
    runs = [Run(9, 9, True), Run(10, 13, False), Run(14, 15, True)]
    html = listing(Path("model.py"), runs, repository)
    assert "<span><i class=k>def</i> " in html
    assert html.count("<span>") == 7
    starts = re.findall(r"counter-reset:n (\d+)", html)
    assert starts == ["8", "9", "13"]
    assert re.findall(r"<details>.*?</details>", html, re.S)[0].count("<span>") == 4


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (("Layer.forward", "Layer.backward"), "page.md: model.py has no Layer.backward"),
        (("from: y = x", "from: z = x"), "no line from 9 to 15 has 'z = x'"),
        ((": it does nothing", ""), "is not 'PATH: Symbol: why'"),
        (("nothing\n```", "nothing"), "does not end"),
        # A passage counts for the function that it names, or whose ``def`` it shows.
        (("Layer.forward\n", "Layer\n"), "Layer.forward has no note"),
        (("model.py: Layer.extra: it does nothing\n", ""), "Layer.extra has no note"),
        (("covers\nmodel.py\n", "covers\n"), "no page in docs/annotated covers model.py"),
    ],
)
def test_what_is_wrong_with_a_page_is_one_line(
    repository: Path, monkeypatch: pytest.MonkeyPatch, replace: tuple[str, str], words: str
) -> None:
    monkeypatch.setattr(coverage, "COVERED", ("model.py",))
    monkeypatch.setattr(coverage, "MOST_FOLDED", 1)
    coverage.check([read(repository)], repository)
    with pytest.raises(DocsError) as error:
        coverage.check([read(repository, replace)], repository)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_no_line_is_absent(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A passage shows its function whole, with the signature and the docstring open, and folds what it
    does not name; the rest of the file is folded at the page's end."""
    (repository / "model.py").write_text(LONG)
    _forget_files()
    page = read(repository, ("from: y = x\nto: return", "from: return x"))
    code = shown(page.places, page.covers, page.left_out, repository)
    assert code.passages == [[Run(9, 13, True), Run(14, 18, False), Run(19, 19, True)]]
    assert code.rest == {"model.py": [Run(1, 8, False), Run(20, 25, False)]}
    assert "14 of its 25 lines" in rest("model.py", code.rest["model.py"], repository)
    monkeypatch.setattr(coverage, "COVERED", ())
    with pytest.raises(DocsError, match=r"19 of 25 lines are folded.* model\.py:1-8"):
        coverage.check([page], repository)


@pytest.mark.parametrize("page", annotated.pages(), ids=lambda page: page.path.stem)
def test_every_line_of_a_covered_file_is_on_its_page(page: annotated.Page) -> None:
    code = shown(page.places, page.covers, page.left_out)
    for path in page.covers:
        there = {n for run in [*code.of(path), *code.rest[path]] for n in run.numbers}
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        assert not [n for n, line in enumerate(lines, 1) if line.strip() and n not in there]


def test_columns(repository: Path) -> None:
    text = annotated.in_columns(
        read(repository),
        lambda lines, runs: f"<pre>{lines.place}</pre>",
        lambda path, runs: f"<pre>rest of {path}</pre>",
        str,
        repository,
    )
    assert text.index("Before.") < text.index('<div class="passage"')
    note = text[text.index('<div class="note"') : text.index("</div>")]
    assert "    an indented line." in note
    assert text.index("<pre>model.py: Layer.forward</pre>") < text.index("## A heading")
    assert "<pre>rest of model.py</pre>" in text
    assert "- `Layer.extra`: it does nothing" in text


def test_code_that_changed_since_its_note_was_read(repository: Path) -> None:
    assert len(read_state.changed([read(repository)], repository)) == 1
    read_state.accept([read(repository)], repository)
    assert not read_state.changed([read(repository)], repository)
    # Other lines of the file may change, and these may move.
    model = repository / "model.py"
    for old, new, n_changed in (("LIMIT = 3", "LIMIT = 4\n\n", 0), ("y + x", "y + y", 1)):
        _forget_files()
        model.write_text(model.read_text().replace(old, new))
        changed = read_state.changed([read(repository)], repository)
        assert len(changed) == n_changed
    assert "model.py: Layer.forward has changed" in changed[0]


def test_read_state_of_this_repository() -> None:
    """It names no passage that is gone."""
    pages = annotated.pages()
    stale = read_state.recorded() - {
        (p.path.stem, lines.place.key) for p in pages for lines in p.places
    }
    assert not stale, f"make docs-read rewrites {read_state.FILE}"
    assert (ROOT / read_state.FILE).is_file()


def _forget_files() -> None:
    from docsite import code

    for cached in (code.read, code._tree, code.symbols):
        cached.cache_clear()
