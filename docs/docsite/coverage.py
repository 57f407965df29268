"""Checks that an annotated page shows the files that it covers: every public function has its note, and
most lines stand open beside one. The rest is folded, never absent (see `docsite.folds`)."""

from __future__ import annotations

from pathlib import Path

from docsite.annotated import Page
from docsite.code import ROOT, public_functions, read, symbols
from docsite.errors import DocsError
from docsite.folds import shown

COVERED = (
    "src/memspan/models/compressive/compression.py",
    "src/memspan/models/compressive/layer.py",
    "src/memspan/models/compressive/model.py",
    "src/memspan/models/fast_weights/layer.py",
    "src/memspan/models/fast_weights/model.py",
    "src/memspan/models/feedback/layer.py",
    "src/memspan/models/feedback/model.py",
    "src/memspan/models/gated_delta_net/layer.py",
    "src/memspan/models/gated_delta_net/model.py",
    "src/memspan/models/matrix/backbone.py",
    "src/memspan/models/relative/backbone.py",
    "src/memspan/models/relative/attention.py",
    "src/memspan/models/transformer_xl/layer.py",
    "src/memspan/models/transformer_xl/model.py",
    "src/memspan/ops/fast_weights/chunked.py",
    "src/memspan/ops/fast_weights/feature_maps.py",
    "src/memspan/ops/fast_weights/reference.py",
    "src/memspan/ops/fast_weights/rules.py",
    "src/memspan/ops/feedback/attention.py",
    "src/memspan/ops/feedback/buffers.py",
    "src/memspan/ops/feedback/recurrence.py",
    "src/memspan/ops/feedback/steps.py",
    "src/memspan/ops/relative.py",
    "src/memspan/ops/convolution.py",
)
"""Files that a page must cover: the papers' models and their operations."""
MOST_FOLDED = 0.5
"""The share of a page's lines that may be folded."""


def check(pages: list[Page], root: Path = ROOT) -> None:
    """Raise unless pages explain what they should.

    Raises:
        DocsError: a public function of a covered file has no note and is not left out with a reason;
            most lines of a page are folded; a file has no page.
    """
    for page in pages:
        for path in page.covers:
            for name, line in public_functions(root / path).items():
                if not _explained(page, path, name, line):
                    raise DocsError(
                        f"{page.path}: {path}: {name} has no note: write one, or say in the block "
                        "left-out why not"
                    )
        for place in page.left_out:
            if place.symbol not in symbols(root / place.path):
                raise DocsError(f"{page.path}: left out, but not there: {place}")
        _check_lines(page, root)
    promised = {path for page in pages for path in page.covers}
    for path in COVERED:
        if path not in promised:
            raise DocsError(f"no page in docs/annotated covers {path}: name it in a block covers")


def _check_lines(page: Page, root: Path) -> None:
    """Check that most lines of the files that a page covers are open."""
    code = shown(page.places, page.covers, page.left_out, root)
    runs = [(path, run) for path in page.covers for run in code.folded(path)]
    n_lines = sum(len(read(root / path).splitlines()) for path in page.covers)
    n_folded = sum(len(run.numbers) for _, run in runs)
    if n_folded > MOST_FOLDED * n_lines:
        path, longest = max(runs, key=lambda found: len(found[1].numbers))
        raise DocsError(
            f"{page.path}: {n_folded} of {n_lines} lines are folded, more than half; the longest run "
            f"is {path}:{longest.low}-{longest.high}: write notes for some"
        )


def _explained(page: Page, path: str, name: str, line: int) -> bool:
    """Tell if a passage names the function or shows its ``def``, or the page leaves it out."""
    if any(place.path == path and place.symbol == name for place in page.left_out):
        return True
    shown = [lines for lines in page.places if lines.place.path == path]
    return any(
        lines.place.symbol == name or any(low <= line <= high for low, high in lines.ranges)
        for lines in shown
    )
