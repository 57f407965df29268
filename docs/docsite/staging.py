"""Brings all pages together in a folder, from which zensical builds the site.

The pages of ``docs/`` and what they link to are copied with their links rewritten; annotated pages get
their columns; source files, the reference and the tables of measured rows are generated.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path, PurePosixPath

from docsite import (
    annotated,
    bars,
    benchmarks,
    colours,
    coverage,
    links,
    pictures,
    read_state,
    reference,
)
from docsite.code import ROOT, Lines
from docsite.errors import DocsError
from docsite.figures import Figures
from docsite.folds import Run
from docsite.highlighting import heading, listing, rest, whole_file
from docsite.maths import OPEN, Formulas
from docsite.notebooks import needs_address, read_notebook

HERE = Path(__file__).parent
STAGED = ROOT / ".docs-build"
"""Folder that zensical reads and writes; git ignores it."""
SITE = STAGED / "site"
HOME = PurePosixPath("index.md")
FINDINGS = Path("packages/statelaws/census/findings")
DESCRIPTION = "Part of memspan, models with memory: they read text of any length in constant memory"
"""Said of a page that has no paragraph of its own."""
CARD = "assets/style/card.png"
"""The picture that stands beside a link to the site."""


class Staging:
    """The site's Markdown, page by page."""

    def __init__(self, root: Path = ROOT, folder: Path = STAGED / "pages") -> None:
        self.root = root
        self.folder = folder
        self.done: set[Path] = set()
        self.waiting: list[Path] = []
        """Files of the repository that are linked to and not copied yet."""
        self.formulas = Formulas()
        self.figures = Figures(root)
        self.code: list[str] = []
        """HTML, of figures too, that stands in the pages as its number."""

    def write(self, at: PurePosixPath, text: str) -> None:
        """Write one page of the site."""
        path = self.folder / at
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def linked(self, path: Path) -> None:
        """Note that a file or folder must be there, too."""
        if path not in self.done:
            self.done.add(path)
            self.waiting.append(path)

    def copy_linked(self) -> None:
        """Copy whatever is linked to, and what that links to."""
        while self.waiting:
            path = self.waiting.pop()
            at = links.place(path, self.root)
            if path.suffix == ".svg":
                for name, text in pictures.variants(at.stem, self.root / path).items():
                    self.write(at.with_name(name), text)
            elif path.suffix in links.COPIED:
                (self.folder / at).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.root / path, self.folder / at)
                dark = path.with_stem(f"{path.stem}-dark")
                if path.suffix == ".png" and (self.root / dark).is_file():
                    shutil.copyfile(self.root / dark, self.folder / links.place(dark, self.root))
            elif path.suffix == ".ipynb":
                self._copy_notebook(path, at)
            elif (self.root / path).is_dir():
                self.write(at, self._folder_page(path, at))
            elif path.suffix == ".md":
                text = self.page(path, at)
                # Reports to other libraries use a learner's words for something else.
                self.write(at, _not_searched(text) if path.is_relative_to(FINDINGS) else text)
            else:
                code = self._later(whole_file(self.root / path))
                self.write(at, _not_searched(f"# `{path}`\n\n{code}\n"))

    def _copy_notebook(self, path: Path, at: PurePosixPath) -> None:
        notebook = read_notebook(
            self.root / path, lambda text: self._rewritten(text, path, at), repository()
        )
        self.write(at, notebook.text)
        folder = self.folder / at.parent
        (folder / path.name).write_text(notebook.file, encoding="utf-8")
        for name, picture in notebook.pictures.items():
            (folder / name).write_bytes(picture)

    def page(self, path: Path, at: PurePosixPath) -> str:
        """A page of Markdown with its links rewritten; annotated ones get their columns."""
        if path.parent in (annotated.FOLDER, annotated.LESSONS):
            return self._annotated(path, at)
        text = self._rewritten((self.root / path).read_text(encoding="utf-8"), path, at)
        if path == Path("benchmarks/README.md"):
            text += "\n" + benchmarks.measured_rows(self.root)
        # Home has nothing beside it in the navigation, and its code is wide.
        return "---\nhide:\n  - navigation\n---\n\n" + text if at == HOME else text

    def _rewritten(self, text: str, path: Path, at: PurePosixPath) -> str:
        folder = links.relative(PurePosixPath("figures"), at)
        text = self.figures.protected(text, folder, self._later)
        text = links.rewritten(text, path, at, self.linked, self.root)
        return self.formulas.protected(pictures.by_scheme(text, at, self.root), path)

    def reference_text(self, text: str, page: str) -> str:
        """A page of the reference as somebody wrote it, with its links rewritten."""
        return self._rewritten(text, Path("docs", page), PurePosixPath(page))

    def _annotated(self, path: Path, at: PurePosixPath) -> str:
        def show(lines: Lines, runs: list[Run]) -> str:
            source = Path(lines.place.path)
            self.linked(source)
            # Not a Markdown link, which the build would make one to the page's HTML.
            there = links.relative(links.place(source, self.root), at).removesuffix(".md") + ".html"
            code = self._later(listing(source, runs, self.root))
            return f'<div class="listing">{heading(lines, runs[0].low, there)}\n{code}</div>'

        page = annotated.read_page(path, self.root)
        page.blocks = [
            replace(block, text=self._rewritten(block.text, path, at)) for block in page.blocks
        ]
        text = annotated.in_columns(
            page,
            show,
            lambda path, runs: self._later(rest(path, runs, self.root)),
            lambda name: benchmarks.measured_span(name, self.root),
            self.root,
        )
        # Notes beside code need the room.
        hidden = "---\nhide:\n  - navigation\n---\n\n" if page.places else ""
        return hidden + text

    def described(self, page: str, name: str) -> str:
        """A built page with a description of its own, its first paragraph of prose.

        Services that show a link to it ask for its title, too, and for a picture where the site has
        an address.
        """
        title = _plain(_first(r"<h1[^>]*>(.*?)(?:<a |</h1>)", page))
        paragraphs = re.findall(r"<p>(.*?)</p>", page.partition("</h1>")[2], flags=re.S)
        first = next((_plain(text) for text in paragraphs if _says_enough(text)), "")
        about = textwrap.shorten(first or f"{title}. {DESCRIPTION}.", 200, placeholder=" …")
        card = {"og:type": "article", "og:title": title, "og:description": about}
        if address():
            card |= {
                "og:url": f"{address().rstrip('/')}/{name}",
                "og:image": f"{address().rstrip('/')}/{CARD}",
            }
        lines = [f'<meta property="{key}" content="{html.escape(card[key])}">' for key in card]
        lines.append('<meta name="twitter:card" content="summary_large_image">')
        described = f'<meta name="description" content="{html.escape(about)}">'
        found = re.compile(r'<meta name="description" content="[^"]*">')
        return found.sub(lambda _: "\n".join([described, *lines]), page, count=1)

    def _later(self, code: str) -> str:
        """Stands for HTML that is put in after the build: Markdown would take a minute over code."""
        self.code.append(code)
        return f'<div data-code="{len(self.code) - 1}"></div>'

    def put_in(self, page: str) -> str:
        """A built page with its formulas, figures and code, without the theme's empty lines, which
        are half of its navigation."""
        parts = re.split(r"(<pre.*?</pre>)", page, flags=re.S)
        parts[::2] = [re.sub(r"\n\s+", "\n", part) for part in parts[::2]]
        page = self.formulas.put_in("".join(parts))
        if 'class="passage"' in page:
            page = page.replace("<body", '<body class="annotated"', 1)
        # A heading's own headings in the table of contents, which may be called like the navigation's.
        page = re.sub(
            '<nav class="md-nav" aria-label="[^"]*"',
            '<nav class="md-nav" role="presentation"',
            page,
        )
        # The place of a link to a repository, empty where the build knows none.
        page = re.sub(r'<div class="md-header__source">\s*</div>', "", page)
        # The corner of a table is no heading of anything.
        page = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", page)
        return re.sub(
            r'<div data-code="(\d+)"></div>', lambda match: self.code[int(match[1])], page
        )

    def _folder_page(self, path: Path, at: PurePosixPath) -> str:
        files = [
            file.relative_to(self.root)
            for file in sorted((self.root / path).rglob("*"))
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".png"
        ]
        lines = [f"# `{path}`", ""]
        for file in files:
            self.linked(file)
            there = links.relative(links.place(file, self.root), at)
            lines.append(f"- [`{file.relative_to(path)}`]({there})")
        return _not_searched("\n".join(lines) + "\n")


def _plain(text: str) -> str:
    """HTML's words."""
    return " ".join(html.unescape(re.sub("<[^>]+>", "", text)).split())


def _says_enough(paragraph: str) -> bool:
    """Tell prose of some length from formulas, buttons and paragraphs of links."""
    words = _plain(paragraph)
    linked = sum(len(_plain(link)) for link in re.findall(r"<a .*?</a>", paragraph, flags=re.S))
    prose = OPEN not in paragraph and "md-button" not in paragraph
    return prose and len(words) > 90 and linked < len(words) / 5


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, flags=re.S)
    return found[1] if found else ""


def _not_searched(text: str) -> str:
    return f"---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n{text}"


def address() -> str:
    """Address of the site, from the environment's ``SITE_URL``; empty: on a disk."""
    return os.environ.get("SITE_URL", "")


def repository() -> str:
    """Public address of the repository, from the environment's ``REPOSITORY``; empty: it has none."""
    return os.environ.get("REPOSITORY", "")


def stage(root: Path = ROOT) -> Staging:
    """Make the folder that zensical reads; formulas and figures are put in after it.

    Raises:
        DocsError: a page is wrong, or what it names or links to is gone.
    """
    pages = annotated.pages(root)
    coverage.check(pages, root)
    shutil.rmtree(STAGED, ignore_errors=True)
    staging = Staging(root)
    generated = reference.reference_pages(root, staging.reference_text)
    for name in links.navigation():
        if name not in generated:
            staging.linked(_repository_path(name, root))
    for name, text in generated.items():
        staging.write(PurePosixPath(name), text)
    for path in reference.source_files(root):
        staging.linked(path)
    staging.copy_linked()
    for name, text in staging.figures.numbers.items():
        staging.write(PurePosixPath("figures", name), text)
    assets = staging.folder / "assets"
    shutil.copytree(
        HERE / "vendor", assets / "vendor", ignore=shutil.ignore_patterns("temml.min.js")
    )
    shutil.copytree(HERE / "style", assets / "style")
    schemes = ":root", '[data-md-color-scheme="slate"]'
    (assets / "style" / "colours.css").write_text(colours.css(*schemes), encoding="utf-8")
    shutil.copytree(HERE / "overrides", STAGED / "overrides")
    settings = (HERE / "zensical.toml").read_text(encoding="utf-8")
    for key, value in {"site_url": address(), "repo_url": repository()}.items():
        if value:
            settings = settings.replace(
                "\n[project]\n", f"\n[project]\n{key} = {json.dumps(value)}\n"
            )
    (STAGED / "zensical.toml").write_text(settings, encoding="utf-8")
    if repository() and (unaddressed := needs_address(root)):
        print(
            f"without the repository's address: {', '.join(unaddressed)}; python -m docsite notebooks"
        )
    for line in read_state.changed(pages, root):
        print(f"note to read again: {line}")
    return staging


def _repository_path(name: str, root: Path) -> Path:
    """The file behind a page of the navigation."""
    about = str(PurePosixPath(name).with_name("README.md"))
    for path in (f"docs/{name}", about, name.upper().replace(".MD", ".md")):
        if (root / path).is_file():
            return Path(path)
    raise DocsError(
        f"the navigation in docs/docsite/zensical.toml names {name}: there is no such page"
    )


def build() -> None:
    """Stage the pages, and have zensical build the site.

    Raises:
        DocsError: staging or zensical failed.
    """
    staged = stage()
    settings = str(STAGED / "zensical.toml")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    if done.returncode:
        raise DocsError(f"zensical ended with status {done.returncode}:\n{said[-2000:]}")
    if not address():
        # Both are for servers, and wrong without it.
        for name in ("404.html", "sitemap.xml"):
            (SITE / name).unlink()
    for page in SITE.rglob("*.html"):
        text = staged.described(page.read_text(encoding="utf-8"), page.relative_to(SITE).as_posix())
        page.write_text(staged.put_in(text), encoding="utf-8")
    listed = {str(PurePosixPath(name).with_suffix(".html")) for name in links.navigation()}
    for page in SITE.rglob("*.html"):
        name = page.relative_to(SITE).as_posix()
        text = page.read_text(encoding="utf-8")
        owner = None if name in listed else bars.owner(text, name, listed)
        if owner:
            owning = (SITE / owner).read_text(encoding="utf-8")
            page.write_text(bars.with_bars(text, name, owning, owner), encoding="utf-8")
    for index in (SITE / "search.json", SITE / "search.js"):
        index.write_text(
            staged.formulas.as_text(index.read_text(encoding="utf-8")), encoding="utf-8"
        )
