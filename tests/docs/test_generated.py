"""The site's generator: links, pictures, notebooks and results files."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from docsite import bars, benchmarks, links, notebooks, pictures
from docsite.benchmarks import Table
from docsite.errors import DocsError

MACHINE = {"cpu": "a CPU", "cores": 2, "threads": 1, "python": "3", "torch": "2", "date": "today"}
MACHINE["command"] = "it.py"


def test_results_fit_their_tables() -> None:
    """A file of another form than its table says fails here first."""
    assert "| architecture |" in benchmarks.measured_rows()


def test_tables_are_of_the_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks, "TABLES", (Table("it.json", "It", "size ratio peer"),))
    assert "###" not in benchmarks.measured_rows(tmp_path)
    path = tmp_path / benchmarks.RESULTS / "it.json"
    path.parent.mkdir(parents=True)
    rows = [{"size": "S", "ratio": 1234.6, "peer": None}, {"size": "M", "ratio": 0.12346}]
    path.write_text(json.dumps({"machine": MACHINE, "rows": rows}))
    page = benchmarks.measured_rows(tmp_path)
    assert "| S | 1,235 |  |\n| M | 0.1235 |  |" in page
    assert "`it.py`" in page
    # Of an older form.
    older = [{"size": "S", "peer": 1}]
    for more, words in (({}, "no machine and rows"), ({"rows": older}, "no row with ratio")):
        path.write_text(json.dumps({"machine": MACHINE} | more))
        with pytest.raises(DocsError, match=words):
            benchmarks.measured_rows(tmp_path)


def test_measured_spans_are_put_in_words(tmp_path: Path) -> None:
    said = partial(benchmarks.measured_span, "it", tmp_path)
    assert "not been measured" in said()
    path = tmp_path / benchmarks.RESULTS / "span-it.json"
    path.parent.mkdir(parents=True)
    span = {"tokens": 1024, "low": 512, "high": 2048}
    run = {"run": "it", "span": span, "corpus": "a text", "longest": 4096, "parameters": 500_000}
    for beyond, words in (
        (False, "**1,024 tokens** (95 % interval: 512 to 2,048). That is the shortest history"),
        (True, "512 to 2,048). Its loss was still falling"),
    ):
        span["beyond"] = beyond
        path.write_text(json.dumps({"runs": [run]}))
        assert words in said()
    path.write_text(json.dumps({"runs": [run, run]}))
    with pytest.raises(DocsError, match="not the measure"):
        said()


def test_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To pages, source files and folders; code and other hosts are left alone."""
    for name in ("README.md", "docs/a.md", "docs/b/c.md", "src/m.py", "benchmarks/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found: list[Path] = []
    text = (
        "[a](../a.md#x) [s](../../src/m.py) [f](../../src) [h](../../README.md) [[1]](../a.md)\n"
        "[o](https://host/a.md) [here](#x) ![gone](gone.png)\n"
        "```\n[a](../a.md)\n```\n"
    )
    page = Path("docs/b/c.md")
    at = links.place(page, tmp_path)
    assert at == PurePosixPath("b/c.md")
    assert links.rewritten(text, page, at, found.append, tmp_path) == (
        "[a](../a.md#x) [s](../source/src/m.py.md) [f](../source/src/index.md) [h](../readme.md) "
        "[[1]](../a.md)\n"
        "[o](https://host/a.md) [here](#x) gone\n"
        "```\n[a](../a.md)\n```\n"
    )
    assert Path("src/m.py") in found
    assert "docs/b/c.md links to gone.png" in capsys.readouterr().out


def test_pictures_by_the_colours_of_the_site(tmp_path: Path) -> None:
    picture = tmp_path / "x.svg"
    picture.write_text(".a{1}\n@media (prefers-color-scheme: dark) {\n.a{2}\n}\n</style>")
    both = pictures.variants("x", picture)
    assert both == {"x-light.svg": ".a{1}\n</style>", "x-dark.svg": ".a{1}\n.a{2}\n</style>"}
    at = PurePosixPath("page.md")
    assert pictures.by_scheme("![an x](p/x.svg)", at, tmp_path) == (
        "![an x](p/x-light.svg#only-light)![an x](p/x-dark.svg#only-dark)"
    )
    plot = "![an x](x.png)"
    assert pictures.by_scheme(plot, at, tmp_path) == plot
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/x-dark.png").touch()
    assert pictures.by_scheme(plot, at, tmp_path) == (
        "![an x](x.png#only-light)![an x](x-dark.png#only-dark)"
    )


def test_a_page_outside_the_navigation_has_its_owners_bars() -> None:
    def page(tab: str, menu: str, text: str) -> str:
        return (
            f'<nav class="md-tabs">{tab}</nav><div data-md-type="navigation"{menu}'
            f'<div class="md-sidebar md-sidebar--secondary"></div><article>{text}</article>'
        )

    label = '<label class="md-nav__link md-nav__link--active" for="__toc">A</label>'
    inner = '<nav class="md-nav"><a href="#x"></a></nav>'
    contents = f'<nav class="md-nav md-nav--secondary">{inner}{inner}</nav>'
    theirs = page('<a href="a.html">', f'>{label}{contents}<a href="../b.html">', "")
    text = '<a href="https://x/a.html"><a href="../l/a.html">'
    own = page("", " hidden>", text)
    assert bars.owner(own, "m/c.html", ["l/a.html"]) == "l/a.html"
    assert bars.owner(own, "m/c.html", ["b.html"]) is None
    expected = page('<a href="../l/a.html">', ' hidden><a href="../b.html">', text)
    assert bars.with_bars(own, "m/c.html", theirs, "l/a.html") == expected


def test_notebooks_become_pages(tmp_path: Path) -> None:
    """Its notes and code in order, what was printed after it, and its pictures as files."""
    drawn = {"image/png": base64.b64encode(b"p").decode()}
    cell: dict[str, Any] = {
        "cell_type": "code",
        "source": ["print(1)"],
        "outputs": [
            {"output_type": "stream", "text": ["1\n"]},
            {"output_type": "display_data", "data": drawn},
        ],
    }
    installs = {
        "cell_type": "code",
        "source": ["# Installs it.\n", 'REPOSITORY = ""'],
        "outputs": [],
    }
    about = {"cell_type": "markdown", "source": ["# It\n", "\n", "about [a](a.md)"]}
    cells = [about, installs, cell]
    path = tmp_path / "it.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    page = notebooks.read_notebook(path, str.upper)
    assert page.text.startswith("# IT\n\n*One of the [notebooks](index.md)*\n\n[Download the")
    rest = "ABOUT [A](A.MD)\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n"
    assert page.text.endswith(rest + "![A plot for: It](it-1.png)\n")
    assert page.pictures == {"it-1.png": b"p"}
    assert page.file == path.read_text()
    assert "Colab" not in page.text
    page = notebooks.read_notebook(path, str.upper, "https://github.com/me/it/")
    assert 'REPOSITORY = "https://github.com/me/it/"' in json.loads(page.file)["cells"][1]["source"]
    assert "google.com/github/me/it/blob/main/examples/notebooks/it.ipynb)" in page.text
    assert "Its first cell installs what is missing." in page.text
    folder = tmp_path / notebooks.FOLDER
    folder.mkdir(parents=True)
    (folder / "it.ipynb").write_text(path.read_text())
    assert notebooks.needs_address(tmp_path) == ["it.ipynb"]
    notebooks.write_address("https://github.com/me/it/", tmp_path)
    assert (folder / "it.ipynb").read_text() == page.file
    assert notebooks.needs_address(tmp_path) == []
    with pytest.raises(DocsError, match="give the repository's address"):
        notebooks.write_address("", tmp_path)
    cell["outputs"] = [{"output_type": "error"}]
    path = tmp_path / "wrong.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(DocsError, match="neither text nor a PNG"):
        notebooks.read_notebook(path, str)
